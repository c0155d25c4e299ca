"""A Llama: one product for query, key and value, one for gate and up, and a KV cache.

Shapes: b batch, l length, w width, h heads, k key/value heads, d head size.
"""

from __future__ import annotations

import math
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint as recomputed

from smoke_tests.operators import references
from smoke_tests.operators.table import operator
from smoke_tests.training import document_masks
from smoke_tests.training.models import Model

Cache = List[Tuple[torch.Tensor, torch.Tensor]]  # per layer, the keys and values so far, [b, k, l, d]


def eager_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Optional[torch.Tensor] = None
) -> torch.Tensor:
    """Causal attention by separate operators: query [b, h, m, d] at the last m of l positions, key and value
    [b, k, l, d] -> [b, h, m, d]. mask: what it sees of all positions [b, 1, l, l], in place of all earlier ones."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    if mask is None:
        ones = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        mask = ones.tril(key.shape[2] - query.shape[2])
    return torch.softmax(scores.float().masked_fill(~mask, -math.inf), dim=-1).to(value.dtype) @ value


# The "naive" operators: plain formulas, without a fused kernel even where torch has one.
NAIVE: Dict[str, Callable[..., Any]] = {
    "attention": eager_attention,
    "rms_norm": references.rms_norm,
    "swiglu": references.swiglu,
    "rope": operator("rope", "torch"),
    "cross_entropy": lambda logits, labels, ignored: F.cross_entropy(logits.float(), labels, ignore_index=ignored),
}


class Masked(NamedTuple):
    """How an implementation of attention keeps to documents.

    marked: the documents of windows [b, l] -> what attend takes beside query, key and value.
    """

    marked: Callable[[torch.Tensor], torch.Tensor]
    attend: Callable[..., torch.Tensor]


# The implementations of attention that stay within documents.
MASKED: Dict[str, Masked] = {
    "naive": Masked(document_masks.mask_of, eager_attention),
    "torch": Masked(document_masks.mask_of, document_masks.torch_attention),
    "flash-attn": Masked(document_masks.starts_of, document_masks.flash_attention),
}


def implementation(columns: Mapping[str, str], name: str) -> Callable[..., Any]:
    """The implementation of an operator: a column of the table, or "naive"."""
    return NAIVE[name] if columns[name] == "naive" else operator(name, columns[name])


class RMSNorm(torch.nn.Module):  # type: ignore[misc]
    """RMS normalization of the last dimension, [..., w] -> [..., w], in the dtype of its input."""

    def __init__(self, model: Model, columns: Mapping[str, str]) -> None:
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.ones(model.shape.width)), model.eps
        self.normalize = implementation(columns, "rms_norm")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normalized: torch.Tensor = self.normalize(x.flatten(0, -2), self.weight.to(x.dtype), self.eps)
        return normalized.view_as(x).to(x.dtype)


class Rotary(torch.nn.Module):  # type: ignore[misc]
    """Rotary positions, [b, h, l, d] -> [b, h, l, d]; the table is on the device, so that a CUDA graph can hold it."""

    def __init__(self, model: Model, columns: Mapping[str, str]) -> None:
        super().__init__()
        shape = model.shape
        self.rope = implementation(columns, "rope")(shape.head_size, model.base)
        frequency = model.base ** (-torch.arange(0, shape.head_size, 2, dtype=torch.float64) / shape.head_size)
        angle = torch.arange(shape.length, dtype=torch.float64)[:, None] * frequency
        self.register_buffer("cosine", angle.cos().float(), persistent=False)
        self.register_buffer("sine", angle.sin().float(), persistent=False)

    def forward(self, x: torch.Tensor, start: int) -> torch.Tensor:
        if not hasattr(self.rope, "rotate"):  # an implementation with its own table
            turned: torch.Tensor = self.rope(x, start)
            return turned
        positions = slice(start, start + x.shape[-2])
        turned = self.rope.rotate(x, self.cosine[positions].to(x), self.sine[positions].to(x))
        return turned


class Attention(torch.nn.Module):  # type: ignore[misc]
    """Causal self-attention, [b, l, w] -> [b, l, w]."""

    def __init__(self, model: Model, columns: Mapping[str, str], rotary: Rotary) -> None:
        super().__init__()
        shape = model.shape
        self.head_size, self.turned = shape.head_size, [shape.heads + shape.kv_heads, shape.kv_heads]
        self.split = [shape.heads, shape.kv_heads]
        self.qkv = torch.nn.Linear(shape.width, shape.head_size * sum(self.turned), bias=False)
        self.output = torch.nn.Linear(shape.width, shape.width, bias=False)
        self.attend = implementation(columns, "attention")
        self.masked: Any = MASKED.get(columns["attention"])
        self.rotary = rotary

    def forward(
        self,
        x: torch.Tensor,
        past: Optional[Tuple[torch.Tensor, torch.Tensor]] = None,
        marks: Optional[torch.Tensor] = None,
    ) -> Any:
        # Split as the kernels write gradients, a token's heads beside each other: backward joins them in one copy.
        turned, value = self.qkv(x).unflatten(-1, (-1, self.head_size)).split(self.turned, dim=2)
        turned = self.rotary(turned.transpose(1, 2), 0 if past is None else past[0].shape[2]).transpose(1, 2)
        query, key, value = (part.transpose(1, 2) for part in (*turned.split(self.split, dim=2), value))
        if past is None:
            attended = self.attend(query, key, value) if marks is None else self.masked.attend(query, key, value, marks)
            return self.output(attended.transpose(1, 2).flatten(2))
        key, value = torch.cat([past[0], key], dim=2), torch.cat([past[1], value], dim=2)
        return self.output(eager_attention(query, key, value).transpose(1, 2).flatten(2)), (key, value)


class FeedForward(torch.nn.Module):  # type: ignore[misc]
    """SwiGLU between two projections, [b, l, w] -> [b, l, w]."""

    def __init__(self, model: Model, columns: Mapping[str, str]) -> None:
        super().__init__()
        self.gate_up = torch.nn.Linear(model.shape.width, 2 * model.shape.hidden, bias=False)
        self.down = torch.nn.Linear(model.shape.hidden, model.shape.width, bias=False)
        self.multiply = implementation(columns, "swiglu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        projected: torch.Tensor = self.down(self.multiply(*self.gate_up(x).chunk(2, dim=-1)))
        return projected


class Block(torch.nn.Module):  # type: ignore[misc]
    """One layer: attention and feed-forward, each behind a norm and beside a residual."""

    def __init__(self, model: Model, columns: Mapping[str, str], rotary: Rotary) -> None:
        super().__init__()
        self.attention_norm, self.attention = RMSNorm(model, columns), Attention(model, columns, rotary)
        self.feed_forward_norm, self.feed_forward = RMSNorm(model, columns), FeedForward(model, columns)

    def forward(self, x: torch.Tensor, marks: Optional[torch.Tensor] = None) -> torch.Tensor:
        """marks: of the documents, as the implementation of attention takes them (MASKED)."""
        x = x + self.attention(self.attention_norm(x), marks=marks)
        out: torch.Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return out

    def extend(self, x: torch.Tensor, past: Tuple[torch.Tensor, torch.Tensor]) -> Any:
        """The same for tokens that follow a cache; returns the extended cache too."""
        attended, past = self.attention(self.attention_norm(x), past)
        x = x + attended
        return x + self.feed_forward(self.feed_forward_norm(x)), past


class Llama(torch.nn.Module):  # type: ignore[misc]
    """Tokens [b, l] -> logits [b, l, vocabulary], or with targets [b, l] their mean cross entropy (nats per token).

    columns: operator -> column of the table, or "naive". dtype: of the residual stream. recompute: the
    function that runs a block without keeping activations (torch.utils.checkpoint's or Transformer Engine's), or None.
    loss_chunks: in how many parts head and loss are computed; with several, no logits are kept for the backward pass.
    separator: the token that ends a document, if tokens attend to their own document alone; a cache holds one document.
    Weights start normal with a standard deviation of 0.02, as Llama's do.
    """

    def __init__(self, model: Model, columns: Mapping[str, str], dtype: torch.dtype) -> None:
        super().__init__()
        shape, self.dtype = model.shape, dtype
        rotary = Rotary(model, columns)
        self.embedding = torch.nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = torch.nn.ModuleList([Block(model, columns, rotary) for _ in range(shape.layers)])
        self.norm = RMSNorm(model, columns)
        self.head = torch.nn.Linear(shape.width, shape.vocabulary, bias=False)
        if model.tied:
            self.head.weight = self.embedding.weight
        self.cross_entropy = implementation(columns, "cross_entropy")
        self.recompute: Optional[Callable[..., torch.Tensor]] = None
        self.loss_chunks = 1
        self.separator: Optional[int] = None
        for parameter in self.parameters():
            if parameter.dim() == 2:
                torch.nn.init.normal_(parameter, std=0.02)

    def forward(
        self, tokens: torch.Tensor, targets: Optional[torch.Tensor] = None, cache: Optional[Cache] = None
    ) -> torch.Tensor:
        x = self.embedding(tokens).to(self.dtype)
        marks = () if self.separator is None or cache is not None else self._marks(tokens, self.separator)
        for index, block in enumerate(self.blocks):
            if cache is not None:
                x, cache[index] = block.extend(x, cache[index])
            else:
                x = self.recompute(block, x, *marks) if self.recompute else block(x, *marks)
        x = self.norm(x)
        if targets is None:
            logits: torch.Tensor = self.head(x)
            return logits
        if self.loss_chunks == 1:
            return self._loss(x, targets)
        chunks = x.flatten(0, 1).chunk(self.loss_chunks), targets.flatten().chunk(self.loss_chunks)
        losses = [recomputed(self._loss, *part, use_reentrant=False) * len(part[1]) for part in zip(*chunks)]
        return torch.stack(losses).sum() / targets.numel()

    def _marks(self, tokens: torch.Tensor, separator: int) -> Tuple[torch.Tensor, ...]:
        """What the blocks take of the documents of tokens [b, l]."""
        masked = self.blocks[0].attention.masked
        return (masked.marked(document_masks.documents_of(tokens, separator)),)

    def _loss(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Normalized states [..., w] and targets [...] -> their mean cross entropy; every target counts."""
        loss: torch.Tensor = self.cross_entropy(self.head(x).flatten(0, -2), targets.flatten(), -100)
        return loss

    def empty_cache(self, batch: int) -> Cache:
        """An empty cache."""
        attention = self.blocks[0].attention
        nothing = self.embedding.weight.new_empty(batch, attention.split[1], 0, attention.head_size, dtype=self.dtype)
        return [(nothing, nothing)] * len(self.blocks)


