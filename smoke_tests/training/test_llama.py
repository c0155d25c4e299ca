"""The model: its sizes, its formulas in float64, and its rotary base."""

from __future__ import annotations

from typing import Any, Dict

import pytest
import torch

from smoke_tests.claims import proves
from smoke_tests.operators import bounds, references
from smoke_tests.operators.torch_adapter import version_of_torch
from smoke_tests.training.columns import columns_of
from smoke_tests.training.llama import Llama
from smoke_tests.training.models import MODELS, Model, parameters_of
from smoke_tests.training.small_runs import PARTS

pytestmark = pytest.mark.usefixtures("one_thread")


@proves("each model that can be trained has the number of parameters that its source gives it", package="torch")
def test_models(measured: Dict[str, Any]) -> None:
    columns = columns_of("naive", False, 16, half=False)
    for name, model in MODELS.items():
        assert parameters_of(model.shape) == model.parameters, name
        with torch.device("meta"):
            made = Llama(model, columns, torch.float32)
        assert sum(parameter.numel() for parameter in made.parameters()) == model.parameters, name
    tied = Llama(MODELS["tiny"]._replace(tied=True), columns, torch.float32)
    assert sum(parameter.numel() for parameter in tied.parameters()) == parameters_of(MODELS["tiny"].shape, tied=True)
    published = {"hare-1.1b": 1_123_117_056, "z2all-1.26b": 1_255_499_776, "llama-3-8b": 8_030_261_248}
    assert all(MODELS[name].parameters == count for name, count in published.items())
    measured["models"] = len(MODELS)


def formulas(weights: Dict[str, torch.Tensor], model: Model, tokens: torch.Tensor, targets: torch.Tensor) -> Any:
    """The logits and the loss of a Llama, from the formulas of its operators and a Llama's weights by name."""
    shape = model.shape
    heads = [shape.heads, shape.kv_heads, shape.kv_heads]

    def through(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ weights[f"{name}.weight"].t()

    def normal(x: torch.Tensor, name: str) -> torch.Tensor:
        return references.rms_norm(x, weights[f"{name}.weight"], model.eps)

    x = weights["embedding.weight"][tokens]
    for block in (f"blocks.{index}" for index in range(shape.layers)):
        qkv = through(normal(x, f"{block}.attention_norm"), f"{block}.attention.qkv")
        split = qkv.unflatten(-1, (-1, shape.head_size)).transpose(1, 2).split(heads, dim=1)
        query, key = (references.rope(each, 0, model.base) for each in split[:2])
        attended = references.attention(query, key, split[2]).transpose(1, 2).flatten(2)
        x = x + through(attended, f"{block}.attention.output")
        gate, up = through(normal(x, f"{block}.feed_forward_norm"), f"{block}.feed_forward.gate_up").chunk(2, dim=-1)
        x = x + through(references.swiglu(gate, up), f"{block}.feed_forward.down")
    logits = through(normal(x, "norm"), "head")
    return logits, references.cross_entropy(logits.flatten(0, 1), targets.flatten(), -100)


@pytest.mark.parametrize("operators", ["naive", "torch"])
@proves(
    "the models compute the logits, the loss and every gradient of their formulas in float64, whatever the base of "
    "their rotary positions and the eps of their norms",
    package="torch",
    since="2.1",
)
def test_models_in_float64(operators: str, measured: Dict[str, Any]) -> None:
    model, columns = MODELS["tiny"]._replace(base=500.0, eps=0.25), dict.fromkeys(PARTS, operators)
    if version_of_torch() < (2, 4):
        columns["rms_norm"] = "naive"  # it has none of its own
    llama = Llama(model, columns, torch.float32)
    with torch.no_grad():  # large enough that attention is uneven, gates close and norms scale
        for parameter in llama.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.5 if parameter.dim() == 1 else 0.15)
    exact = {name: weight.detach().double().requires_grad_() for name, weight in llama.named_parameters()}
    tokens, targets = torch.randint(256, (2, 3, 40)).unbind()
    targets[0, :5] = -100
    logits, loss = llama(tokens), llama(tokens, targets)
    loss.backward()
    assert set(llama.state_dict()) == set(exact), "it keeps more than its weights"

    def recompute(block: Any, x: Any) -> torch.Tensor:
        assert isinstance(block, torch.nn.Module) and isinstance(x, torch.Tensor)
        output: torch.Tensor = block(x)
        return output

    llama.recompute = recompute
    assert torch.equal(llama(tokens), logits)
    true_logits, true_loss = formulas(exact, model, tokens, targets)
    true_loss.backward()
    errors = [
        bounds.relative_error(logits.detach(), true_logits.detach()),
        abs(float(loss.detach() / true_loss.detach()) - 1),
    ]
    errors += [bounds.relative_error(each.grad, exact[name].grad) for name, each in llama.named_parameters()]
    measured["error"] = max(errors)
    assert measured["error"] <= 200 * 2.0**-24, f"errors {errors}"  # from about 200 roundings in a row


@pytest.mark.parametrize("base", [10000.0, 5e5], ids=["1e4", "5e5"])
@proves("the model turns its heads by the closed form of its own rotary base", seed="B07", package="torch")
def test_decoder_turns_by_its_base(base: float, measured: Dict[str, Any]) -> None:
    model = MODELS["tiny"]._replace(base=base)
    rotary = Llama(model, dict.fromkeys(PARTS, "naive"), torch.float32).blocks[0].attention.rotary
    x = torch.randn(2, 3, 41, model.shape.head_size)
    turned, truth = rotary(x, 13), references.rope(x.double(), 13, base)
    # Rounded on the way: the cosine, both products, the result.
    floor, _ = bounds.rounding_noise(bounds.MANTISSA[torch.float32])
    measured["error"] = bounds.assert_rounded_like(turned, truth, floor, bounds.ceiling(torch.float32, 4))
    rotary.rope = lambda *given: given  # an implementation with its own table
    assert [type(each) for each in rotary(x, 13)] == [torch.Tensor, int]
