"""The builder's flags name the CPU of the recipe with the patch, and the building machine's without it."""

from patches.proof import Proof

FLAGS = """
import os
from op_builder.cpu import CPUAdamBuilder

def flags():
    return [flag for flag in CPUAdamBuilder().cxx_args() if flag.startswith(("-march", "-D__"))]

print("named", *flags())
del os.environ["DS_CPU_ARCH"], os.environ["DS_SIMD_WIDTH"]
print("unnamed", *flags())
"""


def test_flags_follow_the_machine_without_the_patch_only(proof: Proof) -> None:
    pristine, patched = proof.run(FLAGS, DS_ACCELERATOR="cpu", DS_CPU_ARCH="x86-64-v3", DS_SIMD_WIDTH="AVX256")
    named, unnamed = pristine.stdout.splitlines()
    assert named.split()[1] == "-march=native", pristine.stderr
    assert patched.stdout.splitlines() == ["named -march=x86-64-v3 -D__AVX256__", unnamed], patched.stderr