# --- with Transformer Engine's modules ---

# The names of a block's weights in Transformer Engine's modules -> the names without them.
THEIRS = {
    "attention.qkv.layer_norm_weight": "attention_norm.weight",
    "feed_forward.layer_norm_weight": "feed_forward_norm.weight",
    "feed_forward.fc1_weight": "feed_forward.gate_up.weight",
    "feed_forward.fc2_weight": "feed_forward.down.weight",
}


def own_name(name: str) -> str:
    """The name of a weight in a Llama without Transformer Engine's modules."""
    return next((name[: -len(theirs)] + ours for theirs, ours in THEIRS.items() if name.endswith(theirs)), name)


def take_te_modules(llama: Llama) -> None:
    """Let LayerNormLinear and LayerNormMLP (transformer_engine/pytorch/module) compute what they can of each block.

    A norm or a gate is then one kernel with the cast for the product that follows. The weights stay the same.
    """
    from transformer_engine.pytorch import LayerNormLinear, LayerNormMLP

    for block in llama.blocks:
        qkv, down, device = block.attention.qkv, block.feed_forward.down, block.attention.qkv.weight.device
        like: Dict[str, Any] = {"bias": False, "params_dtype": qkv.weight.dtype, "device": device}
        like.update(normalization="RMSNorm", eps=block.attention_norm.eps)
        before = block.state_dict()
        block.attention.qkv = LayerNormLinear(qkv.in_features, qkv.out_features, **like)
        block.feed_forward = LayerNormMLP(down.out_features, down.in_features, activation="swiglu", **like)
        block.attention_norm = block.feed_forward_norm = torch.nn.Identity()
        with torch.no_grad():
            for name, parameter in block.named_parameters():
                parameter.copy_(before[own_name(name)])
