"""The proof that the patches of two Transformer Engine wheels share: which keys causal attention sees."""

from patches.proof import Proof

# Prints the largest output of causal attention for each window that Transformer Engine passes.
ATTENDED = """
import importlib.metadata, importlib.util, os, sys
from unittest.mock import MagicMock
import torch

path = os.path.join("transformer_engine", "pytorch", "attention", "dot_product_attention", "backends.py")
for line in open(path).read().splitlines():
    words = line.split()
    if words[:1] in (["from"], ["import"]) and words[1].partition(".")[0].startswith("transformer_engine"):
        for end in range(1, words[1].count(".") + 2):
            sys.modules[".".join(words[1].split(".")[:end])] = MagicMock()
for name, module in sys.modules.items():
    if name.startswith("transformer_engine"):
        module.no_torch_dynamo = lambda: lambda function: function

def attend(query, key, value, causal=False, window_size=(None, None), window_size_left=None, window_size_right=None):
    left, right = window_size if window_size != (None, None) else (window_size_left, window_size_right)
    if left is not None and right is not None and left < 0 and right < 0:  # pull request 2490 of flash-attention
        left = right = None
    right = 0 if causal else right
    distance = torch.arange(len(query))[:, None] - torch.arange(len(key))  # how far a key lies behind a query
    seen = torch.ones(distance.shape, dtype=torch.bool)
    seen &= distance <= left if left is not None else seen
    seen &= distance >= -right if right is not None else seen
    weights = (query @ key.T).masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num()  # a row without keys is zero
    return weights @ value

functions = ("flash_attn_func", "flash_attn_varlen_func", "_flash_attn_fwd", "_flash_attn_bwd")
interface = MagicMock(**dict.fromkeys(functions, attend))
for name in ("flash_attn", "flash_attn.cute"):
    sys.modules[name] = MagicMock()
sys.modules["flash_attn.cute.interface"] = interface
version = importlib.metadata.version
newest = {"flash-attn-4": "4.0.0b36", "nvidia-cutlass-dsl": "4.6.2"}
importlib.metadata.version = lambda name: newest.get(name) or version(name)
spec = importlib.util.spec_from_file_location("backends", path)
backends = importlib.util.module_from_spec(spec)
spec.loader.exec_module(backends)

query, key, value = torch.randn(3, 8, 4, generator=torch.Generator().manual_seed(0))
exact = attend(query, key, value, causal=True)
for function, window in (
    (backends.flash_attn_func_v4, {"window_size": (-1, 0)}),
    (backends.flash_attn_func_v4, {"window_size": (3, 0)}),
    (backends.flash_attn_varlen_func_v4, {"window_size": (-1, 0)}),
    (backends._flash_attn_fwd_v4, {"window_size_left": -1, "window_size_right": 0}),
    (backends._flash_attn_bwd_v4, {"window_size_left": -1, "window_size_right": 0}),
):
    output = function(query, key, value, causal=True, **window)
    print(window, "zero" if not output.any() else "all keys" if torch.equal(output, exact) else "other keys")
"""


def test_causal_attention_is_zero_without_the_patch_only(proof: Proof) -> None:
    pristine, patched = proof.run(ATTENDED)
    causal, banded = "{'window_size': (-1, 0)}", "{'window_size': (3, 0)}"
    sides = "{'window_size_left': -1, 'window_size_right': 0}"
    windows = [causal, banded, causal, sides, sides]
    before, after = (["zero", "other keys", *[word] * 3] for word in ("zero", "all keys"))
    after[0] = "all keys"
    assert pristine.stdout.splitlines() == [f"{window} {seen}" for window, seen in zip(windows, before, strict=True)]
    assert patched.stdout.splitlines() == [f"{window} {seen}" for window, seen in zip(windows, after, strict=True)]
