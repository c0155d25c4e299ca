"""Faults of Transformer Engine's FP8 layers."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace
from typing import Any, Callable, ContextManager, List
from unittest import mock

import torch

from smoke_tests.faults.float8 import truncated
from smoke_tests.faults.planting import Call, backward_of, patched


def engine(kind: str, test: str, column: str = "transformer-engine") -> Callable[[Call], Call]:
    """Make a fault of a context manager that replaces something in Transformer Engine."""
    return patched(kind, "test_transformer_engine.py::test_" + test, column, "linear")


def each_forward(change: Callable[..., Any]) -> ContextManager[Any]:
    """The forward of te.Linear is change(its own, layer, ...)."""
    layer = importlib.import_module("transformer_engine.pytorch").Linear
    own = layer.forward
    return mock.patch.object(layer, "forward", lambda self, *given, **named: change(own, self, *given, **named))


@engine("no FP8", "products_ran_in_fp8")
def fp8_is_never_switched_on(_: str) -> ContextManager[Any]:
    module = importlib.import_module("transformer_engine.pytorch")
    name = "autocast" if hasattr(module, "autocast") else "fp8_autocast"
    enter = getattr(module, name)
    return mock.patch.object(module, name, lambda **named: enter(**{**named, "enabled": False}))


@engine("wrong format", "layer", "transformer-engine.delayed")
def gradients_of_the_engine_in_e4m3(_: str) -> ContextManager[Any]:
    module = importlib.import_module("transformer_engine.common.recipe")
    formats = {**module.Format.__members__, "HYBRID": module.Format.E4M3}
    return mock.patch.object(module, "Format", SimpleNamespace(**formats))


@engine("wrong scale", "layer")
def output_of_the_engine_2_percent_too_large(_: str) -> ContextManager[Any]:
    return each_forward(lambda own, *given, **named: own(*given, **named) * 1.02)


@engine("wrong gradient", "gradients_have_slope_1")
def gradients_of_the_engine_2_percent_too_large(_: str) -> ContextManager[Any]:
    def larger(own: Call, *given: Any, **named: Any) -> torch.Tensor:
        output = own(*given, **named)
        return backward_of(output, output * 1.02)

    return each_forward(larger)


@engine("stale state", "weight_updates_reach_the_copy")
def copy_of_the_weight_is_kept(_: str) -> ContextManager[Any]:
    def stale(own: Call, layer: Any, x: torch.Tensor, is_first_microbatch: Any = None, **named: Any) -> torch.Tensor:
        first, layer.copied = not hasattr(layer, "copied"), True
        return own(layer, x, is_first_microbatch=first, **named)

    return each_forward(stale)


def delayed_with(**others: Any) -> ContextManager[Any]:
    """Delayed scaling has these settings, whatever it is given."""
    kind = importlib.import_module("transformer_engine.common.recipe").DelayedScaling
    own = kind.__init__
    return mock.patch.object(kind, "__init__", lambda self, **named: own(self, **{**named, **others}))


@engine("amax history", "amax_history_is_as_long_as_asked", "transformer-engine.delayed")
def history_of_15_steps(_: str) -> ContextManager[Any]:
    return delayed_with(amax_history_len=15)


@engine("amax history", "amax_history_is_as_long_as_asked", "transformer-engine.delayed")
def the_most_recent_value_alone(_: str) -> ContextManager[Any]:
    return delayed_with(amax_compute_algo="most_recent")


@engine("bias", "products_of_one_sign", "transformer-engine.blockwise")
def forward_of_the_engine_without_a_split_accumulator(_: str) -> ContextManager[Any]:
    """As delayed scaling multiplies forward, in the recipe that promises to split."""

    def unsplit(own: Call, layer: Any, x: torch.Tensor, **named: Any) -> torch.Tensor:
        output: torch.Tensor = own(layer, x, **named)
        if layer.use_bias or x.dim() != 2:
            return output
        return backward_of(truncated(x.detach(), layer.weight.detach()).to(output.dtype), output)

    return each_forward(unsplit)


def scales_above_the_largest_code(factor: float) -> ContextManager[Any]:
    """Where the largest value is above the largest code, so that the scale is below 1, it is so many times as large."""
    manager = importlib.import_module("transformer_engine.pytorch.module.base").FP8GlobalStateManager
    extension = vars(sys.modules[manager.__module__])["tex"]
    own = extension.fused_amax_and_scale_update_after_reduction

    def update(reduced: torch.Tensor, histories: Any, scales: List[torch.Tensor], *others: Any) -> None:
        own(reduced, histories, scales, *others)
        for scale in scales:
            scale.mul_(torch.where(scale < 1, factor, 1.0))

    return mock.patch.object(extension, own.__name__, update)


@engine("wrong scale", "scales_follow", "transformer-engine.delayed")
def scale_of_the_engine_doubled_where_the_largest_value_is_above_448(_: str) -> ContextManager[Any]:
    return scales_above_the_largest_code(2.0)


@engine("wrong scale", "amax_history", "transformer-engine.delayed")
def scale_of_the_engine_halved_where_the_largest_value_is_above_448(_: str) -> ContextManager[Any]:
    return scales_above_the_largest_code(0.5)


@engine("amax not updated", "amax_history", "transformer-engine.delayed")
def delayed_scales_are_never_updated(_: str) -> ContextManager[Any]:
    scales = importlib.import_module("transformer_engine.pytorch.module.base").FP8GlobalStateManager
    return mock.patch.object(scales, "reduce_and_update_fp8_tensors", lambda *given, **named: None)
