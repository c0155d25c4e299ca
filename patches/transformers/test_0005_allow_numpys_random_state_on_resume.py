"""A Trainer restores the random states of a checkpoint with the patch, and not without it; none of its code runs."""

from patches.proof import Proof
from patches.transformers.test_0001_skip_non_tensor_state_on_load import BESIDE  # noqa: F401

RUNS_IN = "cpu"

RESUME = """
import os, pickle, random, tempfile, types
import numpy as np, torch, transformers
from transformers import Trainer

class Code:
    def __reduce__(self):
        return print, ("this must not run",)

def drawn():
    return random.random(), float(np.random.rand()), float(torch.rand(()))

assert transformers.__file__.startswith(os.getcwd()), transformers.__file__
trainer = types.SimpleNamespace(args=types.SimpleNamespace(world_size=1))
rebuild = np.empty(0).__reduce__()[0]
for writer in ("numpy.core.multiarray", "numpy._core.multiarray", "an attacker"):
    with tempfile.TemporaryDirectory() as folder:
        if writer != "an attacker":
            rebuild.__module__ = writer  # what NumPy 1 or 2 writes into a checkpoint
        Trainer._save_rng_state(trainer, folder)
        file, expected = folder + "/rng_state.pth", drawn()
        if writer == "an attacker":
            torch.save({**torch.load(file, weights_only=False), "code": Code()}, file)
        try:
            Trainer._load_rng_state(trainer, folder)
            print(writer, "restored" if drawn() == expected else "other numbers")
        except pickle.UnpicklingError as error:
            print(writer, str(error).split(".")[0], "|", str(error).partition("GLOBAL ")[2].split(" was")[0])
"""


def test_random_states_are_restored_with_the_patch_only(proof: Proof) -> None:
    pristine, patched = proof.run(RESUME)
    names = [f"numpy.{core}.multiarray" for core in ("core", "_core")]
    refused = [f"{name} Weights only load failed | {name}._reconstruct" for name in names]
    assert pristine.stdout.splitlines()[:2] == refused, pristine.stderr
    *restored, attack = patched.stdout.splitlines()
    assert restored == [f"{name} restored" for name in names], patched.stderr
    assert attack.startswith("an attacker Weights only load failed | ") and "print" in attack, attack
