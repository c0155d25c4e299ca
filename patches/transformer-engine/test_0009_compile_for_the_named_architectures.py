"""The variable decides for both halves with the patch only; without it, both are compiled for what they were before."""

import re

import pytest

from patches.architectures import compiled_for
from patches.proof import Proof

RUNS_IN = "cpu"
EMULATED = "nvcc is a script that prints a version, torch one for the CPU, and nothing is compiled"

CORE, TORCH = "transformer_engine", "transformer_engine_torch"


@pytest.mark.parametrize(("named", "compiled"), [("90", ["90"]), ("80;90", ["80", "90"])])
def test_the_named_ones_are_compiled_with_the_patch_only(proof: Proof, named: str, compiled: list[str]) -> None:
    before, after = compiled_for(proof, NVTE_FRAMEWORK="pytorch", NVTE_CUDA_ARCHS=named)
    assert before == {CORE: [], TORCH: ["70", "80", "90"]}
    assert after == {CORE: [f"-DCMAKE_CUDA_ARCHITECTURES={named}"], TORCH: compiled}


def test_unnamed_they_are_the_same_on_both(proof: Proof) -> None:
    before, after = compiled_for(proof, NVTE_FRAMEWORK="pytorch")
    assert before[TORCH] == after[TORCH] == ["70", "80", "90"]
    listed = proof.pristine / "transformer_engine" / "common" / "CMakeLists.txt"
    (own,) = re.findall(r"set\(CMAKE_CUDA_ARCHITECTURES ([\d ]+)\)", listed.read_text())
    assert (before[CORE], after[CORE]) == ([], [f"-DCMAKE_CUDA_ARCHITECTURES={own.replace(' ', ';')}"])
