"""QuACK's softmax, which no other operator of the table is, and its norm and cross entropy where rows are long."""

from __future__ import annotations

from typing import Any, Dict, List

import pytest
import quack
import torch

from smoke_tests.claims import needs, proves
from smoke_tests.operators import bounds, references
from smoke_tests.operators.kernels import gpu_kernels_run
from smoke_tests.operators.samples import EPS, IGNORED, assert_refused, sample
from smoke_tests.operators.table import operator

half = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


def softmax(x: torch.Tensor) -> torch.Tensor:
    """exp(x) / sum(exp(x)) over the last dimension; [n, f] -> the same shape."""
    return torch.exp(x - torch.logsumexp(x, dim=-1, keepdim=True))


# Longer rows have a wider spread of logits, so that the largest probabilities stay normal numbers in float16.
@needs(cuda=True)
@half
@pytest.mark.parametrize(("features", "spread"), [(88, 1), (1000, 2), (32008, 4)])
@proves("its softmax equals float64 forward and backward, of rows in one block and in a cluster of two")
def test_softmax(features: int, spread: int, dtype: torch.dtype, device: str, measured: Dict[str, Any]) -> None:
    inputs, gradient = [(torch.randn(37, features) * spread).to(dtype)], torch.randn(37, features).to(dtype)
    computed = bounds.forward_and_backward(quack.softmax, inputs, gradient, device)
    # Rounded: each probability, which the gradient is computed from, its product with the gradient, and the result.
    truth = bounds.in_float64(softmax, inputs, gradient)
    bounds.assert_as_in_float64(computed, truth, dtype, 3, measured, terms=features)


@needs(cuda=True)
@proves("each row of its softmax sums to 1 and has the same bits alone")
def test_softmax_of_a_row(device: str, measured: Dict[str, Any]) -> None:
    x = torch.randn(37, 1000, device=device).to(torch.bfloat16)
    together = quack.softmax(x)
    measured["off"] = float((together.double().sum(dim=-1) - 1).abs().max())
    assert measured["off"] <= 2.0**-8  # each probability is off by up to 2^-9 of itself
    assert all(torch.equal(together[i : i + 1], quack.softmax(x[i : i + 1])) for i in range(len(x)))


def ran(call: Any) -> List[str]:
    """The GPU kernels of QuACK's that a call ran."""
    return sorted(name for name in gpu_kernels_run(call) if "quack" in name)


@needs(cuda=True)
@proves("its softmax runs one kernel of its own forward and one backward")
def test_own_softmax_ran(device: str, measured: Dict[str, Any]) -> None:
    x = torch.nn.Parameter(torch.randn(37, 1000, device=device).to(torch.bfloat16))
    gradient = torch.randn(37, 1000, device=device).to(torch.bfloat16)
    quack.softmax(x).backward(gradient)  # compile now
    outputs: List[torch.Tensor] = []
    (forward,) = ran(lambda: outputs.append(quack.softmax(x)))
    (backward,) = ran(lambda: outputs[0].backward(gradient))
    measured["forward"], measured["backward"] = forward, backward
    assert "quacksoftmaxSoftmax_object" in forward and "quacksoftmaxSoftmaxBackward_object" in backward


@needs(cuda=True)
@half
@proves("its softmax refuses rows in 16 bits whose length is no multiple of 8, rather than compute them")
def test_other_lengths_are_refused(dtype: torch.dtype, device: str, measured: Dict[str, Any]) -> None:
    assert_refused(quack.softmax, [torch.randn(5, 83).to(dtype)], torch.randn(5, 83), device, measured)


@needs(cuda=True)
@half
@pytest.mark.parametrize("features", [4104, 16392])
@proves("its RMSNorm of long rows, in one block and in a cluster, equals float64 forward and backward")
def test_norm_of_long_rows(features: int, dtype: torch.dtype, device: str, measured: Dict[str, Any]) -> None:
    given = sample("rms_norm", dtype, count=133, features=features)
    computed = bounds.forward_and_backward(
        given.bind(operator("rms_norm", "quack-kernels"), device), given.inputs, given.gradient, device
    )
    truth = bounds.in_float64(given.bind(references.rms_norm), given.inputs, given.gradient)
    bounds.assert_as_in_float64(computed, truth, dtype, given.roundings, measured, terms=features)


@needs(cuda=True)
@proves("QuACK's RMSNorm gives a row the same bits alone and in a batch, forward and backward")
def test_a_row_of_the_norm_is_the_same_alone(device: str) -> None:
    batch, gradient = (torch.randn(37, 1000).to(torch.bfloat16) for _ in range(2))
    weight = torch.randn(1000).to(torch.bfloat16).to(device)
    norm = lambda x: operator("rms_norm", "quack-kernels")(x, weight, EPS)  # noqa: E731
    together = bounds.forward_and_backward(norm, [batch], gradient, device)
    for i in range(len(batch)):
        alone = bounds.forward_and_backward(norm, [batch[i : i + 1]], gradient[i : i + 1], device)
        assert all(torch.equal(whole[i : i + 1], part) for whole, part in zip(together, alone)), f"row {i} differs"


@needs(cuda=True)
@half
@proves("asked to, its cross entropy writes the gradient over the logits, with the bits that it has elsewhere")
def test_cross_entropy_in_place(dtype: torch.dtype, device: str) -> None:
    given = sample("cross_entropy", dtype, width=1000)
    (values,), labels = given.inputs, given.others[0].to(device)
    made = []
    for in_place in (False, True):
        leaf = torch.nn.Parameter(values.to(device))
        logits = leaf * 1
        quack.cross_entropy(logits, labels, ignore_index=IGNORED, inplace_backward=in_place).backward()
        assert leaf.grad is not None
        made.append((logits.detach(), leaf.grad))
    (kept, gradient), (overwritten, same) = made
    assert torch.equal(gradient, same)
    assert torch.equal(kept.cpu(), values)
    assert torch.equal(overwritten, gradient)
