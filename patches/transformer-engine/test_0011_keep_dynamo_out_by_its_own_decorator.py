"""Beside a torch without _disable_dynamo, transformer_engine.pytorch.distributed imports with the patch only."""

from patches.proof import Proof
from patches.scripts import CHECKPOINT

RUNS_IN = "cu11.4-torch2.0"
EMULATED = (
    "the compiled extension and the GPU's random state are stand-ins, and torch 2.0.1, which lacks the function, is "
    "given the other name that these releases import from torch 2.1"
)
GIVEN = "    torch._disable_dynamo = lambda function: function\n"


def test_it_imports_with_the_patch_only(proof: Proof) -> None:
    assert CHECKPOINT.count(GIVEN) == 1
    pristine, patched = proof.run(CHECKPOINT.replace(GIVEN, ""))
    assert pristine.stderr.splitlines()[-1] == "AttributeError: module 'torch' has no attribute '_disable_dynamo'"
    after = patched.stdout.splitlines()
    assert len(after) == 5, patched.stderr
    assert all(line.endswith(" forward backward equal") for line in after), after
