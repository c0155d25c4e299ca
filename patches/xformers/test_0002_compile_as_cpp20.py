"""The flags name C++20, which torch's headers ask for, with the patch, and C++17, which they refuse, without it."""

from patches.proof import Proof
from patches.scripts import SETUP, STANDARDS

RUNS_IN = "cu13.2-torch2.15"
EMULATED = "nvcc is a script that prints a version, and nothing is compiled but torch's headers"

CUDA = """
import os, torch.utils.cpp_extension
torch.utils.cpp_extension.CUDA_HOME = os.path.abspath("cuda")
"""


def test_the_headers_are_taken_with_the_patch_only(proof: Proof) -> None:
    pristine, patched = proof.run(
        CUDA + SETUP + STANDARDS, NVCC="13.2", TORCH_CUDA="13.2", FORCE_CUDA="1",
        TORCH_CUDA_ARCH_LIST="9.0", XFORMERS_DISABLE_FLASH_ATTN="1",
    )  # fmt: skip
    before, after = pristine.stdout.splitlines()[-2:], patched.stdout.splitlines()[-2:]
    assert before[0] == "extension xformers._C -std=c++17 -std=c++17", pristine.stderr
    assert "#error C++20 or later compatible compiler is required to use ATen." in before[1]
    assert after == ["extension xformers._C -std=c++20 -std=c++20", "taken"], patched.stderr
