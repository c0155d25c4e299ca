"""torchao's float8 training layer; on a CPU its products are emulated."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Tuple

import pytest
import torch
import torchao.float8  # noqa: F401  (a torchao that cannot be imported refutes these claims)

from smoke_tests.claims import every, long, needs, proves
from smoke_tests.operators import bounds
from smoke_tests.operators.bounds import E4M3, E5M2
from smoke_tests.operators.kernels import assert_float8_products
from smoke_tests.operators.table import operator

# The formats to which each recipe rounds the factors of a product; None: the product stays in high precision.
RECIPES: Dict[str, Dict[str, Optional[Tuple[int, int]]]] = {
    "tensorwise": {"output": (E4M3, E4M3), "input": (E5M2, E4M3), "weight": (E5M2, E4M3)},
    "rowwise": {"output": (E4M3, E4M3), "input": (E4M3, E4M3), "weight": (E4M3, E4M3)},
    "rowwise_with_gw_hp": {"output": (E4M3, E4M3), "input": (E4M3, E4M3), "weight": None},
}
FEATURES, OUTPUTS, ROWS = 144, 80, 112  # a GPU's product needs multiples of 16
every_recipe = every("linear", only="torchao")


def recipe_of(column: str) -> str:
    """The recipe of a column: "torchao.rowwise" -> "rowwise"."""
    return column.partition(".")[2]


def layers(
    column: str, dtype: torch.dtype, device: str, outputs: int = OUTPUTS
) -> Tuple[torch.nn.Module, torch.nn.Module]:
    """A float8 linear layer [outputs, FEATURES] with bias on a device, and the same layer in float64."""
    plain = torch.nn.Sequential(torch.nn.Linear(FEATURES, outputs, dtype=dtype))
    plain[0].weight.data.normal_()
    plain[0].bias.data.normal_()
    truth = torch.nn.Linear(FEATURES, outputs, dtype=torch.float64)
    truth.load_state_dict(plain[0].state_dict())
    layer = operator("linear", column)(plain.to(device), lambda name: False)[0]
    assert type(layer).__name__ == "Float8Linear"
    return layer, truth


def run(layer: torch.nn.Module, x: torch.Tensor, gradient: torch.Tensor) -> Dict[str, torch.Tensor]:
    """Output (without the bias, which no recipe rounds) and gradients of a layer, by name."""
    layer.zero_grad()
    leaf = x.to(layer.weight, copy=True).requires_grad_()
    output = layer(leaf)
    output.backward(gradient.to(output))
    assert leaf.grad is not None
    product = output.detach() - layer.bias.detach()
    results = {"output": product, "input": leaf.grad, "weight": layer.weight.grad, "bias": layer.bias.grad}
    return {name: tensor.cpu() for name, tensor in results.items()}


def assert_noise_of(
    column: str, layer: torch.nn.Module, truth: torch.nn.Module, x: torch.Tensor, measured: Dict[str, Any]
) -> None:
    """Assert that each result of layer(x) carries exactly the float8 noise that the recipe gives it."""
    gradient = torch.randn(*x.shape[:-1], layer.out_features).to(x)
    computed, true = run(layer, x, gradient), run(truth, x, gradient)
    # float32 sums of up to 144 terms stay under 2^-20; what stays in high precision must, too.
    plain = 2.0**-20 if x.dtype is torch.float32 else bounds.ceiling(x.dtype, 3)
    for name, formats in RECIPES[recipe_of(column)].items():
        floor, ceiling = bounds.rounding_noise(*formats) if formats else (0.0, plain)
        measured[name] = bounds.assert_rounded_like(computed[name], true[name], floor, ceiling)
    measured["bias"] = bounds.assert_rounded_like(computed["bias"], true["bias"], 0.0, plain)


@every_recipe
@proves("a float8 Linear's output and its input, weight and bias gradients carry the noise of the recipe, no less")
def test_linear(column: str, dtype: torch.dtype, device: str, measured: Dict[str, Any]) -> None:
    for outputs in (FEATURES, OUTPUTS):  # square as well: there a transposed gradient has the right shape
        layer, truth = layers(column, dtype, device, outputs)
        assert_noise_of(column, layer, truth, torch.randn(7, ROWS // 7, FEATURES).to(dtype), measured)


@every_recipe
@proves(
    "a float8 Linear's scales follow its input: with values 1,024 times larger and 1,024 times smaller the noise is "
    "the same"
)
def test_scales_follow_the_input(column: str, dtype: torch.dtype, device: str, measured: Dict[str, Any]) -> None:
    layer, truth = layers(column, dtype, device)
    for module in (layer, truth):  # a bias would drown small products in the rounding of the sum
        torch.nn.init.zeros_(module.bias)
    x = torch.randn(7, ROWS // 7, FEATURES).to(dtype)
    for size in (1, 1024, 1 / 1024):  # largest values far above and far below 448, the largest code
        assert_noise_of(column, layer, truth, x * size, measured)


@every_recipe
@proves("rowwise scales keep rows apart: beside a row 2^20 times larger the small rows are as exact as without it")
def test_rows_have_their_own_scale(column: str, dtype: torch.dtype, device: str, measured: Dict[str, Any]) -> None:
    layer, truth = layers(column, dtype, device)
    x = torch.randn(ROWS, FEATURES).to(dtype)
    x[0] *= 2**20
    with torch.no_grad():
        computed = (layer(x.to(device)) - layer.bias).cpu()
        true = truth(x.double()) - truth.bias
    if recipe_of(column) == "tensorwise":  # for contrast: one scale for all loses values that are 2^20 times smaller
        assert bounds.relative_error(computed[1:], true[1:]) > 0.5
    else:
        measured["error"] = bounds.assert_rounded_like(computed[1:], true[1:], *bounds.rounding_noise(E4M3, E4M3))


@needs(cuda=True, sm=(8, 9))
@every_recipe
@proves(
    "a float8 Linear's three products run as one FP8 kernel each, or two of them where the recipe keeps the weight "
    "gradient in high precision"
)
def test_products_ran_in_fp8(column: str, dtype: torch.dtype, device: str, measured: Dict[str, Any]) -> None:
    float8, _ = layers(column, dtype, device)
    plain = torch.nn.Linear(FEATURES, OUTPUTS, dtype=dtype, device=device)
    x, gradient = torch.randn(ROWS, FEATURES).to(dtype), torch.randn(ROWS, OUTPUTS)
    for layer in (float8, plain):
        run(layer, x, gradient)  # tune now
    mixed = RECIPES[recipe_of(column)]["weight"] is None
    step = lambda on: run(float8 if on else plain, x, gradient)  # noqa: E731
    measured.update(assert_float8_products(step, exactly=2 if mixed else 3, mixed=mixed))


@needs(cuda=True, sm=(8, 9))
@long
@every_recipe
@proves("compiled into CUDA graphs by torch.compile a float8 Linear carries the same noise, forward and backward")
def test_compiled_into_graphs(column: str, dtype: torch.dtype, device: str, measured: Dict[str, Any]) -> None:
    from torch._dynamo.utils import counters

    layer, truth = layers(column, dtype, device)
    compiled = torch.compile(layer, mode="reduce-overhead")
    skipped = counters["inductor"]["cudagraph_skips"]
    for _ in range(3):  # it is run, captured, and replayed
        assert_noise_of(column, compiled, truth, torch.randn(ROWS, FEATURES).to(dtype), measured)
    assert counters["inductor"]["cudagraph_skips"] == skipped, "torch.compile made no graph of it"


def casts_of(
    layer: torch.nn.Module, x: torch.Tensor, gradient: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> List[Tuple[torch.Tensor, torch.dtype]]:
    """The scaled values that a forward and backward of the layer cast to float8, and the format of each, in order."""
    from torchao.float8 import float8_training_tensor as module

    casts: List[Tuple[torch.Tensor, torch.dtype]] = []
    cast = module.to_fp8_saturated

    def note(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        casts.append((values.detach().cpu(), dtype))
        codes: torch.Tensor = cast(values, dtype)
        return codes

    monkeypatch.setattr(module, "to_fp8_saturated", note)
    run(layer, x, gradient)
    return casts


@every_recipe
@proves(
    "a float8 Linear's scales bring the largest value of a tensor, or of each row, be it far above 448 or below, to "
    "the largest code, or with scales that are powers of two to more than half of it"
)
def test_largest_values_become_the_largest_code(
    column: str, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, _ = layers(column, dtype, device)
    rowwise = recipe_of(column) != "tensorwise"

    def draw(features: int, power: float) -> torch.Tensor:
        """Rows 2^power times as large as normal numbers; or where each has its scale, that times 2^-9 to 2^9."""
        spread = torch.exp2(torch.linspace(-9, 9, ROWS))[torch.randperm(ROWS)][:, None] if rowwise else torch.ones(1)
        return (torch.randn(ROWS, features) * spread * 2.0**power).to(dtype)

    for power in (-10, 0, 10):
        with monkeypatch.context() as patch:
            casts = casts_of(layer, draw(FEATURES, power), draw(OUTPUTS, power), patch)
        assert len(casts) == (4 if RECIPES[recipe_of(column)]["weight"] is None else 6)
        for index, (values, form) in enumerate(casts):
            # A scale per row or column, whichever a product sums over; one recipe's last weight has a single scale.
            whole = not rowwise or (len(casts) == 4 and index == 3)
            largest = [values.abs().amax(dim) / torch.finfo(form).max for dim in ([(0, 1)] if whole else [0, 1])]
            # A scale is rounded to float32 and so is its product: two roundings of 2^-24 and their own.
            least = (0.5 if rowwise else 1.0) * (1 - 2.0**-22)
            fits = [bool(((share > least) & (share <= 1 + 2.0**-22)).all()) for share in largest]
            assert any(fits), f"largest values of {[(float(share.min()), float(share.max())) for share in largest]}"


@every_recipe
@proves("a float8 Linear casts inputs and weights to e4m3, and gradients to e5m2 exactly where the recipe says so")
def test_formats(column: str, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, _ = layers(column, dtype, device)
    casts = casts_of(layer, torch.randn(ROWS, FEATURES), torch.randn(ROWS, OUTPUTS), monkeypatch)
    formats, recipe = [form for _, form in casts], recipe_of(column)
    backward = [torch.float8_e5m2 if recipe == "tensorwise" else torch.float8_e4m3fn, torch.float8_e4m3fn]
    products = 1 if RECIPES[recipe]["weight"] is None else 2
    assert formats == [torch.float8_e4m3fn] * 2 + backward * products
