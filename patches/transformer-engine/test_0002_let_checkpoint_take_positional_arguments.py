"""checkpoint() takes its settings by position, the older form of the call, on Python 3.8 with the patch only."""

from packaging.version import Version

from patches.proof import Proof
from patches.scripts import BY_POSITION, CHECKPOINT

RUNS_IN = "cu11.4-torch2.0"
EMULATED = (
    "the compiled extension and the GPU's random state are stand-ins, and torch 2.0.1 is given the two names that "
    "these releases import from torch 2.1"
)


def test_positional_arguments_fail_without_the_patch_only(proof: Proof) -> None:
    pristine, patched = proof.run(CHECKPOINT)
    error = "TypeError: unsupported operand type(s) for |: 'NoneType' and 'pybind11_type'"
    assert pristine.stdout.splitlines()[2:] == [f"{call} {error}" for call in BY_POSITION], pristine.stderr
    # Until 1.11 the backward needs 0003 too, whose proof makes the same calls.
    rest = "AttributeError: __enter__" if Version(proof.version) < Version("1.11") else "backward equal"
    assert patched.stdout.splitlines()[2:] == [f"{call} forward {rest}" for call in BY_POSITION], patched.stderr
