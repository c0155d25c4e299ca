"""How large the error of a number format may be: above the ceiling it is wrong, below the floor another format."""

from __future__ import annotations

import functools
import math
from typing import Any, Callable, Dict, List, Sequence, Tuple

import torch

from smoke_tests.operators import references
from smoke_tests.operators.table import operator

# Bits of the mantissa without the implied one: the spacing of values in [1, 2) is 2^-bits.
E4M3, E5M2 = 3, 2
MANTISSA = {torch.bfloat16: 7, torch.float16: 10, torch.float32: 23}
# How far the slope of a product may be from what rounding leaves of 1: two fifths of the effect of a scale 2 % off. In
# 6,000 simulations, the slope of an e5m2 product of 112 x 144 x 80 normal numbers was up to 0.0065 away, mostly due to
# where its scale puts the cells.
SLOPE = 0.008


def forward_and_backward(
    operator: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor], gradient: torch.Tensor, device: str = "cpu"
) -> List[torch.Tensor]:
    """The output of an operator run on a device, and the gradient of each input for this gradient of the output."""
    leaves = [torch.nn.Parameter(tensor.detach().to(device, copy=True)) for tensor in inputs]
    output = operator(*leaves)
    given = gradient.to(output, copy=True)
    output.backward(given)
    assert torch.equal(given, gradient.to(output)), "the gradient of the output is overwritten"  # others read it, too
    return [output.detach().cpu()] + [leaf.grad.cpu() for leaf in leaves if leaf.grad is not None]


def in_float64(
    operator: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor], gradient: torch.Tensor
) -> List[torch.Tensor]:
    """`forward_and_backward` on the same numbers in float64."""
    return forward_and_backward(operator, [tensor.double() for tensor in inputs], gradient.double())


def assert_repeats_only_if_asked(gradients: Callable[[bool], List[torch.Tensor]], measured: Dict[str, Any]) -> None:
    """Assert that 30 runs of gradients(deterministic) have the same bits if that is true, and different bits if not."""
    for deterministic in (True, False):
        first, *others = (gradients(deterministic) for _ in range(30))
        same = sum(all(torch.equal(*pair) for pair in zip(first, run)) for run in others)
        measured["same when deterministic" if deterministic else "same otherwise"] = same
    assert measured["same when deterministic"] == 29
    assert measured["same otherwise"] < 29, "nothing is added in a random order: this measures nothing"


def relative_error(computed: torch.Tensor, truth: torch.Tensor) -> float:
    """Root mean square of the error over that of the truth (any equal shapes, truth in float64)."""
    return float((computed.double() - truth).norm() / truth.norm())


def slope(computed: torch.Tensor, truth: torch.Tensor) -> float:
    """Least-squares factor c in computed = c * truth: 1 after plain rounding, 1.02 if a scale is 2 % off."""
    return float((computed.double() * truth).sum() / truth.pow(2).sum())


def rounding_noise(*mantissas: int) -> Tuple[float, float]:
    """Least and greatest relative error (root mean square) after independent roundings to these mantissa lengths.

    Rounding x = m 2^e, 1 <= m < 2, to spacing s = 2^(e - bits) errs by s / sqrt(12) in root mean square, which is
    2^-bits / sqrt(12) / m of x: between half of 2^-bits / sqrt(12) and all of it, whatever the distribution of x.
    A product of two rounded factors adds their noises in quadrature. An error below the floor means that nothing was
    rounded to the format.
    """
    greatest = math.sqrt(sum(4.0**-bits for bits in mantissas) / 12)
    return greatest / 2, greatest


def assert_rounded_like(computed: torch.Tensor, truth: torch.Tensor, floor: float, ceiling: float) -> float:
    """Assert that the relative error lies between the bounds and that the slope is 1; returns the error.

    The slope finds what hides inside the noise of eight bits, such as a scale that is 2 % off.
    """
    assert computed.shape == truth.shape, f"shape {tuple(computed.shape)} instead of {tuple(truth.shape)}"
    error = relative_error(computed, truth)
    assert error <= ceiling, f"relative error {error:.3g} is above {ceiling:.3g}"
    assert error >= floor, f"relative error {error:.3g} is below {floor:.3g}: not in this format"
    assert_slope_1(computed, truth)
    return error


