"""The same of 1.7, whose non-reentrant checkpoint() does not even run forward on Python 3.8 without the patch."""

from patches.proof import Proof
from patches.scripts import CHECKPOINT

RUNS_IN = "cu11.4-torch2.0"
EMULATED = (
    "the compiled extension and the GPU's random state are stand-ins, and torch 2.0.1 is given noop_context_fn, which "
    "this release imports from torch 2.1"
)


def test_forward_and_backward_fail_without_the_patch_only(proof: Proof) -> None:
    pristine, patched = proof.run(CHECKPOINT)
    before, after = pristine.stdout.splitlines(), patched.stdout.splitlines()
    error = "AttributeError: __enter__"
    assert before[:2] == [f"reentrant forward {error}", f"non-reentrant {error}"], pristine.stderr
    assert len(after) == 5, patched.stderr
    assert all(line.endswith(" forward backward equal") for line in after), after
