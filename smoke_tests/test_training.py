"""The parts together: a small Llama trained in FP8 follows the same Llama in high precision."""

from __future__ import annotations

import functools
import math
import statistics
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Tuple

import pytest
import torch
from torchao.float8 import float8_scaling_utils

from claims import every, proves
from training.llama import Shape, train

FALL = 2.5  # nats per byte below ln 256, the loss of knowing nothing
FLOOR = 1e-4  # on one thread float32 repeats to the last bit, so that only other arithmetic is farther off


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The products are too small to share: threads would only wait for one another, on a busy machine for minutes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# The fused operators of the model, the first that the target has; on a CPU all are torch's.
FUSED = {
    "attention": ("flash-attn", "transformer-engine", "torch.flash"),
    "rms_norm": ("liger-kernel", "apex", "torch"),
    "rope": ("liger-kernel", "flash-attn", "torch"),
    "swiglu": ("liger-kernel", "flash-attn", "torch"),
    "cross_entropy": ("liger-kernel", "flash-attn", "torch"),
    "adamw": ("apex", "torch"),
}
ON_GPU = Shape(head_size=64, hidden=832)  # the smallest that every attention kernel takes


class Run(NamedTuple):
    """A training run but for its linear layers."""

    device: str
    columns: Tuple[Tuple[str, str], ...]
    seed: int

    def losses(self, linear: str, **others: Any) -> List[float]:
        shape = ON_GPU if self.device == "cuda" else Shape()
        return train({**dict(self.columns), "linear": linear}, self.seed, self.device, shape, **others)


@pytest.fixture
def same_run(device: str, manifest: Dict[str, Any], seed: int) -> Run:
    """The run that the target's operators make."""
    columns = dict.fromkeys(FUSED, "torch")
    if device == "cuda":
        has = {"torch", *manifest["packages"]}
        columns = {name: next(one for one in all_ if one.partition(".")[0] in has) for name, all_ in FUSED.items()}
    return Run(device, tuple(columns.items()), seed)


@functools.lru_cache(maxsize=None)
def plain_losses(run: Run) -> List[float]:
    """The losses to follow, without FP8: in float32 on a CPU, in bfloat16 on a GPU. Trained once per seed."""
    return run.losses("torch")


def spread(run: Run) -> float:
    """How far apart two seeds are without FP8, in nats per byte, median over the steps."""
    other = plain_losses(run._replace(seed=run.seed + 1))
    return statistics.median(abs(one - two) for one, two in zip(plain_losses(run), other))


def assert_follows(losses: List[float], run: Run) -> float:
    """Assert that a loss curve falls and stays near the one without FP8 without being it; the median distance.

    Near is a fifth of what two seeds are apart, so that no conclusion drawn from a run depends on which it was.
    The median, because one batch that upsets both runs at slightly different steps says nothing about arithmetic.
    """
    gap, band = statistics.median(abs(one - other) for one, other in zip(losses, plain_losses(run))), spread(run) / 5
    assert fall_of(losses) >= FALL, f"the loss fell by {fall_of(losses):.3f}, less than {FALL}"
    assert gap >= FLOOR, f"the curves are {gap:.2g} apart: this was no FP8"
    assert gap <= band, f"the curves are {gap:.3f} apart, more than {band:.3f}"
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


@every("linear")
@proves(
    "a 2-layer Llama in FP8, its other operators fused, learns real text, its loss falling by 2.5 nats per byte or "
    "more and staying within a fifth of what two seeds are apart of the run without FP8, without being the same",
    package="torch",
)
def test_llama_follows_high_precision(column: str, same_run: Run, measured: Dict[str, Any]) -> None:
    losses = same_run.losses(column)
    measured["loss"], measured["plain"] = losses[-1], plain_losses(same_run)[-1]
    measured["seeds"] = spread(same_run)
    measured["gap"] = assert_follows(losses, same_run)


@proves(
    "the same check catches scales frozen at the first step, although the loss still falls by 2.5 nats per byte",
    package="torchao",
)
def test_frozen_scale_is_caught(same_run: Run, measured: Dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    frozen = FrozenScales(float8_scaling_utils.tensor_to_scale)
    monkeypatch.setattr(float8_scaling_utils, "tensor_to_scale", frozen)
    losses = same_run.losses("torchao.tensorwise", each_step=frozen.restart)
    measured["loss"] = losses[-1]
    assert fall_of(losses) >= FALL, "frozen scales ruined the run: anybody would have noticed"
    with pytest.raises(AssertionError, match=r"apart, more than") as caught:
        assert_follows(losses, same_run)
    measured["caught"] = str(caught.value).splitlines()[0]
