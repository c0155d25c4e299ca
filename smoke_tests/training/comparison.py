"""A small Llama in FP8 compared with the same model in high precision: the runs, and how close their losses must be."""

from __future__ import annotations

import functools
import math
import statistics
from typing import Any, Dict, List, NamedTuple, Tuple

import pytest

from smoke_tests.operators.table import rows
from smoke_tests.training.columns import FUSED, repeats
from smoke_tests.training.models import Shape
from smoke_tests.training.short_training import train

FALL = 2.5  # nats per byte below ln 256, the loss of knowing nothing
FLOOR = 1e-4  # one thread repeats float32 bit for bit, so that only other arithmetic exceeds this
ON_GPU = Shape(head_size=64, hidden=832)  # the smallest that every attention kernel takes


class ShortRun(NamedTuple):
    """A short training run, apart from its linear layers."""

    device: str
    columns: Tuple[Tuple[str, str], ...]
    seed: int

    def losses(self, linear: str, **others: Any) -> List[float]:
        shape = ON_GPU if self.device == "cuda" else Shape()
        # A graph can hold neither the work done at each step nor Transformer Engine's bookkeeping of scales.
        if self.device == "cuda" and not others and not linear.startswith("transformer-engine"):
            others["graphed"] = True
        return train({**dict(self.columns), "linear": linear}, self.seed, self.device, shape, **others)


@pytest.fixture
def same_run(device: str, manifest: Dict[str, Any], seed: int) -> ShortRun:
    """The run that the target's operators make."""
    columns = dict.fromkeys(FUSED, "torch")
    if device == "cuda":
        versions = {name: entry["version"] for name, entry in manifest["packages"].items()}
        for name, fused in FUSED.items():
            # An implementation that adds in any order would make two equal runs differ.
            available = {row.column for row in rows(name, versions, cuda=True) if repeats(name, row.column)}
            columns[name] = next(column for column in fused if column in available)
    return ShortRun(device, tuple(columns.items()), seed)


@functools.lru_cache(maxsize=None)
def plain_losses(run: ShortRun) -> List[float]:
    """The losses to follow, without FP8: in float32 on a CPU, in bfloat16 on a GPU. Trained once per seed."""
    return run.losses("torch")


def spread(run: ShortRun) -> float:
    """How far apart two seeds are without FP8, in nats per byte, median over the steps."""
    other = plain_losses(run._replace(seed=run.seed + 1))
    return statistics.median(abs(loss - second) for loss, second in zip(plain_losses(run), other))


def assert_follows(losses: List[float], run: ShortRun) -> float:
    """Assert that a loss curve falls and stays near the one without FP8 without being it; the median distance.

    Near is a fifth of what two seeds are apart, so that no conclusion drawn from a run depends on which it was.
    The median, because one batch that upsets both runs at slightly different steps says nothing about arithmetic.
    """
    gap, band = statistics.median(abs(loss - plain) for loss, plain in zip(losses, plain_losses(run))), spread(run) / 5
    assert fall_of(losses) >= FALL, f"the loss fell by {fall_of(losses):.3f}, less than {FALL}"
    assert gap >= FLOOR, f"the curves are {gap:.2g} apart: this was no FP8"
    assert gap <= band, f"the curves are {gap:.3f} apart, more than {band:.3f}"
    return gap


def fall_of(losses: List[float]) -> float:
    """How far the mean of the last ten losses is below that of knowing nothing, in nats per byte."""
    return math.log(256) - sum(losses[-10:]) / 10
