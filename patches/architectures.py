"""What the proofs of patches to lists of GPU architectures share."""

import re

import pytest

from patches.proof import Proof
from patches.scripts import SETUP

# A torch for the CPU looks for no toolkit: it gets SETUP's, made anew.
CUDA = """
import os, shutil, torch.utils.cpp_extension
shutil.rmtree("cuda", ignore_errors=True)  # of the run before
torch.utils.cpp_extension.CUDA_HOME = os.path.abspath("cuda")
"""

# Prints a line per extension: its name, and the architectures in its flags and in those that torch adds to them; of one
# that CMake builds, its flags.
SCRIPT = (
    CUDA
    + SETUP
    + """
for extension in extensions:
    flags = getattr(extension, "cmake_flags", None)
    if flags is None:
        flags = extension.extra_compile_args["nvcc"]
        flags = [flag for flag in flags + torch.utils.cpp_extension._get_cuda_arch_flags(flags) if "arch=" in flag]
    print("extension", extension.name, *flags)
"""
)


def compiled_for(proof: Proof, **variables: str) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """The architectures of each extension with CUDA 12.1, as ["80", "90"], or CMake's flags; pristine, then patched."""
    tried = proof.run(SCRIPT, NVCC="12.1", TORCH_CUDA="12.1", **variables)
    pristine, patched = (
        {
            line.split()[1]: re.findall(r"(?<=code=sm_)\d+|-D\S+", line)
            for line in done.stdout.splitlines()
            if line.startswith("extension ")
        }
        for done in tried
    )
    assert pristine, tried[0].stderr
    assert patched, tried[1].stderr
    return pristine, patched


# --- of both releases of flash-attn whose setup.py fixes them ---


@pytest.mark.parametrize(("named", "compiled"), [("90", ["90"]), ("80", ["80"]), ("80;90", ["80", "90"])])
def test_the_named_ones_are_compiled_with_the_patch_only(proof: Proof, named: str, compiled: list[str]) -> None:
    before, after = compiled_for(proof, FLASH_ATTN_CUDA_ARCHS=named)
    assert before == {"flash_attn_2_cuda": ["80", "90"]}
    assert after == {"flash_attn_2_cuda": compiled}


def test_unnamed_they_are_the_same_on_both(proof: Proof) -> None:
    before, after = compiled_for(proof)
    assert before == after == {"flash_attn_2_cuda": ["80", "90"]}
