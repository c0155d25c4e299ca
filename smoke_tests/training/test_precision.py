"""Layers in a cut mantissa."""

from __future__ import annotations

import math

import pytest
import torch

from smoke_tests.claims import proves
from smoke_tests.operators import bounds
from smoke_tests.training.columns import columns_of
from smoke_tests.training.llama import Llama
from smoke_tests.training.models import MODELS
from smoke_tests.training.precision import factors, layers_of, mantissas, round_mantissa, rounded
from smoke_tests.training.precision import plain as unrounded
from smoke_tests.training.small_runs import small
from smoke_tests.training.trainer import Run

pytestmark = pytest.mark.usefixtures("one_thread")


@proves(
    "cut mantissas are the nearest values with that many bits, ties to even, for every bfloat16",
    package="torch",
    since="2.1",
)
def test_cut_mantissa() -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    finite = every[torch.isfinite(every)]
    for bits in (3, 4, 5, 6):
        cut = round_mantissa(finite, bits).double()
        exact = finite.double()
        exponent = torch.frexp(exact)[1].clamp(min=-125) - 1  # |x| = m 2^exponent, 1 <= m < 2, or a subnormal
        step = torch.tensor([math.ldexp(1.0, power - bits) for power in exponent.tolist()], dtype=torch.float64)
        truth = (exact / step).round() * step  # round() takes ties to even
        truth = torch.where(truth.abs() >= 2.0**128, math.inf * exact.sign(), truth)
        assert torch.equal(cut, truth), bits
    ends = torch.tensor([math.inf, -math.inf, math.nan], dtype=torch.bfloat16)
    assert torch.equal(round_mantissa(ends, 3)[:2], ends[:2])
    assert bool(round_mantissa(ends, 3)[2].isnan())
    run = Run(small("e8m3"))
    assert run.update(0)["loss"] != Run(small("bf16")).update(0)["loss"]


@proves(
    "a layer in a cut mantissa multiplies what its factors are rounded to, input and weight forward, the gradient "
    "backward, and without one it is the layer in float64",
    package="torch",
    since="2.1",
)
def test_rounded_layers() -> None:
    assert [mantissas(name) for name in ("torchao.rowwise", "transformer-engine.blockwise")] == [(3, 3)] * 2
    assert mantissas("transformer-engine.delayed") == mantissas("torchao.tensorwise") == (3, 2)
    for bias in (False, True):
        layer = torch.nn.Linear(48, 40, bias=bias)
        x, gradient = torch.randn(2, 5, 48, requires_grad=True), torch.randn(2, 5, 40)
        for compute, bits, scale in (
            (rounded(3, 2), (3, 2), 1.0),
            (rounded(3, 2, scale=1.3), (3, 2), 1.3),
            (rounded(5, 4), (5, 4), 1.0),
            (unrounded, (23, 23), 1.0),
        ):
            cut = [each.detach() for each in (x, layer.weight, gradient)]
            if compute is not unrounded:
                scales = (scale, scale, scale**-2)
                cut = [round_mantissa(each * by, n) / by for each, n, by in zip(cut, (bits[0], *bits), scales)]
            at, weight, behind = (each.double() for each in cut)
            shift = layer.bias.detach().double() if bias else 0.0
            true = [at @ weight.t() + shift, behind @ weight, behind.flatten(0, 1).t() @ at.flatten(0, 1)]
            for tensor in (x, layer.weight):
                tensor.grad = None
            output = compute(layer, x)
            output.backward(gradient)
            for result, exact in zip((output.detach(), x.grad, layer.weight.grad), true):
                assert bounds.relative_error(result, exact) <= 48 * 2.0**-24
            with torch.autocast("cpu", torch.bfloat16):
                assert compute(layer, x).dtype is torch.bfloat16
    for size, has_bias in ((1, True), (0, False)):  # Transformer Engine's bias is empty if there is none
        layer.bias = torch.nn.Parameter(torch.zeros(size))
        assert (factors(layer, x)[2] is not None) == has_bias
    layers = layers_of(Llama(MODELS["tiny"], columns_of("naive", False, 16, half=False), torch.float32))
    assert [layer.out_features for layer in layers] == [160, 96, 416, 96] * 2
