"""The module names its version with the patch, and 0.0.0 without it."""

from patches.proof import Proof

RUNS_IN = "cpu"
EMULATED = "the module's kernels, which need CuTe's compiler, are left out: only its __init__.py is run"

VERSION = """
import sys
from types import ModuleType

interface = ModuleType("flash_attn.cute.interface")
interface.flash_attn_func = interface.flash_attn_varlen_func = None
sys.modules["flash_attn.cute.interface"] = interface

import flash_attn.cute
print(flash_attn.cute.__version__)
"""


def test_the_version_is_known_with_the_patch_only(proof: Proof) -> None:
    pristine, patched = proof.run(VERSION)
    assert pristine.stdout.strip() == "0.0.0", pristine.stderr
    assert patched.stdout.strip() == proof.version, patched.stderr
