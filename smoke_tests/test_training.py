"""The parts together: a small Llama trained in emulated FP8 follows the same Llama in float32."""

from __future__ import annotations

import functools
import math
import statistics
from typing import Any, Callable, Dict, Iterator, List

import pytest
import torch
from torchao.float8 import float8_scaling_utils

from claims import proves
from training.llama import train

FALL = 2.5  # nats per byte below ln 256, the loss of knowing nothing
BAND = 0.015  # nats per byte, median over the steps: two float32 seeds are at least five times as far apart
FLOOR = 1e-4  # on one thread float32 repeats to the last bit, so that only other arithmetic is farther off


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The products are too small to share: threads would only wait for one another, on a busy machine for minutes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@functools.lru_cache(maxsize=None)
def float32_losses(seed: int) -> List[float]:
    """The losses to follow, trained once per seed."""
    return train("torch", seed)


def assert_follows(losses: List[float], truth: List[float]) -> float:
    """Assert that a loss curve falls and stays within the band of another without being it; the median distance.

    The median, because one batch that upsets both runs at slightly different steps says nothing about arithmetic.
    """
    gap = statistics.median(abs(one - other) for one, other in zip(losses, truth))
    assert fall_of(losses) >= FALL, f"the loss fell by {fall_of(losses):.3f}, less than {FALL}"
    assert gap >= FLOOR, f"the curves are {gap:.2g} apart: this was no FP8"
    assert gap <= BAND, f"the curves are {gap:.3f} apart, more than {BAND}"
    return gap


def fall_of(losses: List[float]) -> float:
    """How far the mean of the last ten losses is below that of knowing nothing, in nats per byte."""
    return math.log(256) - sum(losses[-10:]) / 10


class FrozenScales:
    """Computes the scales of the first step and hands out the same ones in every later step."""

    def __init__(self, compute: Callable[..., torch.Tensor]) -> None:
        self.compute = compute
        self.scales: List[torch.Tensor] = []
        self.used = 0

    def restart(self) -> None:
        """Begin a step."""
        self.used = 0

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.used == len(self.scales):
            self.scales.append(self.compute(*args, **kwargs))
        self.used += 1
        return self.scales[self.used - 1]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@proves(
    "a 2-layer Llama in emulated FP8 learns real text, its loss falling by 2.5 nats per byte or more and staying "
    "within 0.015 of float32's (median over the steps) without being the same",
    package="torchao",
)
def test_llama_follows_float32(recipe: str, seed: int, measured: Dict[str, Any]) -> None:
    losses = train("torchao." + recipe, seed)
    measured["loss"], measured["float32"] = losses[-1], float32_losses(seed)[-1]
    measured["gap"] = assert_follows(losses, float32_losses(seed))


@proves(
    "the same check catches scales frozen at the first step, although the loss still falls by 2.5 nats per byte",
    package="torchao",
)
def test_frozen_scale_is_caught(seed: int, measured: Dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    frozen = FrozenScales(float8_scaling_utils.tensor_to_scale)
    monkeypatch.setattr(float8_scaling_utils, "tensor_to_scale", frozen)
    losses = train("torchao.tensorwise", seed, each_step=frozen.restart)
    measured["loss"] = losses[-1]
    assert fall_of(losses) >= FALL, "frozen scales ruined the run: anybody would have noticed"
    with pytest.raises(AssertionError, match=r"apart, more than") as caught:
        assert_follows(losses, float32_losses(seed))
    measured["caught"] = str(caught.value).splitlines()[0]
