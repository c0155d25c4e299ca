"""Proofs of where Transformer Engine looks for CUDA's libraries and headers; two of its wheels hold that file."""

import pytest

from patches.proof import Proof

# Makes `module` of transformer_engine/common/__init__.py, without its last part, which loads the libraries.
_COMMON = """
source = Path("transformer_engine/common/__init__.py").read_text()
whole, last, _ = source.partition('if "NVTE_PROJECT_BUILDING" not in os.environ')
assert last
module = {"__name__": "transformer_engine.common", "__file__": "__init__.py"}
exec(compile(whole, "__init__.py", "exec"), module)
"""

# Transformer Engine's functions that load a CUDA library. HAS says who has a libcudnn, the environment or the system;
# prints what is loaded.
LOADED = f"""
import ctypes, os, sysconfig
from pathlib import Path

def plant(*parts):
    path = Path(os.environ["HOME"], *parts)
    path.parent.mkdir(parents=True)
    path.touch()

if "environment" in os.environ["HAS"]:
    plant("site", "nvidia", "cudnn", "lib", "libcudnn.so.9")
if "system" in os.environ["HAS"]:
    plant("cuda", "lib64", "libcudnn.so")
os.environ["CUDNN_PATH"] = os.environ["HOME"] + "/cuda"
sysconfig.get_path = lambda name: os.environ["HOME"] + "/site"
loaded = []

def load(path, mode):
    if "/" not in path:
        raise OSError("the linker finds none")
    loaded.append(path)

ctypes.CDLL = load

{_COMMON}
module["_load_cuda_library"]("cudnn")
print(*(path.replace(os.environ["HOME"], "") for path in loaded))
"""

ENVIRONMENT, SYSTEM = "/site/nvidia/cudnn/lib/libcudnn.so.9", "/cuda/lib64/libcudnn.so"


@pytest.mark.parametrize(
    ("has", "before", "after"),
    [
        ("environment system", SYSTEM, ENVIRONMENT),
        ("system", SYSTEM, SYSTEM),
        ("environment", ENVIRONMENT, ENVIRONMENT),
    ],
)
def test_the_environment_comes_first_with_the_patch_only(proof: Proof, has: str, before: str, after: str) -> None:
    pristine, patched = proof.run(LOADED, HAS=has)
    assert pristine.stdout.strip() == before, pristine.stderr
    assert patched.stdout.strip() == after, patched.stderr


# The folder that Transformer Engine takes for the CUDA headers, in an environment that has CORE, the wheel of its
# library, and that CUDA's headers as wheels place them; "none" where it takes none.
HEADERS = f"""
import importlib.metadata, os, sys
from pathlib import Path

layout = "cu13" if os.environ["CORE"].endswith("cu13") else "cuda_runtime"
header = Path(os.environ["HOME"], "site", "nvidia", layout, "include", "cuda_runtime.h")
header.parent.mkdir(parents=True)
header.touch()
sys.path.insert(0, os.environ["HOME"] + "/site")

def distribution(name):
    if name != os.environ["CORE"]:
        raise importlib.metadata.PackageNotFoundError(name)

importlib.metadata.distribution = distribution
{_COMMON}
print(module["_nvidia_cudart_include_dir"]().replace(os.environ["HOME"], "") or "none")
"""


@pytest.mark.parametrize(
    ("core", "before", "after"),
    [
        ("transformer-engine-cu13", "none", "/site/nvidia/cu13"),
        ("transformer-engine-cu12", "/site/nvidia/cuda_runtime", "/site/nvidia/cuda_runtime"),
    ],
)
def test_the_headers_of_cuda_13_are_found_with_the_patch_only(proof: Proof, core: str, before: str, after: str) -> None:
    pristine, patched = proof.run(HEADERS, CORE=core)
    assert pristine.stdout.strip() == before, pristine.stderr
    assert patched.stdout.strip() == after, patched.stderr
