"""A model with non-tensor extra state is saved with the patch, and not without it (A10); only as safetensors."""

from patches.proof import Proof
from patches.transformers.test_0002_keep_only_tensors_and_strings_on_save import SAVE
from patches.transformers.test_0003_skip_missing_non_tensor_state_on_load import BESIDE  # noqa: F401

RUNS_IN = "cpu"


def test_saving_fails_without_the_patch_only(proof: Proof) -> None:
    pristine, patched = proof.run(SAVE)
    symptom = "AttributeError: '_io.BytesIO' object has no attribute 'device'"
    assert pristine.stdout.splitlines() == [f"safetensors {symptom}", f"bin {symptom}"], pristine.stderr
    # Transformers 5 writes no other form, whatever it is asked for.
    assert patched.stdout.splitlines() == [f"{form} model.safetensors" for form in ("safetensors", "bin")], (
        patched.stderr
    )
