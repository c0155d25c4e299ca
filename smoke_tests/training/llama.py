"""A small Llama in one file, assembled from the table of fused operators, and its training on real text.

Which implementation of each operator it takes is a mapping, operator -> column of the table.

Shapes: b batch, l length, w width, h heads, d head size; tokens are bytes, so the vocabulary is 256.
"""

from __future__ import annotations

import sysconfig
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, NamedTuple, Optional, Tuple

import torch

from smoke_tests.operators.table import operator

Columns = Mapping[str, str]
# A model and the settings of AdamW -> the model to train, its optimizer, and what clips its gradients.
Prepared = Tuple[torch.nn.Module, torch.optim.Optimizer, Callable[..., object]]
Prepare = Callable[[torch.nn.Module, Dict[str, Any]], Prepared]


class Shape(NamedTuple):
    """Sizes of the model; 3 query heads share a key/value head, and no two sizes are equal."""

    layers: int = 2
    heads: int = 6
    kv_heads: int = 2
    head_size: int = 16
    hidden: int = 208
    vocabulary: int = 256
    length: int = 64

    @property
    def width(self) -> int:
        return self.heads * self.head_size


class RMSNorm(torch.nn.Module):  # type: ignore[misc]
    """RMS normalization of the last dimension, [..., w] -> [..., w]."""

    def __init__(self, width: int, columns: Columns) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width))
        self.normalize = operator("rms_norm", columns["rms_norm"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normalized: torch.Tensor = self.normalize(x.flatten(0, -2), self.weight, 1e-5)
        return normalized.view_as(x)


class Attention(torch.nn.Module):  # type: ignore[misc]
    """Causal self-attention with rotary positions, [b, l, w] -> [b, l, w]."""

    def __init__(self, shape: Shape, columns: Columns) -> None:
        super().__init__()
        self.head_size = shape.head_size
        kv_width = shape.kv_heads * shape.head_size
        self.query = torch.nn.Linear(shape.width, shape.width, bias=False)
        self.key = torch.nn.Linear(shape.width, kv_width, bias=False)
        self.value = torch.nn.Linear(shape.width, kv_width, bias=False)
        self.output = torch.nn.Linear(shape.width, shape.width, bias=False)
        self.rotate = operator("rope", columns["rope"])(shape.head_size, 10000.0)
        self.attend = operator("attention", columns["attention"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (self._heads(each(x)) for each in (self.query, self.key, self.value))
        attended = self.attend(self.rotate(query, 0), self.rotate(key, 0), value)
        mixed: torch.Tensor = self.output(attended.transpose(1, 2).flatten(2))
        return mixed

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """[b, l, h * d] -> [b, h, l, d]."""
        return x.unflatten(-1, (-1, self.head_size)).transpose(1, 2)


class FeedForward(torch.nn.Module):  # type: ignore[misc]
    """SwiGLU between two projections, [b, l, w] -> [b, l, w]."""

    def __init__(self, shape: Shape, columns: Columns) -> None:
        super().__init__()
        self.multiply = operator("swiglu", columns["swiglu"])
        self.gate = torch.nn.Linear(shape.width, shape.hidden, bias=False)
        self.up = torch.nn.Linear(shape.width, shape.hidden, bias=False)
        self.down = torch.nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        projected: torch.Tensor = self.down(self.multiply(self.gate(x), self.up(x)))
        return projected


class Block(torch.nn.Module):  # type: ignore[misc]
    """One layer: attention and feed-forward, each behind a norm and beside a residual."""

    def __init__(self, shape: Shape, columns: Columns) -> None:
        super().__init__()
        self.attention_norm, self.attention = RMSNorm(shape.width, columns), Attention(shape, columns)
        self.feed_forward_norm, self.feed_forward = RMSNorm(shape.width, columns), FeedForward(shape, columns)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        out: torch.Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return out


class Llama(torch.nn.Module):  # type: ignore[misc]
    """Tokens [b, l] -> logits [b, l, vocabulary]."""

    def __init__(self, shape: Shape, columns: Columns) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = torch.nn.ModuleList([Block(shape, columns) for _ in range(shape.layers)])
        self.norm = RMSNorm(shape.width, columns)
        self.head = torch.nn.Linear(shape.width, shape.vocabulary, bias=False)
        # The layers start small: weights and activations grow far beyond that, which a scale has to follow. The
        # embedding does not: from tiny activations rounding alone would send two runs apart.
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                torch.nn.init.normal_(parameter, std=0.5 if name == "embedding.weight" else 0.008)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def standard_library_text(size: int) -> torch.Tensor:
    """The first `size` bytes of the standard library's modules, by name, as tokens [size]; present in every Python."""
    text = bytearray()
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += file.read_bytes()
        if len(text) >= size:
            return torch.frombuffer(text[:size], dtype=torch.uint8).long()
    raise ValueError(f"the standard library's modules have only {len(text)} bytes")


def batches(text: torch.Tensor, length: int, steps: int, seed: int) -> Iterator[Tuple[torch.Tensor, torch.Tensor]]:
    """Random windows of a text: tokens [8, length] and the tokens that follow them [8, length], `steps` times."""
    draw = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(len(text) - length, (8,), generator=draw)
        windows = torch.stack([text[start : start + length + 1] for start in starts.tolist()])
        yield windows[:, :-1], windows[:, 1:]


def of_the_table(model: torch.nn.Module, settings: Dict[str, Any], columns: Columns) -> Prepared:
    """The model with the table's linear layers, and the table's AdamW."""
    # The head stays in high precision, as every published FP8 recipe has it.
    model = operator("linear", columns["linear"])(model, keep=lambda name: name == "head")
    return model, operator("adamw", columns["adamw"])(model.parameters(), **settings), torch.nn.utils.clip_grad_norm_


def train(
    columns: Columns,
    seed: int,
    device: str,
    shape: Shape,
    steps: int = 100,
    each_step: Callable[[], None] = lambda: None,
    graphed: bool = False,
    prepare: Optional[Prepare] = None,
) -> List[float]:
    """Train a fresh model; the loss (nats per byte) of every step.

    The weights are float32; on a GPU what autocast chooses is computed in bfloat16. The same seed gives the same start
    and the same batches, whatever the columns. each_step is called before each step. graphed: the model's kernels are
    captured once and launched together, forward and backward, since so small a one waits for the host. prepare: what
    puts other linear layers and another AdamW in their places than the table's.
    """
    torch.manual_seed(seed)
    model = Llama(shape, columns).to(device)
    settings = {"lr": 1.5e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    model, optimizer, clip = (prepare or partial(of_the_table, columns=columns))(model, settings)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    # What autocast casts once for several uses would be outside of the graph.
    precision = torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda", cache_enabled=not graphed)
    if graphed:
        with precision:
            tokens = torch.zeros(8, shape.length, dtype=torch.long, device=device)
            model = torch.cuda.make_graphed_callables(model, (tokens,))
    losses = []
    for tokens, targets in batches(standard_library_text(400_000), shape.length, steps, seed):
        each_step()
        with precision:
            logits = model(tokens.to(device)).flatten(0, 1).float()
        loss = operator("cross_entropy", columns["cross_entropy"])(logits, targets.flatten().to(device), -100)
        optimizer.zero_grad()
        loss.backward()
        clip(model.parameters(), 1.0)
        optimizer.step()
        warmup.step()
        losses.append(loss.detach())
    return [float(loss) for loss in losses]
