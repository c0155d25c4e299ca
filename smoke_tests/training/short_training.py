"""A small Llama, trained for a few steps on real text: what claims compare FP8 and a sharded run with.

Which implementation of each operator it takes is a mapping, operator -> column of the table. Tokens are bytes.
"""

from __future__ import annotations

import sysconfig
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Tuple

import torch

from smoke_tests.operators.table import operator
from smoke_tests.training.llama import Llama, implementation
from smoke_tests.training.models import MODELS, Shape, parameters_of

Columns = Mapping[str, str]
# A model and the settings of AdamW -> the model to train, its optimizer, and what clips its gradients.
Prepared = Tuple[torch.nn.Module, torch.optim.Optimizer, Callable[..., object]]
Prepare = Callable[[torch.nn.Module, Dict[str, Any]], Prepared]


def small_llama(shape: Shape, columns: Columns) -> Llama:
    """A Llama of that shape with fresh weights, its residual stream in float32.

    The layers start small: weights and activations grow far beyond that, which a scale has to follow. The embedding
    does not: from tiny activations rounding alone would send two runs apart.
    """
    model = Llama(MODELS["tiny"]._replace(shape=shape, parameters=parameters_of(shape)), columns, torch.float32)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.5 if name == "embedding.weight" else 0.008)
    return model


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

    The weights are float32; on a GPU autocast computes in bfloat16. The same seed gives the same start and batches,
    whatever the columns. each_step is called before each step. graphed: the kernels of forward and backward are
    captured and launched together, since a model so small waits for the host. prepare: puts in other layers and AdamW.
    """
    torch.manual_seed(seed)
    model: torch.nn.Module = small_llama(shape, columns).to(device)
    settings = {"lr": 1.5e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    model, optimizer, clip = (prepare or partial(of_the_table, columns=columns))(model, settings)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    # Autocast's cached casts would be outside the graph.
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
        loss = implementation(columns, "cross_entropy")(logits, targets.flatten().to(device), -100)
        optimizer.zero_grad()
        loss.backward()
        clip(model.parameters(), 1.0)
        optimizer.step()
        warmup.step()
        losses.append(loss.detach())
    return [float(loss) for loss in losses]
