"""Faults of PyTorch's float8 product and casts, and of torchao's float8 layers."""

from __future__ import annotations

import importlib
from functools import wraps
from typing import Any, Callable, ContextManager, Dict
from unittest import mock

import torch

from smoke_tests.faults.planting import CASTS, CODES, E4M3, E5M2, FAULTS, FLOAT8, Call, Fault, Wrap, patched, wrong

# --- the float8 product: (a, b, scale of a, scale of b, dtype) ---

multiplies = f"{CASTS}::test_scaled_mm_multiplies_codes"


@wrong("wrong scale", "scaled_mm", by=multiplies)
def product_2_percent_too_large(multiply: Call) -> Call:
    return lambda a, b, scale_a, *others: multiply(a, b, scale_a * 1.02, *others)


@wrong("wrong scale", "scaled_mm", by=multiplies)
def scale_inverted(multiply: Call) -> Call:
    return lambda a, b, scale_a, scale_b, dtype: multiply(a, b, 1 / scale_a, scale_b, dtype)


@wrong("wrong scale", "scaled_mm", by=multiplies)
def scales_ignored(multiply: Call) -> Call:
    return lambda a, b, scale_a, scale_b, dtype: multiply(
        a, b, torch.ones_like(scale_a), torch.ones_like(scale_b), dtype
    )


@wrong("wrong scale", "scaled_mm", by=multiplies)
def scales_above_1_doubled(multiply: Call) -> Call:
    """Wrong only where the largest value is above 448, the largest code."""
    return lambda a, b, scale_a, *others: multiply(a, b, scale_a * (1 + (scale_a > 1)), *others)


@wrong("wrong scale", "scaled_mm", by=multiplies)
def scales_above_1_halved(multiply: Call) -> Call:
    return lambda a, b, scale_a, *others: multiply(a, b, scale_a / (1 + (scale_a > 1)), *others)


