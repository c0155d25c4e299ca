"""Of a library that the environment and the system have, the environment's is loaded with the patch only."""

import pytest

from patches.proof import Proof

RUNS_IN = "cpu"
EMULATED = "what is loaded is noted, not loaded: the libraries are empty files"

# The module's own functions, without its last part, which loads the real libraries.
SCRIPT = """
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

source = Path("transformer_engine/common/__init__.py").read_text()
whole, last, _ = source.partition('if "NVTE_PROJECT_BUILDING" not in os.environ')
assert last
module = {"__name__": "transformer_engine.common", "__file__": "__init__.py"}
exec(compile(whole, "__init__.py", "exec"), module)
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
    pristine, patched = proof.run(SCRIPT, HAS=has)
    assert pristine.stdout.strip() == before, pristine.stderr
    assert patched.stdout.strip() == after, patched.stderr
