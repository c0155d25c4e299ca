"""The builder's flags name the CPU of the recipe with the patch, and the building machine's without it."""

from patches.proof import Proof

RUNS_IN = "cpu"
EMULATED = "the building machine's CPU is said to have AVX-512"

FLAGS = """
import cpuinfo, os
from op_builder.cpu import CPUAdamBuilder

cpuinfo.get_cpu_info = lambda: {"arch": "X86_64", "flags": ["avx2", "avx512f"]}

def flags():
    return [flag for flag in CPUAdamBuilder().cxx_args() if flag.startswith(("-march", "-D__"))]

print("named", *flags())
del os.environ["DS_CPU_ARCH"], os.environ["DS_SIMD_WIDTH"]
print("unnamed", *flags())
"""


def test_flags_follow_the_machine_without_the_patch_only(proof: Proof) -> None:
    pristine, patched = proof.run(FLAGS, DS_ACCELERATOR="cpu", DS_CPU_ARCH="x86-64-v3", DS_SIMD_WIDTH="AVX256")
    machine = "-march=native -D__AVX512__"
    assert pristine.stdout.splitlines() == [f"named {machine}", f"unnamed {machine}"], pristine.stderr
    assert patched.stdout.splitlines() == ["named -march=x86-64-v3 -D__AVX256__", f"unnamed {machine}"], patched.stderr
