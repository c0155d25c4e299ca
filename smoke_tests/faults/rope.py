"""Faults of rotary embeddings: a factory(head size, base) of rotate(x, start)."""

from __future__ import annotations

import importlib
from functools import wraps
from typing import Any, ContextManager, List
from unittest import mock

import torch

from smoke_tests.faults.planting import Call, Wrap, backward_of, patched, wrong


def rebased(make: Any, made: Call) -> Call:
    """A factory with the angles of another one."""
    made.angles = make.angles  # type: ignore[attr-defined]
    return made


def turned(change: Wrap) -> Wrap:
    """Changes the rotations that a factory makes."""

    @wraps(change)
    def wrap(make: Call) -> Call:
        return rebased(make, lambda size, base: change(make(size, base)))

    return wrap


@wrong("rope pairs", "rope")
@turned
def neighbours_paired_in_place_of_halves(rotate: Call) -> Call:
    def paired(x: torch.Tensor, start: int) -> torch.Tensor:
        order = torch.arange(x.shape[-1], device=x.device).view(-1, 2).t().flatten()
        return rotate(x[..., order], start)[..., order.argsort()]

    return paired


def swap(x: torch.Tensor) -> torch.Tensor:
    """The two halves of each head, swapped: rotating these is rotating backwards."""
    return x.roll(x.shape[-1] // 2, -1)


@wrong("another formula", "rope")
@turned
def rotated_backwards(rotate: Call) -> Call:
    return lambda x, start: swap(rotate(swap(x), start))


@wrong("wrong gradient", "rope")
@turned
def gradient_rotated_forwards(rotate: Call) -> Call:
    return lambda x, start: backward_of(rotate(x, start), swap(rotate(swap(x), start)))


@wrong("wrong scale", "rope")
@turned
def rotation_2_percent_too_large(rotate: Call) -> Call:
    return lambda x, start: rotate(x, start) * 1.02


@wrong("too few bits", "rope", dtype="float32")
@turned
def rotation_rounded_to_bfloat16(rotate: Call) -> Call:
    return lambda x, start: rotate(x.bfloat16().to(x.dtype), start)


@wrong("rope positions", "rope")
@turned
def positions_counted_from_1(rotate: Call) -> Call:
    return lambda x, start: rotate(x, start + 1)


@wrong("beyond a tile", "rope")
@turned
def positions_from_128_on_counted_from_129(rotate: Call) -> Call:
    def late(x: torch.Tensor, start: int) -> torch.Tensor:
        first = rotate(x[..., :128, :], start)
        return torch.cat([first, rotate(x[..., 128:, :], start + 129)], -2) if x.shape[-2] > 128 else first

    return late


@wrong("rope positions", "rope")
@turned
def start_ignored(rotate: Call) -> Call:
    return lambda x, start: rotate(x, 0)


@wrong("rope positions", "rope")
@turned
def positions_rounded_to_bfloat16(rotate: Call) -> Call:
    def rounded(x: torch.Tensor, start: int) -> torch.Tensor:
        positions = torch.arange(start, start + x.shape[-2]).bfloat16().int().tolist()
        return torch.cat([rotate(x[..., i : i + 1, :], position) for i, position in enumerate(positions)], -2)

    return rounded


@wrong("stale rope cache", "rope")
@turned
def table_never_grows(rotate: Call) -> Call:
    """Tokens beyond the table of the first call stay as they are."""
    known: List[int] = []

    def stale(x: torch.Tensor, start: int) -> torch.Tensor:
        known.append(x.shape[-2])
        inside = max(0, known[0] - start)
        return torch.cat([rotate(x[..., :inside, :], start), x[..., inside:, :]], -2) if inside else x * 1

    return stale


@wrong("another formula", "rope")
def base_2_percent_off(make: Call) -> Call:
    return rebased(make, lambda size, base: make(size, base * 1.02))


@wrong("another formula", "rope")
def base_ignored(make: Call) -> Call:
    return rebased(make, lambda size, base: make(size, 10000.0))


DECODER = "training/test_llama.py::test_"


@patched("another formula", DECODER + "decoder_turns_by_its_base", "torch")
def base_of_the_decoder_ignored(_: str) -> ContextManager[Any]:
    rotary = importlib.import_module("smoke_tests.training.llama").Rotary
    own = rotary.__init__
    plain = lambda self, model, columns: own(self, model._replace(base=10000.0), columns)  # noqa: E731
    return mock.patch.object(rotary, "__init__", plain)
