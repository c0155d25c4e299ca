"""PyTorch's own FP8 casts, FP8 product and fused operators."""

from __future__ import annotations

import math
from typing import Any, Dict

import pytest
import torch

from smoke_tests.claims import every, proves
from smoke_tests.operators import bounds
from smoke_tests.operators.kernels import operators_run
from smoke_tests.operators.samples import scaled_mm, scaled_mm_arguments
from smoke_tests.operators.table import operator
from smoke_tests.operators.torch_adapter import float8_overflow

LONG = 4099  # longer than any vector register and not a multiple of one, so that vector code and its tail both run
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
    decoded, truth = all_codes(name).float(), torch.from_numpy(truth)
    assert torch.equal(decoded.isnan(), truth.isnan())
    numbers = ~truth.isnan()  # nobody promises the payload of a NaN
    assert torch.equal(decoded[numbers].view(torch.int32), truth[numbers].view(torch.int32))


@every_format
@proves("each of the 256 float8 codes survives the conversion to float32 and back, NaN as NaN", since="2.1")
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
    # All sizes alike, from a quarter of the smallest code to the largest.
    lowest = math.log2(float(values[values > 0][0] / values[-1])) - 2
    magnitude = torch.exp2(torch.empty(LONG).uniform_(lowest, 0)) * values[-1]
    samples = torch.cat([magnitude, -magnitude, torch.empty(LONG).uniform_(-1, 1) * values[-1]])
    assert torch.equal(bits(samples.to(getattr(torch, name))), cast_by_ml_dtypes(samples, name))
    measured["values"] = len(samples)


@every_format
@proves(
    "a value halfway between two float8 codes is rounded to the even code, its neighbours to the nearer code",
    since="2.1",
)
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
    "beyond the largest value e4m3 saturates, also for infinity (before torch 2.12 it gives NaN), e5m2 becomes "
    "infinite, and NaN stays NaN",
    since="2.1",
)
def test_overflow_and_nan(name: str) -> None:
    dtype, largest = getattr(torch, name), float(finite_values(name)[-1])
    spacing = largest - float(finite_values(name)[-2])
    beyond = torch.tensor([largest + spacing / 2 * 1.001, 2 * largest, 1e30, math.inf]).repeat(LONG)
    expected = torch.full_like(beyond, float8_overflow(dtype))
    for sign in (1, -1):
        overflowed = (sign * beyond).to(dtype).float()
        assert torch.equal(overflowed.nan_to_num(nan=-1), (sign * expected).nan_to_num(nan=-1)), overflowed.unique()
    just_inside = torch.tensor([largest + spacing / 2 * 0.999]).repeat(LONG)
    assert (just_inside.to(dtype).float() == largest).all()
    assert torch.full((LONG,), math.nan).to(dtype).float().isnan().all()


# --- the float8 product ---


every_scaling = pytest.mark.parametrize("per_row", [False, True], ids=["tensorwise", "rowwise"])


@every_scaling
@every("scaled_mm")
@pytest.mark.parametrize("size", [1.0, 4096.0], ids=["small", "large"])
@proves(
    "_scaled_mm is the float64 product of the decoded float8 codes and their scales, rounded once, in each row, "
    "whether its scale is below or above 1",
    since="2.5",
)
def test_scaled_mm_multiplies_codes(
    per_row: bool, size: float, column: str, dtype: torch.dtype, device: str, measured: Dict[str, Any]
) -> None:
    _, _, codes_a, codes_b, scale_a, scale_b = scaled_mm_arguments(per_row, size)
    product = scaled_mm([codes_a, codes_b, scale_a, scale_b], dtype, device)
    truth = (codes_a.double() * scale_a.double()) @ (codes_b.double().t() * scale_b.double())
    assert product.dtype == dtype
    assert (float(scale_a.max()) > 1) == (size > 1)
    floor, ceiling = bounds.rounding_noise(bounds.MANTISSA[dtype])
    # float32 also rounds each of the 272 terms as it adds them: at worst as many roundings, in quadrature.
    ceiling = ceiling if dtype is torch.bfloat16 else ceiling * math.sqrt(272)
    rows = slice(None, -1 if per_row else None)
    measured["error"] = bounds.assert_rounded_like(product[rows], truth[rows], floor, ceiling)
    # Checked apart: next to the last row, which may be thousands of times larger, the others would not matter.
    bounds.assert_rounded_like(product[-1:], truth[-1:], floor / 2, ceiling * (1 + bounds.scatter(144)))


TRUNCATION = 2.0**-13  # what a tensor core of Hopper drops from a sum while adding: it keeps 13 bits after the point


