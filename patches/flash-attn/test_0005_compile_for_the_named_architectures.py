"""The variable decides with the patch only; without it, both compile for sm_80 and sm_90."""

import pytest

from patches.architectures import compiled_for
from patches.proof import Proof

RUNS_IN = "cpu"
EMULATED = "nvcc is a script that prints a version, torch one for the CPU, and nothing is compiled"


@pytest.mark.parametrize(("named", "compiled"), [("90", ["90"]), ("80", ["80"]), ("80;90", ["80", "90"])])
def test_the_named_ones_are_compiled_with_the_patch_only(proof: Proof, named: str, compiled: list[str]) -> None:
    before, after = compiled_for(proof, FLASH_ATTN_CUDA_ARCHS=named)
    assert before == {"flash_attn_2_cuda": ["80", "90"]}
    assert after == {"flash_attn_2_cuda": compiled}


def test_unnamed_they_are_the_same_on_both(proof: Proof) -> None:
    before, after = compiled_for(proof)
    assert before == after == {"flash_attn_2_cuda": ["80", "90"]}
