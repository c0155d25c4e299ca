"""The learning rate of each step, and the losses that jump."""

from __future__ import annotations

import math
import statistics
from typing import List, Sequence

from smoke_tests.training.options import Options


def rate_at(step: int, options: Options) -> float:
    """The learning rate of a step: it rises over the warm-up, and ends as torchtitan's schedules and nanoGPT's do.

    Cosine falls from the end of the warm-up on; wsd (warm-up, stable, decay) falls in a line over the last decay_ratio
    of the schedule. Both reach the highest rate times min_lr_factor at decay_steps, and stay there.
    """
    top, end = options.learning_rate, options.decay_steps or options.steps
    if step < options.warmup:
        return top * (step + 1) / options.warmup
    if options.schedule == "constant":
        return top
    begin = options.warmup
    if options.schedule == "wsd":
        begin = max(begin, end - round(options.decay_ratio * end))
    done = min(1.0, max(0.0, (step - begin) / max(1, end - begin)))
    height = (1 + math.cos(math.pi * done)) / 2 if options.schedule == "cosine" else 1 - done
    return top * (options.min_lr_factor + (1 - options.min_lr_factor) * height)


def spikes(losses: Sequence[float], window: int = 32) -> List[int]:
    """The steps whose loss is six deviations (at least 0.3 nats) above the mean of the `window` before them."""
    steps = []
    for step in range(window, len(losses)):
        before = losses[step - window : step]
        if losses[step] - statistics.mean(before) > max(0.3, 6 * statistics.pstdev(before)):
            steps.append(step)
    return steps
