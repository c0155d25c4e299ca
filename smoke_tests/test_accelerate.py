"""Accelerate's accumulated gradients and its mixed precision, in one process."""

from __future__ import annotations

from typing import Any, Dict, Iterator, List

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

from smoke_tests.claims import needs, proves
from smoke_tests.operators import bounds

STEPS, ROWS, FEATURES = 4, 8, 48


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    """Leave no settings to the next Accelerator of this process: they are those of the first until they are reset."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def loss_of(model: torch.nn.Module, x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The mean squared error, [n, f] and [n, f] -> scalar."""
    return (model(x) - wanted).square().mean()


@proves(
    "gradients accumulated over four batches are those of float64 over all of them at once, and only the last of the "
    "four changes the weights"
)
def test_gradients_are_accumulated(device: str, measured: Dict[str, Any]) -> None:
    accelerator = Accelerator(gradient_accumulation_steps=STEPS, cpu=device == "cpu")
    model = torch.nn.Linear(FEATURES, FEATURES)
    start = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    data = torch.utils.data.TensorDataset(*(torch.randn(STEPS * ROWS, FEATURES) for _ in range(2)))
    loader = torch.utils.data.DataLoader(data, batch_size=ROWS)
    exact = torch.nn.Linear(FEATURES, FEATURES).double()
    exact.load_state_dict(model.state_dict())
    loss_of(exact, *(tensor.double() for tensor in data.tensors)).backward()
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    moved: List[bool] = []
    for x, wanted in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, x, wanted))
            optimizer.step()
            optimizer.zero_grad()
        moved.append(not torch.equal(model.weight.detach().cpu(), start))
    assert moved == [False] * (STEPS - 1) + [True]
    assert exact.weight.grad is not None
    step = (start - model.weight.detach().cpu()).double()
    measured["error"] = bounds.relative_error(step, exact.weight.grad)
    # In float32: sums over the rows, features and batches; the weight is rounded before the subtraction.
    most = bounds.ceiling(torch.float32, 3, terms=STEPS * ROWS + FEATURES)
    rounded = 2.0**-24 * float(start.double().norm() / exact.weight.grad.norm())
    assert measured["error"] <= most + rounded


@needs(sm=(8, 0))
@proves(
    "mixed precision computes a product in bfloat16, its weights and their gradients stay float32, and both are right "
    "to within the rounding of bfloat16"
)
def test_mixed_precision(device: str, measured: Dict[str, Any]) -> None:
    accelerator = Accelerator(mixed_precision="bf16")
    model = torch.nn.Linear(FEATURES, FEATURES, bias=False)
    exact = torch.nn.Linear(FEATURES, FEATURES, bias=False).double()
    exact.load_state_dict(model.state_dict())
    x, gradient = (torch.randn(ROWS * STEPS, FEATURES).to(torch.bfloat16) for _ in range(2))
    true = exact(x.double())
    true.backward(gradient.double())
    model = accelerator.prepare(model)
    output = model(x.to(device))
    output.backward(gradient.to(output))
    weight = model.weight
    assert output.dtype == weight.dtype == torch.float32  # it hands the product on in float32
    assert weight.grad is not None and exact.weight.grad is not None and weight.grad.dtype == torch.float32
    assert torch.equal(output, output.to(torch.bfloat16).float()), "the product has bits that bfloat16 cannot hold"
    least, most = bounds.rounding_noise(bounds.MANTISSA[torch.bfloat16])
    # Rounded to bfloat16: the weight and the product; for the gradient, which needs no weight, only the result.
    pairs = {"output": (output, true.detach(), 2), "gradient": (weight.grad, exact.weight.grad, 1)}
    for name, (computed, truth, roundings) in pairs.items():
        error = bounds.relative_error(computed.detach().cpu(), truth)
        measured[name] = error
        slack = bounds.scatter(truth.numel())
        assert least * (1 - slack) <= error <= most * roundings**0.5 * (1 + slack), f"{name} is off by {error:.3g}"