def assert_slope_1(computed: torch.Tensor, truth: torch.Tensor) -> None:
    """Assert that the slope is 1 minus the square of the error, which rounding to nearest takes away.

    A rounded number stands for its cell: the differences of the cell's numbers show in their squares only.
    """
    factor, error = slope(computed, truth), relative_error(computed, truth)
    assert abs(factor + error**2 - 1) <= SLOPE, f"slope {factor:.5f} with noise {error:.3g}"


def assert_as_in_float64(
    computed: List[torch.Tensor],
    truth: List[torch.Tensor],
    dtype: torch.dtype,
    roundings: int,
    measured: Dict[str, Any],
    also: float = 0.0,
    terms: int = 64,
) -> None:
    """Assert that output and gradients carry one to `roundings` roundings to dtype, and record the largest error.

    also: a further relative error that the operator may make. terms: as `ceiling` takes it.
    """
    floor, _ = rounding_noise(MANTISSA[dtype])
    assert len(computed) == len(truth)
    assert all(tensor.dtype == dtype for tensor in computed)
    errors = []
    for result, true in zip(computed, truth):
        least = floor * max(0.0, 1 - scatter(true.numel()))
        errors.append(assert_rounded_like(result, true, least, also + ceiling(dtype, roundings, true.numel(), terms)))
    measured["error"] = max(errors)


def scatter(count: float) -> float:
    """How far, as a share of itself, a root mean square of so many rounding errors may be from what it is of many.

    Errors of one rounding of numbers of one size are uniform: their squares scatter by 2 / sqrt(5) of their mean, and
    the root of their mean by half of that over sqrt(count), of which this is four times as much. Normal numbers, whose
    spacings differ, scatter about twice as far.
    """
    return 1.8 / math.sqrt(max(1.0, count))


def ceiling(dtype: torch.dtype, roundings: int, count: float = math.inf, terms: int = 64) -> float:
    """The greatest relative error of so many numbers after so many independent roundings to dtype.

    float32 also accumulates in float32: there the terms of a sum each count as one more. Of few numbers it is greater
    by `scatter`.
    """
    most = rounding_noise(MANTISSA[dtype])[1] * math.sqrt(terms * roundings if dtype is torch.float32 else roundings)
    return most * (1 + scatter(count))


def assert_rope_as_in_float64(
    make: Callable[..., Any], base: float, dtype: torch.dtype, device: str, measured: Dict[str, Any]
) -> None:
    """Assert that one rotary embedding is right for a short call, then a long one, then one that starts later.

    It says in which format it computes angles: an angle of p radians is off by p roundings of a number near 1.
    """
    rotate = make(24, base)
    first = torch.randn(2, 3, 1, 24, device=device).to(dtype)
    assert torch.equal(rotate(first, 0), first), "position 0 is turned"  # and a table with one position has to grow
    for start, length in ((0, 7), (0, 1025), (113, 9)):
        inputs, gradient = [torch.randn(2, 3, length, 24).to(dtype)], torch.randn(2, 3, length, 24).to(dtype)
        computed = forward_and_backward(functools.partial(rotate, start=start), inputs, gradient, device)
        truth = in_float64(functools.partial(references.rope, start=start, base=base), inputs, gradient)
        off = (start + length) * torch.finfo(make.angles).eps / 2  # type: ignore[attr-defined]
        errors = []
        for result, true in zip(computed, truth):
            assert result.dtype == dtype
            # Rounded on the way: the cosine, both products, the result; nothing where the angle is tiny.
            most = off + ceiling(dtype, 4, true.numel())
            errors.append(assert_rounded_like(result, true, 0.0, most))
        measured["error"] = max(errors)


