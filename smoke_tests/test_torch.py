"""PyTorch's own FP8 casts, FP8 product and fused operators."""

from __future__ import annotations

import functools
import math
from typing import Any, Callable, Dict, List, Tuple

import pytest
import torch

import bounds
import references
from claims import proves
from fused_ops import float8_overflow, operator
from kernels import operators_run

LONG = 4099  # longer than any vector register and no multiple of one, so that vector code and its tail both run
FORMATS = ["float8_e4m3fn", "float8_e5m2"]
DTYPES = [torch.float32, torch.bfloat16]
IGNORED = -100

every_format = pytest.mark.parametrize("name", FORMATS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])


# --- float8 casts ---


def all_codes(name: str) -> torch.Tensor:
    """The 256 codes of a float8 format, in the order of their bits."""
    return torch.arange(256, dtype=torch.uint8).view(getattr(torch, name))


def bits(values: torch.Tensor) -> torch.Tensor:
    """The codes of float8 values, as integers."""
    return values.view(torch.uint8)


def cast_by_ml_dtypes(values: torch.Tensor, name: str) -> torch.Tensor:
    """The codes that ml_dtypes, an independent implementation, gives float32 values."""
    import ml_dtypes

    return torch.from_numpy(values.numpy().astype(getattr(ml_dtypes, name)).view("uint8"))


def finite_values(name: str) -> torch.Tensor:
    """The finite values of a float8 format in ascending order, without negative zero, as float32."""
    values = all_codes(name).float()
    return values[values.isfinite()].unique()


@every_format
@proves("each of the 256 float8 codes decodes to the value that ml_dtypes gives it, bit for bit", since="2.1")
def test_codes_decode(name: str) -> None:
    import ml_dtypes

    truth = torch.arange(256, dtype=torch.uint8).numpy().view(getattr(ml_dtypes, name)).astype("float32")
    found, truth = all_codes(name).float(), torch.from_numpy(truth)
    assert torch.equal(found.isnan(), truth.isnan())
    numbers = ~truth.isnan()  # of a NaN the payload is nobody's promise
    assert torch.equal(found[numbers].view(torch.int32), truth[numbers].view(torch.int32))


@every_format
@proves("each of the 256 float8 codes survives the way to float32 and back, NaN as NaN", since="2.1")
def test_codes_encode(name: str) -> None:
    codes = all_codes(name)
    again = codes.float().to(codes.dtype)
    numbers = ~codes.float().isnan()
    assert torch.equal(bits(again)[numbers], bits(codes)[numbers])
    assert again.float()[~numbers].isnan().all()


@every_format
@proves("values between float8 codes are rounded to the nearest, as ml_dtypes rounds them, bit for bit", since="2.1")
def test_cast_rounds_to_nearest(name: str, measured: Dict[str, Any]) -> None:
    values = finite_values(name)
    magnitude = torch.exp2(torch.empty(LONG).uniform_(math.log2(float(values[values > 0][0])) - 2, 0)) * values[-1]
    magnitude = magnitude.clamp(max=float(values[-1]))
    samples = torch.cat([magnitude, -magnitude, torch.empty(LONG).uniform_(-1, 1) * values[-1]])
    assert torch.equal(bits(samples.to(getattr(torch, name))), cast_by_ml_dtypes(samples, name))
    measured["values"] = len(samples)


@every_format
@proves("a value halfway between two float8 codes goes to the even one, its neighbours to the nearer one", since="2.1")
def test_ties_go_to_even(name: str) -> None:
    values = finite_values(name)
    middle = (values[1:] + values[:-1]) / 2
    cast = middle.to(getattr(torch, name))
    assert (bits(cast) % 2 == 0).all()
    assert torch.equal(bits(cast), cast_by_ml_dtypes(middle, name))
    below, above = (torch.nextafter(middle, torch.full_like(middle, side)) for side in (-math.inf, math.inf))
    assert torch.equal(below.to(cast.dtype).float(), values[:-1])
    assert torch.equal(above.to(cast.dtype).float(), values[1:])


