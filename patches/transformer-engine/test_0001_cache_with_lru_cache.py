"""Python 3.8 imports the build's helpers and the whole package with the patch only (A06)."""

import shutil
import subprocess
import sys
from pathlib import Path

from patches.proof import Proof

RUNS_IN = "cu11.4-torch2.0"
EMULATED = (
    "both compiled libraries, flash-attn and pydantic are stand-ins, and torch 2.0.1 is given the two names that this "
    "release imports from torch 2.1"
)

BUILD = """
import os, sys
assert sys.version_info[:2] == (3, 8), sys.version
from build_tools import utils
assert utils.__file__.startswith(os.getcwd()), utils.__file__

sys.argv.append("--debug")  # the first call takes it away: only the memory can answer the second
print("debug", utils.debug_build_enabled(), utils.debug_build_enabled(), "--debug" in sys.argv)
os.makedirs("cuda/bin")
open("cuda/bin/nvcc", "w").close()
os.environ["CUDA_HOME"] = "cuda"
home, nvcc = utils.cuda_path()
print("nvcc", home, nvcc, utils.cuda_path() is utils.cuda_path())
"""

# What a user writes, `import transformer_engine.pytorch`, with a stand-in for each of the two compiled libraries.
PACKAGE = """
import contextlib, ctypes, dataclasses, importlib.abc, importlib.util, os, sys
from unittest.mock import MagicMock
import torch, torch.utils.checkpoint
assert sys.version_info[:2] == (3, 8), sys.version

torch._disable_dynamo = lambda function: function
torch.utils.checkpoint.noop_context_fn = lambda: (contextlib.nullcontext(), contextlib.nullcontext())
sys.modules["pydantic"], sys.modules["pydantic.dataclasses"] = MagicMock(), dataclasses
for name in ("flash_attn", "flash_attn.flash_attn_interface", "flash_attn_2_cuda"):
    sys.modules[name] = MagicMock()
for name, version in ("transformer_engine", "1.8.0"), ("flash_attn", "2.5.8"):
    os.mkdir(name + "-" + version + ".dist-info")
    with open(name + "-" + version + ".dist-info/METADATA", "w") as metadata:
        metadata.write("Metadata-Version: 2.1\\nName: " + name + "\\nVersion: " + version + "\\n")

libraries = "libtransformer_engine.so", "transformer_engine_torch.cpython-38-x86_64-linux-gnu.so"
extension = MagicMock(__all__=["get_cudnn_version"])
extension.get_cudnn_version.return_value = 8905

class Extension(importlib.abc.Loader):
    create_module = staticmethod(lambda spec: extension)
    exec_module = staticmethod(lambda module: None)

def unless_compiled(load, stand_in):
    def loaded(*arguments, **options):
        if any(os.path.basename(str(argument)) in libraries for argument in arguments):
            return stand_in(*arguments)
        return load(*arguments, **options)
    return loaded

for library in libraries:
    open(library, "w").close()
ctypes.CDLL = unless_compiled(ctypes.CDLL, MagicMock())
importlib.util.spec_from_file_location = unless_compiled(
    importlib.util.spec_from_file_location, lambda name, path: importlib.util.spec_from_loader(name, Extension())
)

import transformer_engine.pytorch as te
from transformer_engine.pytorch import utils
assert utils.__file__.startswith(os.getcwd()), utils.__file__
asked = utils.get_cudnn_version(), utils.get_cudnn_version()
print(te.LayerNormMLP.__name__, *asked, extension.get_cudnn_version.call_count)
"""


def test_build_tools_fail_without_the_patch_only(proof: Proof) -> None:
    pristine, patched = proof.run(BUILD)
    assert "ImportError: cannot import name 'cache' from 'functools'" in pristine.stderr
    assert patched.stdout.splitlines() == ["debug True True False", "nvcc cuda cuda/bin/nvcc True"], patched.stderr


def test_the_package_fails_without_the_patch_only(proof: Proof) -> None:
    pristine, patched = proof.run(PACKAGE)
    assert pristine.stderr.splitlines()[-1] == "AttributeError: module 'functools' has no attribute 'cache'"
    assert patched.stdout.strip() == "LayerNormMLP (8, 9, 5) (8, 9, 5) 1", patched.stderr


def test_renaming_the_import_alone_is_a_name_error_on_every_python(proof: Proof, tmp_path: Path) -> None:
    """The edit that the FP8 guide prints, tried with Python 3.8 and with the one that runs this test."""
    renamed = Path(shutil.copytree(proof.pristine / "build_tools", tmp_path / "build_tools")) / "utils.py"
    text = renamed.read_text(encoding="utf-8")
    assert text.count("from functools import cache") == 1
    renamed.write_text(text.replace("from functools import cache", "from functools import lru_cache"), encoding="utf-8")
    for python in (proof.python, Path(sys.executable)):
        command = [str(python), "-c", "import build_tools.utils"]
        tried = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert tried.stderr.splitlines()[-1] == "NameError: name 'cache' is not defined", python
