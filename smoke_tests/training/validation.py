"""The loss on held-out windows during a run, in the run's precision and in high precision; the run is not changed."""

from __future__ import annotations

import contextlib
import math
import time
from typing import Any, Callable, Dict, Iterator

import torch

from smoke_tests.training import checkpoint, ms_amp
from smoke_tests.training.precision import CUT, column_of, computed, plain


def noted(run: Any, row: Dict[str, float], write: Callable[..., None], say: Callable[[str], None]) -> None:
    """Add the losses to a step's row of the log, and write an event, if --eval-every asks for them at this step."""
    options = run.options
    if not options.eval_every or (run.step % options.eval_every and run.step != options.steps):
        return
    began = time.perf_counter()
    numbers = losses(run)
    row.update(numbers)
    write(event="validation", step=run.step, seconds=time.perf_counter() - began, **numbers)
    high = f", in high precision {numbers['validation_high']:.4f}" if "validation_high" in numbers else ""
    say(f"step {run.step}: loss {numbers['validation']:.4f} on held-out text{high}")


def losses(run: Any) -> Dict[str, float]:
    """The mean loss (nats per token) on held-out windows.

    validation: in the run's precision. validation_high: with the layers in bfloat16, or in float32 where the run does
    not use bfloat16; only of a run in FP8 or with a cut mantissa whose layers can be computed in both ways.
    """
    precision = run.options.precision
    with unchanged(run.model), torch.no_grad():
        numbers = {"validation": mean_loss(run)}
        low = column_of(precision) != "torch" or precision in CUT
        if low and not run.options.te_modules and precision not in ms_amp.PRECISIONS:
            with computed(run.model, plain):
                numbers["validation_high"] = mean_loss(run)
    return numbers


def mean_loss(run: Any) -> float:
    """The mean loss of the model as it computes now; every part has as many windows as a pass of training.

    The ranks do a part each, then the next; one without a part repeats the last, because all gather weights together.
    """
    options, ranks = run.options, run.ranks
    tokens, targets = run.text.unseen(options.eval_windows)
    total = torch.zeros((), dtype=torch.float64, device=run.device)
    parts = list(zip(tokens.split(options.batch_size), targets.split(options.batch_size)))
    for turn in range(math.ceil(len(parts) / ranks.world)):
        own = ranks.own(turn)
        part, behind = parts[min(own, len(parts) - 1)]
        with torch.autocast(run.device, torch.bfloat16, enabled=run.half, cache_enabled=not options.graphs):
            loss = run.model(part.to(run.device), behind.to(run.device)).double()
        if own < len(parts):
            total += len(part) * loss
    return float(ranks.total(total)) / len(tokens)


@contextlib.contextmanager
def unchanged(model: torch.nn.Module) -> Iterator[None]:
    """The context after which the scales of FP8, which a forward pass changes, are as they were."""
    before = {name: values.clone() for name, values in checkpoint.fp8_state_of(model).items()}
    try:
        yield
    finally:
        for name, values in checkpoint.fp8_state_of(model).items():
            if name in before:
                values.copy_(before[name])
