"""The backward kernel pads each head size as its accumulators are padded, with the patch; without it, some are not."""

from patches.proof import Proof

RUNS_IN = "cpu"
EMULATED = "CuTe and torch are faked: the kernels' classes are asked how far they pad, and nothing is compiled"

PADDING = """
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from unittest.mock import MagicMock


class Anything(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock()

    def __getitem__(cls, item):
        return cls


class Module(ModuleType):
    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {}) if name[0].isupper() else MagicMock()  # classes may be derived from


class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("cutlass", "cuda", "quack", "torch"):
            return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return Module(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, Finder())
sys.modules["flash_attn.cute.interface"] = Module("flash_attn.cute.interface")
from flash_attn.cute.flash_bwd_postprocess import FlashAttentionBackwardPostprocess
from flash_attn.cute.flash_bwd_sm90 import FlashAttentionBackwardSm90

sizes = range(8, 257, 8)
written = {size: FlashAttentionBackwardSm90(None, size).tile_hdim for size in sizes}
read = {size: FlashAttentionBackwardPostprocess(None, size, 90).tile_hdim for size in sizes}
print(len(read), *(f"{size}:{written[size]}/{read[size]}" for size in sizes if written[size] != read[size]))
"""


def test_kernel_and_accumulators_agree_with_the_patch_only(proof: Proof) -> None:
    pristine, patched = proof.run(PADDING)
    assert pristine.returncode == 0, pristine.stderr
    apart = pristine.stdout.split()[1:]
    assert {"40:48/64", "72:80/96", "104:112/128"} <= set(apart) and len(apart) == 16, apart
    assert patched.stdout.split() == ["32"], patched.stderr