@every_format
@proves(
    "beyond the largest value e4m3 saturates, infinity included (before torch 2.12: NaN), e5m2 becomes infinite, "
    "and NaN stays NaN",
    since="2.1",
)
def test_overflow_and_nan(name: str) -> None:
    dtype, largest = getattr(torch, name), float(finite_values(name)[-1])
    spacing = largest - float(finite_values(name)[-2])
    beyond = torch.tensor([largest + spacing / 2 * 1.001, 2 * largest, 1e30, math.inf]).repeat(LONG)
    expected = torch.full_like(beyond, float8_overflow(dtype))
    for sign in (1, -1):
        found = (sign * beyond).to(dtype).float()
        assert torch.equal(found.nan_to_num(nan=-1), (sign * expected).nan_to_num(nan=-1)), found.unique()
    just_inside = torch.tensor([largest + spacing / 2 * 0.999]).repeat(LONG)
    assert (just_inside.to(dtype).float() == largest).all()
    assert torch.full((LONG,), math.nan).to(dtype).float().isnan().all()


# --- the float8 product ---


def quantized(values: torch.Tensor, dtype: torch.dtype, per_row: bool) -> Tuple[torch.Tensor, torch.Tensor]:
    """float8 codes [n, f] of values [n, f], and the scale ([] or [n, 1], float32) that turns them back."""
    largest = values.abs().amax(dim=1, keepdim=True) if per_row else values.abs().max()
    scale = (largest / torch.finfo(dtype).max).float()
    return (values / scale).to(dtype), scale


def scaled_mm_arguments(per_row: bool) -> Tuple[torch.Tensor, ...]:
    """Operands a [165, 257] and b [131, 257] in float64, their float8 codes, and the scales for the product."""
    a, b = torch.randn(165, 257, dtype=torch.float64) * 3, torch.randn(131, 257, dtype=torch.float64) / 7
    (codes_a, scale_a), (codes_b, scale_b) = (quantized(tensor, torch.float8_e4m3fn, per_row) for tensor in (a, b))
    return a, b, codes_a, codes_b, scale_a, scale_b.t() if per_row else scale_b


every_scaling = pytest.mark.parametrize("per_row", [False, True], ids=["tensorwise", "rowwise"])


@every_scaling
@every_dtype
@proves("_scaled_mm is the float64 product of the decoded float8 codes and their scales, rounded once", since="2.5")
def test_scaled_mm_multiplies_codes(per_row: bool, dtype: torch.dtype, measured: Dict[str, Any]) -> None:
    _, _, codes_a, codes_b, scale_a, scale_b = scaled_mm_arguments(per_row)
    found = operator("scaled_mm", "torch")(codes_a, codes_b, scale_a, scale_b, dtype)
    truth = (codes_a.double() * scale_a.double()) @ (codes_b.double().t() * scale_b.double())
    assert found.dtype == dtype
    floor, ceiling = bounds.rounding_noise(bounds.MANTISSA[dtype])
    # float32 also rounds each of the 257 terms as it adds them: at worst as many roundings, in quadrature.
    ceiling = ceiling if dtype is torch.bfloat16 else ceiling * math.sqrt(257)
    measured["error"] = bounds.assert_rounded_like(found, truth, floor, ceiling)


@every_scaling
@proves("_scaled_mm of quantized operands carries the noise of two e4m3 roundings, no less, and slope 1", since="2.5")
def test_scaled_mm_has_float8_noise(per_row: bool, measured: Dict[str, Any]) -> None:
    a, b, *arguments = scaled_mm_arguments(per_row)
    found = operator("scaled_mm", "torch")(*arguments, torch.float32)
    noise = bounds.rounding_noise(bounds.E4M3, bounds.E4M3)
    measured["error"] = bounds.assert_rounded_like(found, a @ b.t(), *noise)
    measured["slope"] = bounds.slope(found, a @ b.t())


# --- fused operators ---


def attention_inputs(dtype: torch.dtype) -> List[torch.Tensor]:
    """Query [2, 6, 37, 24], key and value [2, 2, 37, 24]: three query heads share a key head, the length is odd."""
    return [torch.randn(2, heads, 37, 24).to(dtype) for heads in (6, 2, 2)]


@every_dtype
@proves("scaled_dot_product_attention, causal, grouped heads, equals float64 forward and backward", since="2.0")
def test_attention(dtype: torch.dtype, measured: Dict[str, Any]) -> None:
    inputs, gradient = attention_inputs(dtype), torch.randn(2, 6, 37, 24).to(dtype)
    found = bounds.forward_and_backward(operator("attention", "torch"), inputs, gradient)
    truth = bounds.in_float64(references.attention, inputs, gradient)
    # Rounded on the way: probabilities, their gradient and that of the scores, each head's result, the sum over a
    # group, the result.
    bounds.assert_as_in_float64(found, truth, dtype, 6, measured)


