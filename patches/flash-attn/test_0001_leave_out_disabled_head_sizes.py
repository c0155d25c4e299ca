"""Kernels that the variables name are neither compiled nor called with the patch, and both without it."""

import json

from patches.proof import Proof
from patches.scripts import SETUP
from recipes.model import Catalogue

RUNS_IN = "cpu"
EMULATED = "nvcc is a script that prints a version, torch one for the CPU, and the kernels are compiled stand-ins"

SETTINGS = {"BUILD_TARGET": "cuda", "NVCC": "13.0", "NVCC_THREADS": "1", "TORCH_CUDA": "13.0"}

CUDA = """
import os, shutil, torch.utils.cpp_extension
shutil.rmtree("cuda", ignore_errors=True)  # of the run before
torch.utils.cpp_extension.CUDA_HOME = os.path.abspath("cuda")  # a torch for the CPU looks for none
"""
PRINT = "import json; print(*extensions[0].sources, json.dumps(extensions[0].extra_compile_args), sep='\\n')"
SCRIPT = CUDA + SETUP + PRINT

# HEADDIM_SWITCH calls a kernel that is declared for every head size and defined for those of KERNELS, as flash_api.cpp
# does. Prints the kernel that each size runs or how it is refused; or which kernels the linker misses.
DISPATCH = """
import os, re, subprocess, torch
from torch.utils.cpp_extension import include_paths

program = r'''
#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>
#include <iostream>
#include "static_switch.h"

namespace flash {
template <int HeadDim> void kernel();
KERNELS
void call(int size) { HEADDIM_SWITCH(size, [&] { kernel<kHeadDim>(); }); }
}

int main() {
  for (int size : {24, 32, 40, 64, 72, 96, 104, 128, 160, 192, 256}) {
    std::cout << size << ": ";
    try { flash::call(size); }
    catch (const c10::Error& error) { std::cout << error.what_without_backtrace() << std::endl; }
  }
}
'''
kernel = "template <> void kernel<{0}>() {{ std::cout << {0} << std::endl; }}"
kernels = map(kernel.format, os.environ["KERNELS"].split())
with open(os.environ["HOME"] + "/call.cpp", "w") as file:
    file.write(program.replace("KERNELS", "\\n".join(kernels)))
libraries = os.path.join(torch.__path__[0], "lib")
built = subprocess.run(
    ["g++", "-std=c++17", *os.environ["FLAGS"].split(), file.name, "-o", file.name[:-4],
     "-Icsrc/flash_attn/src", *("-isystem" + path for path in include_paths()),
     "-L" + libraries, "-lc10", "-Wl,-rpath," + libraries],
    env={**os.environ, "LC_ALL": "C"}, stderr=subprocess.PIPE, text=True,
)
if built.returncode:
    missing = set(re.findall("undefined reference to `(.*)'", built.stderr))
    raise SystemExit("\\n".join(sorted(missing)) or built.stderr)
raise SystemExit(subprocess.run([file.name[:-4]]).returncode)
"""


def named() -> dict[str, str]:
    """The variables as the recipe sets them."""
    (env,) = [one.env for one in Catalogue().packages["flash-attn"].release if one.version == "2.8.3"]
    return {name: value for name, value in env.items() if "_DISABLE_HDIM" in name}


def test_named_sizes_are_left_out_with_the_patch_only(proof: Proof) -> None:
    unnamed = proof.run(SCRIPT, **SETTINGS)
    before, after = proof.run(SCRIPT, **SETTINGS, **named())
    assert unnamed[0].stdout == unnamed[1].stdout == before.stdout, unnamed[0].stderr + unnamed[1].stderr
    *every, flags = before.stdout.splitlines()[-74:]
    *some, more = after.stdout.splitlines()[-26:]
    kernels = [source for source in every if source.endswith(".cu")]
    assert every == ["csrc/flash_attn/flash_api.cpp", *kernels]
    assert len(kernels) == 72
    assert some == [every[0], *(one for one in kernels if "_hdim64_" in one or "_hdim128_" in one)], after.stderr
    assert len(some) == 25
    macros = [f"-DFLASHATTENTION_DISABLE_HDIM{size}" for size in (32, 96, 192, 256)]
    cxx, nvcc = json.loads(flags)["cxx"], json.loads(flags)["nvcc"]
    assert json.loads(more) == {"cxx": [*cxx, *macros], "nvcc": [*nvcc[:-2], *macros, *nvcc[-2:]]}
    assert nvcc[-2:] == ["--threads", "1"]


def test_without_a_size_the_rest_links_and_it_is_refused_with_the_patch_only(proof: Proof) -> None:
    flags = " ".join(f"-D{name.replace('FLASH_ATTENTION', 'FLASHATTENTION')}" for name in named())
    before, after = proof.run(DISPATCH, KERNELS="64 128", FLAGS=flags)
    assert before.stderr.splitlines() == sorted(f"void flash::kernel<{size}>()" for size in (32, 96, 192, 256))

    def refusal(size: int, kernel: int) -> str:
        return (
            f"{size}: flash-attn was built without kernels for head size {size} (it has 64, 128): pad to a larger one "
            f"of these, or rebuild without FLASH_ATTENTION_DISABLE_HDIM{kernel}."
        )

    assert after.stdout.splitlines() == [
        refusal(24, 32), refusal(32, 32), "40: 64", "64: 64", refusal(72, 96), refusal(96, 96), "104: 128", "128: 128",
        refusal(160, 192), refusal(192, 192), refusal(256, 256),
    ], after.stderr  # fmt: skip


def test_with_every_size_each_runs_its_own_kernel_on_both(proof: Proof) -> None:
    before, after = proof.run(DISPATCH, KERNELS="32 64 96 128 192 256", FLAGS="")
    assert before.stdout == after.stdout, before.stderr + after.stderr
    kernels = [line.split(": ")[1] for line in after.stdout.splitlines()]
    assert kernels == ["32", "32", "64", "64", "96", "96", "128", "128", "192", "192", "256"]


def test_the_option_says_what_the_recipe_builds() -> None:
    sizes = {"32", "64", "96", "128", "192", "256"} - {name.partition("HDIM")[2] for name in named()}
    assert set(named().values()) == {"TRUE"}
    assert sizes == {"64", "128"}
    users = [one for one in Catalogue().targets.values() if one.packages.get("flash-attn") == "2.8.3"]
    assert [one.options.get("flash-attn", "")[:26] for one in users] == ["head sizes 64 and 128 only"]