def truncated(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b.t() of [n, k] and [m, k] in float32, whose sum is cut to 13 bits behind its first after every 32 terms."""
    total = torch.zeros(a.shape[0], b.shape[0], device=a.device)
    for first in range(0, a.shape[1], 32):
        total = total + a[:, first : first + 32].float() @ b[:, first : first + 32].float().t()
        unit = torch.exp2(torch.floor(torch.log2(total.abs().clamp(min=1e-30))) - 13)
        total = torch.trunc(total / unit) * unit
    return total


@wrong("bias", "scaled_mm", by=f"{CASTS}::test_scaled_mm_of_one_sign")
def sums_truncated_to_13_bits_all_the_way(multiply: Call) -> Call:
    """Fast accumulation in place of the exact one."""
    return lambda a, b, scale_a, scale_b, dtype, **_: (truncated(a, b) * scale_a * scale_b).to(dtype)


@wrong("wrong scale", "scaled_mm", by=multiplies)
def one_scale_for_all_rows(multiply: Call) -> Call:
    return lambda a, b, scale_a, *others: multiply(a, b, scale_a.max().expand_as(scale_a).contiguous(), *others)


@wrong("wrong format", "scaled_mm", by=multiplies)
def operand_rounded_to_e5m2(multiply: Call) -> Call:
    return lambda a, *others: multiply(a.float().to(E5M2).float().to(a.dtype), *others)


@wrong("too few bits", "scaled_mm", by=multiplies, dtype="float32")
def product_rounded_to_bfloat16(multiply: Call) -> Call:
    return lambda a, b, scale_a, scale_b, dtype: multiply(a, b, scale_a, scale_b, torch.bfloat16).to(dtype)


# --- casts and autocast ---


def casts(change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> ContextManager[Any]:
    """Every cast to float8 gives change(values, codes)."""
    to = torch.Tensor.to

    def changed(self: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        codes = to(self, *given, **named)
        return change(self, codes) if codes.dtype in CODES and self.dtype not in CODES else codes

    return mock.patch.object(torch.Tensor, "to", changed)


def towards_zero(values: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """The next smaller code where a code is larger than its value."""
    larger = codes.float().abs() > values.float().abs()
    return (codes.view(torch.uint8) - larger.byte()).view(codes.dtype)


@patched("rounding", f"{CASTS}::test_cast_rounds_to_nearest", "torch")
def casts_round_towards_zero(_: str) -> ContextManager[Any]:
    return casts(towards_zero)


@patched("rounding", f"{CASTS}::test_ties_go_to_even", "torch")
def ties_go_towards_zero(_: str) -> ContextManager[Any]:
    def lower(values: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        smaller = (codes.view(torch.uint8) - 1).view(codes.dtype).float()
        tie = (values - smaller).abs() == (codes.float() - values).abs()
        return (codes.view(torch.uint8) - tie.byte()).view(codes.dtype)

    return casts(lower)


@patched("rounding", f"{CASTS}::test_cast_rounds_to_nearest", "torch")
def subnormal_codes_flushed_to_zero(_: str) -> ContextManager[Any]:
    def flush(values: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        small = codes.float().abs() < torch.finfo(codes.dtype).tiny
        return codes.view(torch.uint8).masked_fill(small, 0).view(codes.dtype)

    return casts(flush)


@patched("overflow", f"{CASTS}::test_overflow_and_nan", "torch")
def nan_becomes_zero(_: str) -> ContextManager[Any]:
    return casts(lambda values, codes: codes.view(torch.uint8).masked_fill(values.isnan(), 0).view(codes.dtype))


@patched("overflow", f"{CASTS}::test_overflow_and_nan", "torch")
def the_largest_code_is_never_reached(_: str) -> ContextManager[Any]:
    def below(values: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        largest = codes.float().abs() == torch.finfo(codes.dtype).max
        return (codes.view(torch.uint8) - largest.byte()).view(codes.dtype)

    return casts(below)


@patched("wrong format", f"{CASTS}::test_codes_decode", "torch")
def e4m3_and_e5m2_swapped(_: str) -> ContextManager[Any]:
    return mock.patch.multiple(torch, float8_e4m3fn=E5M2, float8_e5m2=E4M3)


@patched("wrong format", f"{CASTS}::test_autocast_is_bfloat16", "torch")
def autocast_to_float16(_: str) -> ContextManager[Any]:
    class Narrow(torch.autocast):  # type: ignore[misc]
        def __init__(self, device: str, dtype: Any = None, **others: Any) -> None:
            super().__init__(device, dtype=torch.float16, **others)

    return mock.patch.object(torch, "autocast", Narrow)


# --- torchao's float8 layer ---


def torchao(kind: str, test: str, file: str, name: str, column: str = "torchao") -> Callable[[Wrap], Wrap]:
    """Make a fault of a function from torchao.float8.FILE.NAME to what takes its place."""

    def note(wrap: Wrap) -> Wrap:
        def plant(_: str) -> ContextManager[Any]:
            module = importlib.import_module("torchao.float8." + file)
            return mock.patch.object(module, name, wrap(getattr(module, name)))

        claim = test if "::" in test else f"{FLOAT8}::{test}"
        FAULTS.append(Fault(wrap.__name__.replace("_", " "), kind, "linear", column, "", (claim,), plant))
        return wrap

    return note


@torchao("wrong format", "test_formats", "float8_linear", "hp_tensor_to_float8_dynamic")
def the_other_format_in_every_cast(cast: Call) -> Call:
    other = {E4M3: E5M2, E5M2: E4M3}
    return lambda tensor, dtype, *given, **named: cast(tensor, other[dtype], *given, **named)


@torchao("wrong format", "test_formats", "float8_linear", "hp_tensor_to_float8_dynamic", "torchao.tensorwise")
def gradients_in_e4m3_too(cast: Call) -> Call:
    return lambda tensor, dtype, *given, **named: cast(tensor, E4M3, *given, **named)


@torchao("wrong format", "test_linear", "float8_training_tensor", "to_fp8_saturated")
def e4m3_values_rounded_to_e5m2_first(cast: Call) -> Call:
    return lambda values, dtype: cast(values.to(E5M2).float(), dtype)


@torchao("no FP8", "test_linear", "float8_linear", "hp_tensor_to_float8_dynamic")
def products_left_in_high_precision(cast: Call) -> Call:
    return lambda tensor, *given, **named: tensor.bfloat16() if tensor.is_cuda else tensor


@torchao("rounding", "test_linear", "float8_training_tensor", "to_fp8_saturated")
def layer_rounds_towards_zero(cast: Call) -> Call:
    return lambda values, dtype: towards_zero(values, cast(values, dtype))


@torchao("wrong scale", "test_linear", "float8_scaling_utils", "hp_tensor_and_scale_to_float8")
def scale_2_percent_off_on_the_way_back(cast: Call) -> Call:
    def off(*given: Any) -> Any:
        tensor = cast(*given)
        tensor._scale = tensor._scale * 1.02
        return tensor

    return off


@torchao("wrong scale", "test_linear", "float8_scaling_utils", "tensor_to_scale")
def scale_is_inverted(compute: Call) -> Call:
    return lambda *given, **named: 1 / compute(*given, **named)


@torchao("wrong scale", "test_linear", "float8_scaling_utils", "tensor_to_scale")
def scale_twice_as_large_as_fits(compute: Call) -> Call:
    return lambda *given, **named: 2 * compute(*given, **named)


@patched("another kernel", f"{FLOAT8}::test_products_ran_in_fp8", "torchao", "linear")
def each_product_of_the_layer_runs_twice(_: str) -> ContextManager[Any]:
    own = torch._scaled_mm
    return mock.patch.object(torch, "_scaled_mm", lambda *given, **named: [own(*given, **named) for _ in range(2)][1])


LARGEST = "test_largest_values_become_the_largest_code"


@torchao("wrong scale", LARGEST, "float8_utils", "amax_to_scale")
def scale_doubled_where_the_largest_value_is_above_448(compute: Call) -> Call:
    return lambda amax, *given, **named: compute(amax, *given, **named) * (1 + (amax > 448).float())


@torchao("wrong scale", LARGEST, "float8_utils", "amax_to_scale")
def scale_halved_where_the_largest_value_is_above_448(compute: Call) -> Call:
    return lambda amax, *given, **named: compute(amax, *given, **named) / (1 + (amax > 448).float())


@torchao("wrong scale", LARGEST, "float8_utils", "amax_to_scale")
def scale_halved_of_the_largest_row_alone(compute: Call) -> Call:
    return lambda amax, *given, **named: compute(amax, *given, **named) / (1 + (amax == amax.max()).float())


@torchao("amax not updated", "test_scales_follow_the_input", "float8_scaling_utils", "tensor_to_scale")
def scales_of_the_first_call_are_kept(compute: Call) -> Call:
    scales: Dict[Any, torch.Tensor] = {}

    def first(tensor: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        return scales.setdefault((tensor.shape, *map(str, given)), compute(tensor, *given, **named))

    return first


for _recipe in ("rowwise", "rowwise_with_gw_hp"):

    @torchao("wrong scale", "test_rows_have_their_own_scale", "float8_utils", "tensor_to_amax", "torchao." + _recipe)
    def all_rows_share_a_scale(largest: Call) -> Call:
        return lambda *given: (amax := largest(*given)).max().expand_as(amax)


def each_layer(change: Callable[[torch.nn.Module], Any]) -> Wrap:
    """Changes every layer that was converted."""

    @wraps(change)
    def wrap(convert: Call) -> Call:
        def converted(model: torch.nn.Module, keep: Callable[[str], bool]) -> torch.nn.Module:
            model = convert(model, keep)
            for layer in model.modules():
                if layer.__class__.__name__ == "Float8Linear":
                    change(layer)
            return model

        return converted

    return wrap


@wrong("no FP8", "linear", by="test_training.py::test_llama_follows_high_precision", column="torchao")
def layers_are_not_converted(convert: Call) -> Call:
    return lambda model, keep: model


@wrong("dropped gradient", "linear", by=f"{FLOAT8}::test_linear", column="torchao")
@each_layer
def no_gradient_of_the_bias(layer: torch.nn.Module) -> None:
    if layer.bias is not None:
        layer.bias.register_hook(torch.zeros_like)


@wrong("wrong gradient", "linear", by=f"{FLOAT8}::test_linear", column="torchao")
@each_layer
def gradient_of_the_weight_2_percent_too_large(layer: torch.nn.Module) -> None:
    layer.weight.register_hook(lambda gradient: gradient * 1.02)


@wrong("wrong scale", "linear", by=f"{FLOAT8}::test_linear", column="torchao")
@each_layer
def layer_output_2_percent_too_large(layer: torch.nn.Module) -> None:
    layer.register_forward_hook(lambda _, given, output: output * 1.02)


@wrong("stale state", "linear", by="test_training.py::test_llama_follows_high_precision", column="torchao")
@each_layer
def weight_of_the_first_step_is_kept(layer: torch.nn.Module) -> None:
    stale, own = layer.weight.detach().clone(), layer.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        current = layer.weight.detach().clone()
        layer.weight.data.copy_(stale)
        output: torch.Tensor = own(x)
        layer.weight.data.copy_(current)
        return output

    layer.forward = forward


@wrong("weight transposed", "linear", by=f"{FLOAT8}::test_linear", column="torchao")
@each_layer
def gradients_of_square_weights_transposed(layer: torch.nn.Module) -> None:
    if layer.in_features == layer.out_features:
        layer.weight.register_hook(lambda gradient: gradient.t())
