"""torchao's float8 training layer, its products emulated where no FP8 GPU is."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Tuple

import pytest
import torch
import torchao.float8  # noqa: F401  (a torchao that cannot be imported refutes these claims)

import bounds
from bounds import E4M3, E5M2
from claims import proves
from fused_ops import operator

# What each recipe rounds the two factors of a product to; None: the product stays in high precision.
RECIPES: Dict[str, Dict[str, Optional[Tuple[int, int]]]] = {
    "tensorwise": {"output": (E4M3, E4M3), "input": (E5M2, E4M3), "weight": (E5M2, E4M3)},
    "rowwise": {"output": (E4M3, E4M3), "input": (E4M3, E4M3), "weight": (E4M3, E4M3)},
    "rowwise_with_gw_hp": {"output": (E4M3, E4M3), "input": (E4M3, E4M3), "weight": None},
}
every_recipe = pytest.mark.parametrize("recipe", list(RECIPES))
FEATURES, OUTPUTS = 131, 83


def layers(recipe: str) -> Tuple[torch.nn.Module, torch.nn.Module]:
    """A float8 linear layer [OUTPUTS, FEATURES] with bias, and the same layer in float64."""
    plain = torch.nn.Sequential(torch.nn.Linear(FEATURES, OUTPUTS))
    plain[0].weight.data.normal_()
    plain[0].bias.data.normal_()
    truth = torch.nn.Linear(FEATURES, OUTPUTS, dtype=torch.float64)
    truth.load_state_dict(plain[0].state_dict())
    return operator("linear", "torchao." + recipe)(plain, lambda name: False)[0], truth


def run(layer: torch.nn.Module, x: torch.Tensor, gradient: torch.Tensor) -> Dict[str, torch.Tensor]:
    """Output (without the bias, which no recipe rounds) and gradients of a layer, by name."""
    layer.zero_grad()
    leaf = x.clone().requires_grad_()
    output = layer(leaf)
    output.backward(gradient)
    assert leaf.grad is not None
    product = output.detach() - layer.bias.detach()
    return {"output": product, "input": leaf.grad, "weight": layer.weight.grad, "bias": layer.bias.grad}


def assert_noise_of(
    recipe: str, layer: torch.nn.Module, truth: torch.nn.Module, x: torch.Tensor, measured: Dict[str, Any]
) -> None:
    """Assert that each result of layer(x) carries exactly the float8 noise that the recipe gives it."""
    gradient = torch.randn(*x.shape[:-1], OUTPUTS)
    found, true = run(layer, x, gradient), run(truth, x.double(), gradient.double())
    for name, formats in RECIPES[recipe].items():
        # float32 sums of up to 131 terms stay under 2^-20; a product that stays in high precision must, too.
        floor, ceiling = bounds.rounding_noise(*formats) if formats else (0.0, 2.0**-20)
        measured[name] = bounds.assert_rounded_like(found[name], true[name], floor, ceiling)
    measured["bias"] = bounds.assert_rounded_like(found["bias"], true["bias"], 0.0, 2.0**-20)


@every_recipe
@proves("a float8 Linear's output and its input, weight and bias gradients carry the noise of the recipe, no less")
def test_linear(recipe: str, measured: Dict[str, Any]) -> None:
    layer, truth = layers(recipe)
    assert type(layer).__name__ == "Float8Linear"
    assert_noise_of(recipe, layer, truth, torch.randn(3, 37, FEATURES), measured)


@every_recipe
@proves("a float8 Linear's scales follow its input: 16 times larger, then 16 times smaller, the noise is the same")
def test_scales_follow_the_input(recipe: str, measured: Dict[str, Any]) -> None:
    layer, truth = layers(recipe)
    x = torch.randn(3, 37, FEATURES)
    for size in (1, 16, 1 / 16):
        assert_noise_of(recipe, layer, truth, x * size, measured)


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])
@proves("rowwise scales keep rows apart: beside a row 2^20 times larger the small rows are as exact as ever")
def test_rows_have_their_own_scale(recipe: str, measured: Dict[str, Any]) -> None:
    layer, truth = layers(recipe)
    x = torch.randn(37, FEATURES)
    x[0] *= 2**20
    with torch.no_grad():
        found, true = (each(rows) - each.bias for each, rows in ((layer, x), (truth, x.double())))
    measured["error"] = bounds.assert_rounded_like(found[1:], true[1:], *bounds.rounding_noise(E4M3, E4M3))


def formats_cast_to(layer: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> List[torch.dtype]:
    """The float8 formats that a forward and backward of the layer cast to, in order."""
    from torchao.float8 import float8_training_tensor as module

    formats: List[torch.dtype] = []
    cast = module.to_fp8_saturated

    def note(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        formats.append(dtype)
        codes: torch.Tensor = cast(values, dtype)
        return codes

    monkeypatch.setattr(module, "to_fp8_saturated", note)
    run(layer, torch.randn(5, FEATURES), torch.randn(5, OUTPUTS))
    return formats


@every_recipe
@proves("a float8 Linear casts inputs and weights to e4m3, and gradients to e5m2 exactly where the recipe says so")
def test_formats(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, _ = layers(recipe)
    formats = formats_cast_to(layer, monkeypatch)
    backward = [torch.float8_e5m2 if recipe == "tensorwise" else torch.float8_e4m3fn, torch.float8_e4m3fn]
    products = 1 if RECIPES[recipe]["weight"] is None else 2
    assert formats == [torch.float8_e4m3fn] * 2 + backward * products
