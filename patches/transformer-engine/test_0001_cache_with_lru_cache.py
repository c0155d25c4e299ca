"""Python 3.8 imports the build's helpers and the package's with the patch only (A06)."""

import shutil
import subprocess
import sys
from pathlib import Path

from patches.proof import Proof

RUNS_IN = "cu11.4-torch2.0"
EMULATED = "the compiled extension is a stand-in"

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

PACKAGE = """
import os, sys
from types import ModuleType
from unittest.mock import MagicMock
assert sys.version_info[:2] == (3, 8), sys.version

for name in ("transformer_engine", "transformer_engine.pytorch"):  # without their __init__, which loads the libraries
    sys.modules[name] = ModuleType(name)
    sys.modules[name].__path__ = [os.path.join(os.getcwd(), *name.split("."))]
extension = sys.modules["transformer_engine.pytorch.cpp_extensions"] = MagicMock()
sys.modules["transformer_engine.pytorch"].cpp_extensions = extension
extension.get_cudnn_version.return_value = 8905

from transformer_engine.pytorch import utils
assert utils.__file__.startswith(os.getcwd()), utils.__file__
print(utils.get_cudnn_version(), utils.get_cudnn_version(), extension.get_cudnn_version.call_count)
"""


def test_build_tools_fail_without_the_patch_only(proof: Proof) -> None:
    pristine, patched = proof.run(BUILD)
    assert "ImportError: cannot import name 'cache' from 'functools'" in pristine.stderr
    assert patched.stdout.splitlines() == ["debug True True False", "nvcc cuda cuda/bin/nvcc True"], patched.stderr


def test_the_package_fails_without_the_patch_only(proof: Proof) -> None:
    pristine, patched = proof.run(PACKAGE)
    assert "AttributeError: module 'functools' has no attribute 'cache'" in pristine.stderr
    assert patched.stdout.strip() == "(8, 9, 5) (8, 9, 5) 1", patched.stderr


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