ADAMW: Dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def assert_batch_invariant(name: str, column: str, dtype: torch.dtype, device: str) -> None:
    """Assert that a row (of attention: a text) has the same bits alone and in a batch, and so has its gradient."""
    call = operator(name, column)
    shapes = [(5, heads, 137, 64) for heads in (6, 2, 2)] if name == "attention" else [(37, 1031)]
    batch = [torch.randn(*shape).to(dtype) for shape in shapes]
    others = [] if name == "attention" else [torch.randn(1031).to(dtype).to(device), 1e-5]
    gradient = torch.randn(shapes[0]).to(dtype)
    bound = lambda *inputs: call(*inputs, *others)  # noqa: E731
    together = forward_and_backward(bound, batch, gradient, device)
    for i in range(len(gradient)):
        alone = forward_and_backward(bound, [tensor[i : i + 1] for tensor in batch], gradient[i : i + 1], device)
        assert all(torch.equal(whole[i : i + 1], part) for whole, part in zip(together, alone)), f"row {i} differs"


# Elements of the tensors that an AdamW is given: one is longer than any vector register and no multiple of one, so that
# vector code and its tail both run; one is longer than the 65,536 that a fused kernel gives a block at most; and there
# are more than the 36 that it takes in a launch.
SIZES = (4099, 1, 70_001, *range(2, 42))


def assert_adamw_as_in_float64(make: Callable[..., torch.optim.Optimizer], device: str) -> float:
    """Assert that an AdamW in float32 follows the float64 one over eight steps; the largest error of an update.

    Each step rounds the parameter twice, as it decays and as it is updated, by up to 2^-24 of it, and multiplies it by
    a factor near 1 that is off by half of that; and it rounds the update (some ten operations, each 2^-24 of at most
    four lr). So after eight steps no element may be farther off than 8 * 2^-24 * (2.5 |parameter| + 40 lr).
    """
    starts = [torch.randn(size) for size in SIZES]
    # Gradients of all magnitudes, down to those at which eps matters.
    gradients = [[torch.randn(size) * 10 ** torch.empty(size).uniform_(-10, 0) for size in SIZES] for _ in range(8)]
    parameters = [torch.nn.Parameter(start.to(device, copy=True)) for start in starts]
    optimizer = make(parameters, **ADAMW)
    for step in gradients:
        for parameter, gradient in zip(parameters, step):
            parameter.grad = gradient.to(device, copy=True)
        optimizer.step()
    errors = []
    for start, parameter, *steps in zip(starts, parameters, *gradients):
        updated = parameter.detach().cpu()
        truth = references.adamw(start.double(), [gradient.double() for gradient in steps], **ADAMW)
        allowed = 8 * 2.0**-24 * (2.5 * torch.maximum(start.abs(), truth.abs()) + 40 * ADAMW["lr"])
        excess = float(((updated - truth).abs() / allowed).max())
        assert excess <= 1, f"of {len(start)} elements one is {excess:.3g} times as far off as rounding explains"
        errors.append(relative_error(updated - start.double(), truth - start))
    return max(errors)


def assert_adamw_decays(make: Callable[..., torch.optim.Optimizer], device: str) -> None:
    """Assert that zero gradients leave p * (1 - lr * weight_decay), up to rounding the factor and the product."""
    starts = [torch.randn(size) for size in SIZES]
    parameters = [torch.nn.Parameter(start.to(device, copy=True)) for start in starts]
    optimizer = make(parameters, **ADAMW)
    for _ in range(2):  # the second step would show a decay that entered the moments
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    for start, parameter in zip(starts, parameters):
        truth = start.double() * (1 - ADAMW["lr"] * ADAMW["weight_decay"]) ** 2
        least = torch.finfo(start.dtype).tiny  # a start of exactly 0 stays 0
        excess = float(((parameter.detach().cpu() - truth).abs() / truth.abs().clamp(min=least)).max())
        assert excess <= 4 * 2.0**-24, f"of {len(start)} elements one is off by {excess:.3g} of itself"