@every_dtype
@proves("scaled_dot_product_attention never looks ahead: other future tokens leave the past bit-equal", since="2.0")
def test_attention_is_causal(dtype: torch.dtype) -> None:
    attention, now = operator("attention", "torch"), 19
    inputs = attention_inputs(dtype)
    others = [torch.cat([old[:, :, :now], new[:, :, now:]], 2) for old, new in zip(inputs, attention_inputs(dtype))]
    before, after = attention(*inputs), attention(*others)
    assert torch.equal(before[:, :, :now], after[:, :, :now])
    assert not torch.equal(before[:, :, now], after[:, :, now])
    gradient = torch.randn(before.shape).to(dtype)
    gradient[:, :, now:] = 0
    _, *gradients = bounds.forward_and_backward(attention, inputs, gradient)
    assert all((tensor[:, :, now:] == 0).all() for tensor in gradients)
    assert all((tensor[:, :, now - 1] != 0).any() for tensor in gradients)


@every_dtype
@pytest.mark.parametrize("size", [1.0, 1e-4], ids=["ordinary", "tiny"])
@proves("rms_norm equals float64 forward and backward, eps under the root, also where the input is tiny", since="2.4")
def test_rms_norm(dtype: torch.dtype, size: float, measured: Dict[str, Any]) -> None:
    inputs = [(torch.randn(37, 73) * size).to(dtype), torch.randn(73).to(dtype)]
    gradient = torch.randn(37, 73).to(dtype)
    found = bounds.forward_and_backward(lambda x, w: operator("rms_norm", "torch")(x, w, 1e-5), inputs, gradient)
    truth = bounds.in_float64(lambda x, w: references.rms_norm(x, w, 1e-5), inputs, gradient)
    # Rounded on the way: the normalized row, the result.
    bounds.assert_as_in_float64(found, truth, dtype, 2, measured)


def cross_entropy_inputs(dtype: torch.dtype) -> Tuple[torch.Tensor, torch.Tensor]:
    """Logits [37, 83] of ordinary size and labels [37], of which every third is ignored."""
    labels = torch.randint(83, (37,))
    labels[::3] = IGNORED
    return (torch.randn(37, 83) * 4).to(dtype), labels


@every_dtype
@proves("cross_entropy with ignored rows equals float64 forward and backward", since="1.10")
def test_cross_entropy(dtype: torch.dtype, measured: Dict[str, Any]) -> None:
    logits, labels = cross_entropy_inputs(dtype)
    fused = functools.partial(operator("cross_entropy", "torch"), labels=labels, ignore_index=IGNORED)
    plain = functools.partial(references.cross_entropy, labels=labels, ignore_index=IGNORED)
    loss, gradient = bounds.forward_and_backward(fused, [logits], torch.ones(()))
    true_loss, true_gradient = bounds.in_float64(plain, [logits], torch.ones(()))
    # Rounded on the way: the log-probabilities, the probabilities, the result. One number has no noise to measure.
    ceiling = 3 * 2.0 ** -(bounds.MANTISSA[dtype] + 1)
    assert abs(float(loss) - float(true_loss)) <= ceiling * abs(float(true_loss))
    bounds.assert_as_in_float64([gradient], [true_gradient], dtype, 3, measured)


@every_dtype
@proves("cross_entropy does not look at ignored rows: other logits there move neither loss nor gradient", since="1.10")
def test_cross_entropy_ignores(dtype: torch.dtype) -> None:
    logits, labels = cross_entropy_inputs(dtype)
    others = torch.where((labels == IGNORED)[:, None], torch.randn(37, 83).to(dtype) * 9, logits)
    assert not torch.equal(logits, others)
    fused = functools.partial(operator("cross_entropy", "torch"), labels=labels, ignore_index=IGNORED)
    before, after = (bounds.forward_and_backward(fused, [rows], torch.ones(())) for rows in (logits, others))
    assert all(torch.equal(*pair) for pair in zip(before, after))
    assert (before[1][labels == IGNORED] == 0).all()


@every_dtype
@proves("SwiGLU equals float64 forward and backward", since="1.10")
def test_swiglu(dtype: torch.dtype, measured: Dict[str, Any]) -> None:
    inputs, gradient = [torch.randn(37, 83).to(dtype) for _ in range(2)], torch.randn(37, 83).to(dtype)
    found = bounds.forward_and_backward(operator("swiglu", "torch"), inputs, gradient)
    truth = bounds.in_float64(references.swiglu, inputs, gradient)
    # Rounded on the way: silu(gate), its derivative, the result.
    bounds.assert_as_in_float64(found, truth, dtype, 3, measured)


