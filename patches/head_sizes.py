"""What the proofs of patches share that leave head sizes out of flash-attn."""

from __future__ import annotations

import json
from subprocess import CompletedProcess

from patches.architectures import CUDA
from patches.proof import Proof
from patches.scripts import SETUP
from recipes.catalogue.load import Catalogue

SIZES = {
    "2.8.3": (32, 64, 96, 128, 192, 256),
    "2.5.8": (32, 64, 96, 128, 160, 192, 224, 256),
    "2.3.3": (32, 64, 96, 128, 160, 192, 224, 256),
    "2.1.0": (32, 64, 96, 128, 160, 192, 224, 256),
}
FILES = {"2.8.3": 72, "2.5.8": 48, "2.3.3": 48, "2.1.0": 32}
SWITCH = {
    "2.8.3": "HEADDIM_SWITCH",
    "2.5.8": "HEADDIM_SWITCH",
    "2.3.3": "FWD_HEADDIM_SWITCH",
    "2.1.0": "FWD_HEADDIM_SWITCH",
}
TOOLKIT = {"2.8.3": "13.0", "2.5.8": "12.1", "2.3.3": "12.1", "2.1.0": "12.1"}
BUILT = (64, 128)
TRIED = (24, 32, 40, 64, 72, 96, 104, 128, 160, 192, 224, 256)

PRINT = "import json; print(*extensions[0].sources, json.dumps(extensions[0].extra_compile_args), sep='\\n')"
SCRIPT = CUDA + SETUP + PRINT

# The macro SWITCH calls a kernel that is declared for every head size and defined for those of KERNELS, as
# flash_api.cpp does. Prints the kernel that each size runs or how it is refused; or which kernels the linker misses.
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
void call(int size) { SWITCH(size, [&] { kernel<kHeadDim>(); }); }
}

int main() {
  for (int size : {24, 32, 40, 64, 72, 96, 104, 128, 160, 192, 224, 256}) {
    std::cout << size << ": ";
    try { flash::call(size); }
    catch (const c10::Error& error) { std::cout << error.what_without_backtrace() << std::endl; }
  }
}
'''
kernel = "template <> void kernel<{0}>() {{ std::cout << {0} << std::endl; }}"
kernels = map(kernel.format, os.environ["KERNELS"].split())
with open(os.environ["HOME"] + "/call.cpp", "w") as file:
    file.write(program.replace("SWITCH", os.environ["SWITCH"]).replace("KERNELS", "\\n".join(kernels)))
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


def named(version: str) -> dict[str, str]:
    """The variables as the recipe sets them."""
    (env,) = [release.env for release in Catalogue().packages["flash-attn"].release if release.version == version]
    return {name: value for name, value in env.items() if "_DISABLE_HDIM" in name}


def kernel_of(proof: Proof, size: int) -> int:
    """The smallest kernel that a head size fits in."""
    return next(kernel for kernel in SIZES[proof.version] if size <= kernel)


def dispatched(
    proof: Proof, kernels: tuple[int, ...], flags: str
) -> tuple[CompletedProcess[str], CompletedProcess[str]]:
    """Both runs of DISPATCH with these kernels."""
    return proof.run(DISPATCH, KERNELS=" ".join(map(str, kernels)), FLAGS=flags, SWITCH=SWITCH[proof.version])


def test_named_sizes_are_left_out_with_the_patch_only(proof: Proof) -> None:
    cuda = TOOLKIT[proof.version]
    settings = {"BUILD_TARGET": "cuda", "NVCC": cuda, "NVCC_THREADS": "1", "TORCH_CUDA": cuda}
    unnamed = proof.run(SCRIPT, **settings)
    before, after = proof.run(SCRIPT, **settings, **named(proof.version))
    assert unnamed[0].stdout == unnamed[1].stdout == before.stdout, unnamed[0].stderr + unnamed[1].stderr
    files = FILES[proof.version]
    *every, flags = before.stdout.splitlines()[-files - 2 :]
    kernels = [source for source in every if source.endswith(".cu")]
    assert every == ["csrc/flash_attn/flash_api.cpp", *kernels]
    assert len(kernels) == files
    built = [kernel for kernel in kernels if any(f"_hdim{size}_" in kernel for size in BUILT)]
    assert len(built) == files * len(BUILT) // len(SIZES[proof.version])
    *some, more = after.stdout.splitlines()[-len(built) - 2 :]
    assert some == [every[0], *built], after.stderr
    macros = [f"-DFLASHATTENTION_DISABLE_HDIM{size}" for size in SIZES[proof.version] if size not in BUILT]
    cxx, nvcc = json.loads(flags)["cxx"], json.loads(flags)["nvcc"]
    assert json.loads(more) == {"cxx": [*cxx, *macros], "nvcc": [*nvcc[:-2], *macros, *nvcc[-2:]]}
    assert nvcc[-2] == "--threads"


def test_without_a_size_the_rest_links_and_it_is_refused_with_the_patch_only(proof: Proof) -> None:
    missing = [size for size in SIZES[proof.version] if size not in BUILT]
    flags = " ".join(f"-DFLASHATTENTION_DISABLE_HDIM{size}" for size in missing)
    before, after = dispatched(proof, BUILT, flags)
    assert before.stderr.splitlines() == sorted(f"void flash::kernel<{size}>()" for size in missing)

    def answer(size: int) -> str:
        kernel = kernel_of(proof, size)
        refusal = (
            f"flash-attn was built without kernels for head size {size} (it has 64, 128): pad to a larger one of "
            f"these, or rebuild without FLASH_ATTENTION_DISABLE_HDIM{kernel}."
        )
        return f"{size}: {kernel if kernel in BUILT else refusal}"

    assert after.stdout.splitlines() == [answer(size) for size in TRIED], after.stderr


def test_with_every_size_each_runs_its_own_kernel_on_both(proof: Proof) -> None:
    before, after = dispatched(proof, SIZES[proof.version], "")
    assert before.stdout == after.stdout, before.stderr + after.stderr
    assert after.stdout.splitlines() == [f"{size}: {kernel_of(proof, size)}" for size in TRIED]


def test_the_backward_goes_through_the_same_switch_with_the_patch_only(proof: Proof) -> None:
    pristine, patched = (
        (tree / "csrc" / "flash_attn" / "flash_api.cpp").read_text().split("void run_mha_bwd(")[1].split("\n}\n")[0]
        for tree in (proof.pristine, proof.patched)
    )
    assert ("FWD_HEADDIM_SWITCH" in pristine, "FWD_HEADDIM_SWITCH" in patched) == (False, True)
    assert (pristine.count("run_mha_bwd_<"), patched.count("run_mha_bwd_<elem_type, kHeadDim>")) == (8, 1)


def test_the_option_says_what_the_recipe_builds(proof: Proof) -> None:
    missing = [size for size in SIZES[proof.version] if size not in BUILT]
    assert named(proof.version) == {f"FLASH_ATTENTION_DISABLE_HDIM{size}": "TRUE" for size in missing}
    users = [target for target in Catalogue().targets.values() if target.packages.get("flash-attn") == proof.version]
    assert {target.options.get("flash-attn", "")[:26] for target in users} == {"head sizes 64 and 128 only"}
