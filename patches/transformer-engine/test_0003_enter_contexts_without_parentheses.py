"""checkpoint() recomputes in the backward on Python 3.8 with the patch only, and to the same gradients."""

from patches.proof import Proof
from patches.scripts import CHECKPOINT

RUNS_IN = "cu11.4-torch2.0"
EMULATED = (
    "the compiled extension and the GPU's random state are stand-ins, and torch 2.0.1 is given the two names that "
    "these releases import from torch 2.1"
)


def test_backward_fails_without_the_patch_only(proof: Proof) -> None:
    pristine, patched = proof.run(CHECKPOINT)
    before, after = pristine.stdout.splitlines(), patched.stdout.splitlines()
    assert before[:2] == [f"{call} forward AttributeError: __enter__" for call in ("reentrant", "non-reentrant")], (
        pristine.stderr
    )
    assert len(after) == 5, patched.stderr
    assert all(line.endswith(" forward backward equal") for line in after), after
