"""How far FP8 is from high precision, in units of the noise that rounding causes."""

from __future__ import annotations

import math
import statistics
from typing import Dict, List, NamedTuple, Tuple

import torch

# Limits in units of the noise: of the losses, which are few, so that their noise may be small by chance, of the worst
# matrix, and of all. By chance 4 of 104 sound comparisons were beyond the last, up to 2.3, and never two in a row; with
# two bits of mantissa it is 1.5 and more. So what is less than SURE times as far as a limit has to be beyond it twice.
LOSSES, WORST, ALL = 20.0, 4.0, 1.4
SURE = 2.0
TINY = 1e-12  # smaller values count as no distance


class Outcome(NamedTuple):
    """The result of some steps: their losses, and the weights of the FP8 layers at their end, by name."""

    losses: List[float]
    weights: Dict[str, torch.Tensor]


def sure(numbers: Dict[str, float]) -> bool:
    """Whether a distance that is too far is so far that chance does not explain it."""
    limits = {"losses": LOSSES, "one": WORST, "all": ALL}
    return not numbers or any(numbers[key] > SURE * limit for key, limit in limits.items())


def distances(fp8: Outcome, high: Outcome, by_hand: Outcome) -> Tuple[Dict[str, float], str]:
    """The distance of FP8 from high precision in units of the noise; why that is too far, or ""."""
    if not all(math.isfinite(loss) for loss in fp8.losses):
        return {}, "a loss is not finite"
    gaps = [sum(abs(a - b) for a, b in zip(way.losses, high.losses)) for way in (fp8, by_hand)]
    ratios = {}
    for name, truth in high.weights.items():
        far, noise = (float((way.weights[name] - truth).norm()) for way in (fp8, by_hand))
        ratios[name] = max(far, TINY) / max(noise, TINY) if math.isfinite(far) else math.inf
    name = max(ratios, key=lambda name: ratios[name])
    mean = math.exp(statistics.mean(map(math.log, ratios.values())))
    numbers = {"losses": max(gaps[0], TINY) / max(gaps[1], TINY), "one": ratios[name], "all": mean}
    for key, limit, what in (
        ("one", WORST, f"{name} ends"),
        ("all", ALL, "the matrices end"),
        ("losses", LOSSES, "the losses are"),
    ):
        if numbers[key] > limit:
            return numbers, f"{what} {numbers[key]:.1f} times as far from high precision as rounding explains"
    return numbers, ""