@every_dtype
@proves("RoPE with a growing table equals the complex closed form for a short, a long and a shifted call", since="1.10")
def test_rope(dtype: torch.dtype, measured: Dict[str, Any]) -> None:
    bounds.assert_rope_as_in_float64(operator("rope", "torch"), dtype, measured)


@proves("AdamW(fused=True) follows the float64 algorithm over eight steps, decay decoupled", seed="B11", since="2.4")
def test_adamw(measured: Dict[str, Any]) -> None:
    measured["error"] = bounds.assert_adamw_as_in_float64(operator("adamw", "torch"), LONG)


@proves("AdamW(fused=True) with zero gradients only decays: p * (1 - lr * weight_decay)", seed="B11", since="2.4")
def test_adamw_decays_without_gradient() -> None:
    bounds.assert_adamw_decays(operator("adamw", "torch"), LONG)


# --- over all operators ---


def swept(operator_name: str, dtype: torch.dtype) -> Tuple[Callable[..., torch.Tensor], List[torch.Tensor]]:
    """An operator and inputs [5, 121] for it, each row sweeping -30 .. 30 with zeros, subnormals and 1e4 in between."""
    smallest = torch.finfo(dtype).smallest_normal / 4
    special = torch.tensor([0.0, smallest, -smallest, 1e4, -1e4])
    sweep = torch.stack([torch.linspace(-30, 30, 121).roll(shift) for shift in range(5)])
    sweep[:, ::24] = special.repeat(2)[:6]
    x, call = sweep.to(dtype), operator(operator_name, "torch")
    if operator_name == "attention":
        return call, [x.view(1, 1, 11, 55), x.view(1, 1, 11, 55), x.view(1, 1, 11, 55)]
    if operator_name == "cross_entropy":
        return lambda logits: call(logits, torch.arange(5), IGNORED), [x]
    if operator_name == "rms_norm":
        return lambda rows, weight: call(rows, weight, 1e-5), [torch.cat([x, torch.zeros_like(x[:1])]), x[0]]
    return call, [x, x.flip(0)]


every_operator = pytest.mark.parametrize("name", ["attention", "cross_entropy", "rms_norm", "swiglu"])


@every_operator
@every_dtype
@proves("inputs from -30 to 30, zeros, subnormals and 1e4 give finite outputs and gradients", since="2.4")
def test_extremes_stay_finite(name: str, dtype: torch.dtype) -> None:
    call, inputs = swept(name, dtype)
    output = call(*inputs)
    for tensor in bounds.forward_and_backward(call, inputs, torch.ones_like(output)):
        assert tensor.isfinite().all()


@every_operator
@every_dtype
@proves("twenty runs on the same input give the same bits, forward and backward", since="2.4")
def test_runs_are_bit_equal(name: str, dtype: torch.dtype) -> None:
    call, inputs = swept(name, dtype)
    gradient = torch.randn(call(*inputs).shape)
    first, *others = (bounds.forward_and_backward(call, inputs, gradient) for _ in range(20))
    assert all(torch.equal(*pair) for run in others for pair in zip(first, run))


@proves("autocast on the CPU computes in bfloat16: 1e30 stays finite and 1 + 2^-9 rounds to 1", since="1.10")
def test_autocast_is_bfloat16() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        large = torch.full((3, 5), 1e30) @ torch.eye(5, 7)
        near_one = torch.full((3, 5), 1 + 2.0**-9) @ torch.eye(5, 7)
    assert large.dtype == torch.bfloat16
    assert (large[:, :5].float() / 1e30 - 1).abs().max() <= 2.0**-8
    assert torch.equal(near_one[:, :5].float(), torch.ones(3, 5))


@every_dtype
@proves("scaled_dot_product_attention runs the flash kernel forward and backward, not its parts", since="2.3")
def test_flash_attention_ran(dtype: torch.dtype) -> None:
    call, inputs = swept("attention", dtype)
    gradient = torch.ones_like(call(*inputs))
    ran = operators_run(lambda: bounds.forward_and_backward(call, inputs, gradient))
    flash = "_scaled_dot_product_flash_attention_for_cpu"
    assert {flash, flash + "_backward"} <= ran, "ran " + ", ".join(sorted(ran))


@proves("AdamW(fused=True) runs the one fused kernel", seed="B11", since="2.4")
def test_fused_adamw_ran() -> None:
    parameter = torch.nn.Parameter(torch.randn(5))
    parameter.grad = torch.randn(5)
    optimizer = operator("adamw", "torch")([parameter], **bounds.ADAMW)
    assert "_fused_adamw_" in operators_run(optimizer.step)
