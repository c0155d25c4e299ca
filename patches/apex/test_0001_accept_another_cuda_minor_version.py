"""setup.py takes nvcc 11.4 for a torch of another CUDA 11 with the patch only, and never one of another major (B49)."""

import pytest

from patches.proof import Proof
from patches.scripts import SETUP

RUNS_IN = "cu11.4-torch2.0"
EMULATED = "nvcc is a script that prints a version, nothing is compiled, and torch 2.0.1 names the CUDA of the target's"

SCRIPT = SETUP + 'print("setup() was called for", *(extension.name for extension in extensions))'
OPTIONS = "--cpp_ext --cuda_ext"
TORCH_CUDA = {"22.04-dev": "11.3", "23.05": "11.7"}
ERROR = "RuntimeError: Cuda extensions are being compiled with a version of Cuda that does not match"
WARNING = "Warning: nvcc is of another CUDA minor version"


def test_another_minor_version_is_refused_without_the_patch_only(proof: Proof) -> None:
    cuda = TORCH_CUDA[proof.version]
    pristine, patched = proof.run(SCRIPT, OPTIONS=OPTIONS, NVCC="11.4", TORCH_CUDA=cuda)
    assert ERROR in pristine.stderr
    assert f"compiled with Cuda {cuda}." in pristine.stderr
    assert {"apex_C", "amp_C", "fused_layer_norm_cuda"} <= extensions(patched.stdout), patched.stderr
    assert f"{WARNING} than PyTorch's {cuda}." in patched.stdout


@pytest.mark.parametrize("nvcc", ["10.2", "12.1"])
def test_another_major_version_stays_refused(proof: Proof, nvcc: str) -> None:
    for tried in proof.run(SCRIPT, OPTIONS=OPTIONS, NVCC=nvcc, TORCH_CUDA=TORCH_CUDA[proof.version]):
        assert ERROR in tried.stderr
        assert not extensions(tried.stdout)


def test_the_same_version_is_taken_without_a_warning(proof: Proof) -> None:
    cuda = TORCH_CUDA[proof.version]
    pristine, patched = proof.run(SCRIPT, OPTIONS=OPTIONS, NVCC=cuda, TORCH_CUDA=cuda)
    assert extensions(patched.stdout) == extensions(pristine.stdout) != set(), patched.stderr
    assert WARNING not in patched.stdout


def extensions(printed: str) -> set[str]:
    """The extensions that setup() was called for; none if it was not."""
    return {name for line in printed.splitlines() if line.startswith("setup() ") for name in line.split()[4:]}
