"""Why a mutant that the rule made survives."""

from __future__ import annotations

import importlib
import inspect
from typing import Callable, NamedTuple

import torch

from smoke_tests.operators import liger_kernel_adapter, torch_adapter


class Reason(NamedTuple):
    """Why a mutant whose name matches the pattern survives; it is given only where what it says holds when it runs."""

    pattern: str
    words: str
    holds: Callable[[], bool]


def heads_are_grouped_alike() -> bool:
    """Whether torch's attention gives the same bits when key heads are repeated first."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    heads = [torch.randn(2, count, 37, 64, device=device).bfloat16() for count in (6, 2, 2)]
    return bool(torch.equal(torch_adapter.torch_attention(*heads), torch_adapter.attention_of_equal_heads(*heads)))


def last_of(dimensions: int, other: int, last: int) -> bool:
    """Whether two numbers name the same one of so many dimensions."""
    return range(dimensions)[other] == range(dimensions)[last]


def tables_grow_alike() -> bool:
    """Whether a table of transformers that starts with 7 or 9 positions is that which starts with 8, once it grew."""
    module = importlib.import_module("transformers.models.mistral.modeling_mistral")
    x = torch.randn(1, 1, 37, 24)
    grown = [module.MistralRotaryEmbedding(24, max_position_embeddings=n)(x, seq_len=37) for n in (7, 8, 9)]
    return all(torch.equal(*pair) for table in grown for pair in zip(table, grown[1]))


def table_is_replaced() -> bool:
    """Whether the table of a rotary embedding has the width of its angles after one call, whatever it had before."""
    rope = torch_adapter.TorchRope(24, 10000.0)
    rope.cosine = rope.sine = torch.empty(0, 7)
    rope(torch.randn(1, 1, 5, 24), 0)
    return bool(rope.cosine.shape == (5, 12))


def queries_turn_as_keys() -> bool:
    """Whether transformers turns queries and keys alike."""
    module = importlib.import_module("transformers.models.mistral.modeling_mistral")
    x, positions = torch.randn(1, 1, 37, 24), torch.arange(37)[None]
    tables = module.MistralRotaryEmbedding(24)(x, seq_len=37)
    return bool(torch.equal(*module.apply_rotary_pos_emb(x, x, *tables, positions)))


def sum_commutes() -> bool:
    """Whether Liger's norm of a sum has the same bits either way round."""
    x, residual = (torch.randn(5, 73, device="cuda").bfloat16() for _ in range(2))
    weight = torch.randn(73, device="cuda").bfloat16()
    ways = ((x, residual), (residual, x))
    return bool(torch.equal(*[liger_kernel_adapter.liger_add_rms_norm(*way, weight, 1e-5) for way in ways]))


def flash_gives_a_tensor() -> bool:
    """Whether flash-attn returns the result alone."""
    heads = torch.randn(1, 5, 2, 64, device="cuda").bfloat16()
    return isinstance(importlib.import_module("flash_attn").flash_attn_func(heads, heads, heads), torch.Tensor)


def labels_are_flattened() -> bool:
    """Whether Transformer Engine takes labels [1, rows] as it takes [rows, 1]."""
    entropy = importlib.import_module("transformer_engine.pytorch.cross_entropy").parallel_cross_entropy
    logits, labels = torch.randn(5, 1, 83, device="cuda"), torch.arange(5, device="cuda")
    ways = [entropy(logits.clone(), given, 0.0, True, None, -100) for given in (labels[:, None], labels[None])]
    return bool(torch.equal(*ways))


def base_is_its_own() -> bool:
    """Whether Transformer Engine's rotary embedding has the base 10000 by itself, or knows none."""
    attention = importlib.import_module("transformer_engine.pytorch.attention")
    make = getattr(attention, "rope", attention).RotaryPositionEmbedding.__init__
    named = inspect.signature(make).parameters.get("rotary_base")
    return named is None or named.default == 10000.0


def newer_than(major: int, minor: int) -> Callable[[], bool]:
    """Whether torch is newer than that when it is asked."""
    return lambda: torch_adapter.version_of_torch() > (major, minor)


def gpu_is_above() -> bool:
    """Whether there is no GPU to ask, or one above every capability that the rule makes of (8, 9) and that survives."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (9, 0)


WHY = [
    Reason(
        r"^torch_attention .*: (version|\(2, |[25]:)",
        "either way of grouping heads gives the same bits",
        heads_are_grouped_alike,
    ),
    Reason(r"^only .*: (2: 2 becomes 1|3: 3 becomes)", "this torch is newer than both", newer_than(2, 4)),
    Reason(r"_add_rms_norm .*: -1: ", "of two dimensions the second is the last", lambda: last_of(2, 1, -1)),
    Reason(r"Rope .*: -2: ", "of four dimensions the third is the last but one", lambda: last_of(4, 2, -2)),
    Reason(
        r"^TorchRope .*: 2: 2 becomes", "the width of a table that is replaced before it is read", table_is_replaced
    ),
    Reason(
        r"^TransformersRope .*: 8: ",
        "the table starts a little longer or shorter, and still has to grow",
        tables_grow_alike,
    ),
    Reason(r"^TransformersRope .*: (self.apply|0: 0)", "queries and keys are the same there", queries_turn_as_keys),
    Reason(
        r"^torch_scaled_mm .*: 0: 0 becomes",
        "what it chooses from is a tuple before torch 2.5 only",
        newer_than(2, 4),
    ),
    Reason(
        r"^flash_attention .*: 0: 0 becomes",
        "what it chooses from is a tuple in FlashAttention 4 only",
        flash_gives_a_tensor,
    ),
    Reason(r"^liger_add_rms_norm .* 1 swapped with 2", "a sum is the same either way round", sum_commutes),
    Reason(r"^LigerRope .*: \[(\w+), \1\]: 1 swapped", "the two have one name", lambda: True),  # as the pattern sees
    Reason(r"^LigerRope .*: -1: ", "of two dimensions the second is the last", lambda: last_of(2, 1, -1)),
    Reason(
        r"^TransformerEngineRope .*: 10000.0: ",
        "the base it leaves out is its own, and one beside that is given as well",
        base_is_its_own,
    ),
    Reason(
        r"^te_cross_entropy .*: :, None: ",
        "labels of one row each or of one row: they are flattened",
        labels_are_flattened,
    ),
    Reason(
        r"^torchao_linear .*: (torch.cuda|\(8, 9\)|8:|9:)",
        "the capability is asked of a GPU alone, and one of 9.0 is above either bound",
        gpu_is_above,
    ),
    Reason(
        r"^infer\.generate .*: -1: USub turned", "of two dimensions the second is the last", lambda: last_of(2, 1, -1)
    ),
    Reason(
        r"^guard\.distances .*(a, b|zip\(way\.losses, high\.losses\)): 1 swapped with 2",
        "a distance is the same either way round",
        lambda: abs(2.5 - 1.25) == abs(1.25 - 2.5),
    ),
    Reason(
        r"^guard\.distances .*max\(.*, TINY\): 1 swapped with 2",
        "the larger of two numbers is the same either way round",
        lambda: max(2.5, 1.25) == max(1.25, 2.5),
    ),
]
