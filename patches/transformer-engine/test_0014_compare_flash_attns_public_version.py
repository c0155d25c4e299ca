"""FlashAttention is made beside a flash-attn whose version has a local part, and beside one that is too new."""

from patches.proof import Proof

RUNS_IN = "cpu"
EMULATED = "flash-attn is its metadata alone; the compiled extensions and the other modules are stand-ins"

# Prints, for the newest version of flash-attn that the release accepts, for the same with a local part and for a newer
# one with a local part, whether attention.py makes its FlashAttention.
ACCEPTED = """
import importlib.metadata, importlib.util, os, sys
from types import ModuleType
from unittest.mock import MagicMock
import torch

path = os.path.join("transformer_engine", "pytorch", "attention.py")
source = open(path).read()
for name in ("flash_attn", "flash_attn.flash_attn_interface", "flash_attn_2_cuda", "transformer_engine_torch",
             "transformer_engine_extensions", "transformer_engine", "transformer_engine.common",
             "transformer_engine.common.recipe"):
    sys.modules[name] = MagicMock()
for line in source.splitlines():  # whatever else it imports of its own package
    words = line.split()
    if words[:1] == ["from"] and words[1].startswith("transformer_engine.pytorch"):
        sys.modules[words[1]] = MagicMock()
sys.modules["transformer_engine.pytorch"] = MagicMock()
sys.modules["transformer_engine.pytorch.module.base"].TransformerEngineBaseModule = torch.nn.Module

version = importlib.metadata.version
for part in ("", "+cu121torch2.1", ".post1+cu121torch2.1"):
    newest = source.partition('_flash_attn_max_version = PkgVersion("')[2].partition('"')[0]
    importlib.metadata.version = lambda name: newest + part if name == "flash-attn" else version(name)
    spec = importlib.util.spec_from_file_location("attention", path)
    attention = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(attention)
    try:
        attention.FlashAttention(1.0)
        print(newest + part, "accepted")
    except AssertionError as error:
        print(newest + part, "AssertionError:", error)
"""


def test_a_local_part_is_refused_without_the_patch_only(proof: Proof) -> None:
    pristine, patched = proof.run(ACCEPTED)
    before, after = pristine.stdout.splitlines(), patched.stdout.splitlines()
    newest = before[0].partition(" ")[0]
    refused = f"AssertionError: FlashAttention maximum version {newest} is supported."
    assert before == [
        f"{newest} accepted",
        f"{newest}+cu121torch2.1 {refused}",
        f"{newest}.post1+cu121torch2.1 {refused}",
    ]
    assert after == [before[0], f"{newest}+cu121torch2.1 accepted", before[2]]
