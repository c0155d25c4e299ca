"""Architectures that nobody named are compiled for without the patch only; unnamed, those of setup.py are on both."""

import pytest

from patches.architectures import compiled_for
from patches.proof import Proof

RUNS_IN = "cpu"
EMULATED = "nvcc is a script that prints a version, torch one for the CPU, and nothing is compiled"

OPTIONS = "--cuda_ext --fast_multihead_attn"
OWN = ["70", "80", "86", "90"]


@pytest.mark.parametrize(("named", "compiled"), [("9.0", ["90"]), ("8.0;9.0", ["80", "90"])])
def test_the_named_ones_are_compiled_with_the_patch_only(proof: Proof, named: str, compiled: list[str]) -> None:
    before, after = compiled_for(proof, OPTIONS=OPTIONS, TORCH_CUDA_ARCH_LIST=named)
    for name in ("fast_multihead_attn", "fused_weight_gradient_mlp_cuda"):
        assert before.pop(name) == OWN
        assert after.pop(name) == compiled
    assert before == after
    assert before["amp_C"] == before["fused_layer_norm_cuda"] == compiled


def test_unnamed_they_are_those_of_setup_on_both(proof: Proof) -> None:
    before, after = compiled_for(proof, OPTIONS=OPTIONS)
    assert before == after
    assert before["fast_multihead_attn"] == before["fused_weight_gradient_mlp_cuda"] == OWN
