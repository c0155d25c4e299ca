"""The learning rate of each step, and the losses that jump."""

from __future__ import annotations

import math
import statistics
from typing import List, Sequence

from smoke_tests.training.options import Options


def rate_at(step: int, options: Options) -> float:
    """The learning rate of a step."""
    if step < options.warmup:
        return options.learning_rate * (step + 1) / options.warmup
    if options.schedule == "constant":
        return options.learning_rate
    done = (step - options.warmup) / max(1, options.steps - options.warmup)
    return options.learning_rate * (0.55 + 0.45 * math.cos(math.pi * done))


def spikes(losses: Sequence[float], window: int = 32) -> List[int]:
    """The steps whose loss is six deviations (at least 0.3 nats) above the mean of the `window` before them."""
    steps = []
    for step in range(window, len(losses)):
        before = losses[step - window : step]
        if losses[step] - statistics.mean(before) > max(0.3, 6 * statistics.pstdev(before)):
            steps.append(step)
    return steps
