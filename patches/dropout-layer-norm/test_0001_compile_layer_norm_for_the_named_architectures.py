"""Architectures that nobody named are compiled for without the patch only; unnamed, those of setup.py are on both."""

import pytest

from patches.architectures import compiled_for
from patches.proof import Proof

RUNS_IN = "cpu"
EMULATED = "nvcc is a script that prints a version, torch one for the CPU, and nothing is compiled"

OWN = ["70", "80", "90"]


@pytest.mark.parametrize(("named", "compiled"), [("9.0", ["90"]), ("8.0;9.0", ["80", "90"])])
def test_the_named_ones_are_compiled_with_the_patch_only(proof: Proof, named: str, compiled: list[str]) -> None:
    before, after = compiled_for(proof, FOLDER="csrc/layer_norm", TORCH_CUDA_ARCH_LIST=named)
    assert before == {"dropout_layer_norm": OWN}
    assert after == {"dropout_layer_norm": compiled}


def test_unnamed_they_are_those_of_setup_on_both(proof: Proof) -> None:
    before, after = compiled_for(proof, FOLDER="csrc/layer_norm")
    assert before == after == {"dropout_layer_norm": OWN}
