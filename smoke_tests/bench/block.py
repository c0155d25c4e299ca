"""One Transformer block of GPT-3's sizes, equally fused in bf16 and in FP8: te.TransformerLayer, eager and graphed."""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, Dict, List, Tuple

import torch

from smoke_tests.bench.method import Arm, Cell, Check, graphed
from smoke_tests.operators.bounds import relative_error
from smoke_tests.operators.transformer_engine_adapter import te_autocast, te_recipe

# Hidden size and heads: Brown et al. 2020 (2005.14165), table 2.1, with the heads of common implementations.
SIZES: Dict[str, Tuple[int, int]] = {
    "125M": (768, 12),
    "350M": (1024, 16),
    "760M": (1536, 16),
    "1.3B": (2048, 16),
    "2.7B": (2560, 32),
    "6.7B": (4096, 32),
    "13B": (5120, 40),
}
# Error of what the block adds to its input, against float32 at the first positions; a block rounds about ten times.
BOUNDS = {"bf16": (1e-4, 0.03), "fp8": (0.01, 0.25)}
POSITIONS = 256  # the mask is causal: the first positions are the same whatever follows


def cells(releases: Dict[str, str], cuda: bool, quick: bool) -> List[Cell]:
    """The grid, with the cells of the middle first."""
    if not cuda or "transformer-engine" not in releases:
        return []
    grid = [(size, length, batch) for size in SIZES for length in (1024, 2048, 4096, 8192) for batch in (1, 2, 4, 8)]
    core = [
        (s, length, b) for s, length, b in grid if s not in ("760M", "2.7B") and length in (2048, 4096) and b in (1, 4)
    ]
    if quick:
        core, grid = [("1.3B", 2048, 4), ("6.7B", 2048, 4)], []
    listed = []
    for size, length, batch in core + [cell for cell in grid if cell not in core]:
        hidden, heads = SIZES[size]
        tokens = length * batch
        seconds = 2.0 + 4 * 35 * flops(hidden, length, tokens) / 6e14
        gib = (tokens * hidden * 120 + 12 * hidden * hidden * 30) / 2**30
        facts = {"model": size, "hidden": hidden, "heads": heads, "length": length, "batch": batch}
        part = "core" if (size, length, batch) in core else "grid"
        make = partial(_arms, hidden, heads, length, batch)
        listed.append(Cell(f"block/{part}/{size}/{length}x{batch}", facts, make, seconds, gib))
    return listed


def flops(hidden: int, length: int, tokens: int) -> float:
    """Forward and backward of one block: three times 2 (12 h^2), and causal attention's 2 l h, per token."""
    return 3.0 * tokens * (24.0 * hidden * hidden + 2.0 * length * hidden)


def _arms(hidden: int, heads: int, length: int, batch: int) -> Dict[str, Callable[[], Arm]]:
    import transformer_engine.pytorch as te

    layer = te.TransformerLayer(
        hidden, 4 * hidden, heads, hidden_dropout=0.0, attention_dropout=0.0, fuse_qkv_params=True,
        self_attn_mask_type="causal", params_dtype=torch.bfloat16,
    )  # fmt: skip
    x = torch.randn(length, batch, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn_like(x)
    with torch.no_grad():
        start = x[:POSITIONS, :1].float().contiguous()
        truth = (layer.float()(start) - start).double()
    layer.bfloat16()  # the same weights again
    leaves = (x, *layer.parameters())

    def check(results: Any, precision: str) -> List[Check]:
        result = results[0].detach()[:POSITIONS, :1].float() - start
        return [Check(relative_error(result, truth), *BOUNDS[precision])]

    def arm(precision: str, graph: bool) -> Arm:
        recipe = te_recipe("delayed") if precision == "fp8" else None

        def call() -> Any:
            with te_autocast(recipe):
                y = layer(x)
            return (y, *torch.autograd.grad(y, leaves, gradient))

        for _ in range(3):
            call()
        run, base = (graphed(call), "bf16 graph") if graph else (call, "bf16")
        work = flops(hidden, length, length * batch)
        return Arm(run, precision, base, flops=work, check=partial(check, precision=precision), ungraphed=call)

    names = [("bf16", False), ("fp8", False), ("bf16", True), ("fp8", True)]
    return {name + (" graph" if graph else ""): partial(arm, name, graph) for name, graph in names}