@pytest.mark.parametrize("fast", [False, True], ids=["exact", "fast"])
@every("scaled_mm")
@proves(
    "_scaled_mm of 8,192 and of 16,384 terms of one sign is too small by four truncations at most, with fast "
    "accumulation by one for every 8 terms, and never too large",
    since="2.5",
)
def test_scaled_mm_of_one_sign(
    fast: bool, column: str, dtype: torch.dtype, device: str, measured: Dict[str, Any]
) -> None:
    # A CPU without FP8 products takes 75 s for the size that a GPU multiplies at once.
    rows, columns = (160, 144) if device == "cuda" else (16, 32)
    for terms in (8192, 16384):
        # Each row and column has another size, so that the spacings of the results differ.
        sizes = [torch.exp2(torch.rand(count, 1)) for count in (rows, columns)]
        a, b = ((torch.rand(len(size), terms) * 224 * size).to(torch.float8_e4m3fn) for size in sizes)
        scale = torch.tensor(2.0**-10)
        # The wrapper itself uses torch's default, without fast accumulation.
        more = {"use_fast_accum": True} if fast else {}
        given = [tensor.to(device) for tensor in (a, b, scale, scale)]
        product = operator("scaled_mm", column)(*given, dtype, **more).cpu()
        truth = (a.double() @ b.double().t()) * 2.0**-20
        measured[f"bias of {terms}"] = bias = float((product.double() / truth - 1).mean())
        # Where the sum moves to float32 every 128 terms, it is truncated four times in between. Each result is rounded,
        # and float32 adds the sums of 128 terms: four times the scatter of the mean of these errors.
        rounding = 4 * bounds.ceiling(dtype, 1, terms=terms // 128) / math.sqrt(rows + columns)
        # Fast: one instruction adds 32 terms, in parts of undocumented size; over 8,192 terms, an H200 loses 0.045 in
        # all.
        most = (terms // 8 if fast else 4) * TRUNCATION
        assert -most - rounding <= bias <= rounding, f"off by {bias:.3g} on average over {terms} terms"


@every_scaling
@every("scaled_mm")
@proves("_scaled_mm of quantized operands carries the noise of two e4m3 roundings, no less, and slope 1", since="2.5")
def test_scaled_mm_has_float8_noise(
    per_row: bool, column: str, dtype: torch.dtype, device: str, measured: Dict[str, Any]
) -> None:
    a, b, *arguments = scaled_mm_arguments(per_row)
    product = scaled_mm(arguments, dtype, device)
    noise = bounds.rounding_noise(bounds.E4M3, bounds.E4M3)
    measured["error"] = bounds.assert_rounded_like(product, a @ b.t(), *noise)
    measured["slope"] = bounds.slope(product, a @ b.t())


# --- autocast ---


@proves("autocast on the CPU computes in bfloat16: 1e30 stays finite and 1 + 2^-9 rounds to 1", since="1.10")
def test_autocast_is_bfloat16() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        large = torch.full((3, 5), 1e30) @ torch.eye(5, 7)
        near_one = torch.full((3, 5), 1 + 2.0**-9) @ torch.eye(5, 7)
    assert large.dtype == torch.bfloat16
    assert (large[:, :5].float() / 1e30 - 1).abs().max() <= 2.0**-8
    assert torch.equal(near_one[:, :5].float(), torch.ones(3, 5))


# --- kernels on a CPU ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@proves("scaled_dot_product_attention on a CPU runs the flash kernel forward and backward, not its parts", since="2.3")
def test_flash_attention_ran(dtype: torch.dtype) -> None:
    inputs = [torch.randn(2, heads, 37, 24).to(dtype) for heads in (6, 2, 2)]
    gradient = torch.randn(2, 6, 37, 24)
    ran = operators_run(lambda: bounds.forward_and_backward(operator("attention", "torch"), inputs, gradient))
    flash = "_scaled_dot_product_flash_attention_for_cpu"
    assert {flash, flash + "_backward"} <= ran, "ran " + ", ".join(sorted(ran))


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["rms_norm", "attention"])
@proves(
    "on a CPU RMSNorm gives a row, and attention a text, the same bits alone and in a batch, forward and backward",
    since="2.4",
)
def test_a_row_is_the_same_alone(name: str, dtype: torch.dtype) -> None:
    bounds.assert_batch_invariant(name, "torch", dtype, "cpu")


@proves(
    "AdamW(fused=True) on a CPU runs the fused kernel, and nothing else except counting steps",
    seed="B11",
    since="2.4",
)
def test_fused_adamw_ran() -> None:
    parameter = torch.nn.Parameter(torch.randn(5))
    parameter.grad = torch.randn(5)
    optimizer = operator("adamw", "torch")([parameter], **bounds.ADAMW)
    optimizer.step()  # creates the optimizer's state
    ran = {name for name in operators_run(optimizer.step) if not name.startswith("_record_function")}
    assert ran == {"_fused_adamw_", "_foreach_add_"}
