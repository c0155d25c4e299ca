"""The same of 1.5 to 1.7, which lay the check out otherwise."""

from patches.proof import Proof
from patches.scripts import BY_POSITION, CHECKPOINT

RUNS_IN = "cu11.4-torch2.0"
EMULATED = (
    "the compiled extension and the GPU's random state are stand-ins, and torch 2.0.1 is given noop_context_fn, which "
    "these releases import from torch 2.1"
)


def test_positional_arguments_fail_without_the_patch_only(proof: Proof) -> None:
    pristine, patched = proof.run(CHECKPOINT)
    error = "TypeError: unsupported operand type(s) for |: 'NoneType' and 'pybind11_type'"
    assert pristine.stdout.splitlines()[2:] == [f"{call} {error}" for call in BY_POSITION], pristine.stderr
    # 1.7's backward needs 0005 too, whose proof makes the same calls.
    rest = "AttributeError: __enter__" if proof.version == "1.7" else "backward equal"
    assert patched.stdout.splitlines()[2:] == [f"{call} forward {rest}" for call in BY_POSITION], patched.stderr
