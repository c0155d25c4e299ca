"""Transformer Engine's layers in FP8: their noise, their scales, their state, their limits."""

from __future__ import annotations

import importlib.metadata
import io
from typing import Any, Callable, Dict, List, Sequence, Tuple

import pytest
import torch
import transformer_engine.pytorch as te

from smoke_tests.claims import needs, proves
from smoke_tests.operators import bounds, references
from smoke_tests.operators.bounds import E4M3, E5M2
from smoke_tests.operators.kernels import FLOAT8, assert_float8_products, gpu_kernels_run, products
from smoke_tests.operators.table import te_recipes
from smoke_tests.operators.transformer_engine_adapter import te_autocast, te_recipe, te_without_fp8

# The formats to which each recipe rounds the factors of the products, for the output and for the gradients.
RECIPES: Dict[str, Tuple[Tuple[int, int], Tuple[int, int]]] = {
    "delayed": ((E4M3, E4M3), (E5M2, E4M3)),
    "current": ((E4M3, E4M3), (E5M2, E4M3)),
    "blockwise": ((E4M3, E4M3), (E4M3, E4M3)),
}
FEATURES, OUTPUTS, ROWS = 256, 384, 160
BF16 = torch.bfloat16

fp8_gpu = needs(sm=(8, 9))
every_recipe = pytest.mark.parametrize("recipe", te_recipes(importlib.metadata.version("transformer-engine")))


def swiglu_mlp(x: torch.Tensor, parameters: Dict[str, torch.Tensor]) -> torch.Tensor:
    """What LayerNormMLP computes: a layer norm, both projections of SwiGLU in one, the projection down."""
    gate, up = layer_norm_linear(x, {**parameters, "weight": parameters["fc1_weight"]}).chunk(2, dim=-1)
    return references.swiglu(gate, up) @ parameters["fc2_weight"].t()


def layer_norm_linear(x: torch.Tensor, parameters: Dict[str, torch.Tensor]) -> torch.Tensor:
    """A layer norm over the last dimension, then a linear layer."""
    centred = x - x.mean(dim=-1, keepdim=True)
    normal = centred / torch.sqrt(centred.pow(2).mean(dim=-1, keepdim=True) + 1e-5)
    return (normal * parameters["layer_norm_weight"] + parameters["layer_norm_bias"]) @ parameters["weight"].t()


def linear(x: torch.Tensor, parameters: Dict[str, torch.Tensor]) -> torch.Tensor:
    """A linear layer without bias."""
    return x @ parameters["weight"].t()


Truth = Callable[[torch.Tensor, Dict[str, torch.Tensor]], torch.Tensor]
# Layer, what it computes, and how many FP8 products it has in a row.
LAYERS: Dict[str, Tuple[Callable[[], torch.nn.Module], Truth, int]] = {
    "Linear": (lambda: te.Linear(FEATURES, OUTPUTS, bias=False, params_dtype=BF16), linear, 1),
    "LayerNormLinear": (
        lambda: te.LayerNormLinear(FEATURES, OUTPUTS, bias=False, params_dtype=BF16),
        layer_norm_linear,
        1,
    ),
    "LayerNormMLP": (
        lambda: te.LayerNormMLP(FEATURES, OUTPUTS, bias=False, activation="swiglu", params_dtype=BF16),
        swiglu_mlp,
        2,
    ),
}


def transformer_layer() -> torch.nn.Module:
    """A Llama-like layer: RMS norms, grouped heads, SwiGLU; its input is [length, batch, FEATURES]."""
    layer: torch.nn.Module = te.TransformerLayer(
        FEATURES, OUTPUTS, 4, num_gqa_groups=2, hidden_dropout=0.0, attention_dropout=0.0, bias=False,
        params_dtype=BF16, normalization="RMSNorm", activation="swiglu", self_attn_mask_type="causal",
    )  # fmt: skip
    return layer


def in_formulas(x: torch.Tensor, parameters: Dict[str, torch.Tensor]) -> torch.Tensor:
    """What transformer_layer() computes, without what the residual carries past it: [length, batch, FEATURES]."""
    attention, mlp = "self_attention.layernorm_qkv.", "layernorm_mlp."
    normal = references.rms_norm(x, parameters[attention + "layer_norm_weight"], 1e-5)
    heads = [
        (normal @ parameters[f"{attention}{name}_weight"].t()).unflatten(-1, (-1, FEATURES // 4)).permute(1, 2, 0, 3)
        for name in ("query", "key", "value")
    ]
    attended = (
        references.attention(*heads).permute(2, 0, 1, 3).flatten(2) @ parameters["self_attention.proj.weight"].t()
    )
    normal = references.rms_norm(x + attended, parameters[mlp + "layer_norm_weight"], 1e-5)
    gate, up = (normal @ parameters[mlp + "fc1_weight"].t()).chunk(2, dim=-1)
    return attended + references.swiglu(gate, up) @ parameters[mlp + "fc2_weight"].t()


def x_and_gradient(outputs: int, rows: int = ROWS) -> Tuple[torch.Tensor, torch.Tensor]:
    """Input [rows, FEATURES] and a gradient of the output [rows, outputs], on the GPU."""
    return torch.randn(rows, FEATURES, device="cuda").to(BF16), torch.randn(rows, outputs, device="cuda").to(BF16)


def run(layer: torch.nn.Module, recipe: Any, x: torch.Tensor, gradient: torch.Tensor) -> List[torch.Tensor]:
    """Output, and gradients of input and parameters, of one step with that recipe."""
    layer.zero_grad()
    leaf = x.clone().requires_grad_()
    with te_autocast(recipe):
        output = layer(leaf)
    output.backward(gradient)
    assert leaf.grad is not None
    gradients = [parameter.grad for parameter in layer.parameters() if parameter.grad is not None]
    return [output.detach(), leaf.grad, *gradients]


def settle(layer: torch.nn.Module, recipe: Any, x: torch.Tensor, gradient: torch.Tensor) -> None:
    """Two steps, after which delayed scales have seen the values that they are for."""
    for _ in range(2):
        run(layer, recipe, x, gradient)


def in_float64(truth: Truth, layer: torch.nn.Module, x: torch.Tensor, gradient: torch.Tensor) -> List[torch.Tensor]:
    """What `run` would give in float64."""
    leaf = x.cpu().double().requires_grad_()
    parameters = {name: tensor.detach().cpu().double().requires_grad_() for name, tensor in layer.named_parameters()}
    output = truth(leaf, parameters)
    output.backward(gradient.cpu().double())
    assert leaf.grad is not None
    return [output.detach(), leaf.grad, *[tensor.grad for tensor in parameters.values() if tensor.grad is not None]]


def assert_noise(
    computed: Sequence[torch.Tensor], true: Sequence[torch.Tensor], recipe: str, products: int, measured: Dict[str, Any]
) -> None:
    """Assert FP8's noise in output and gradients: no less than one product's, no more than of all in a row.

    Each further product adds its own noise to what it is given. A rounding of the result to bfloat16 is far below.
    """
    formats = RECIPES[recipe]
    least, most = bounds.rounding_noise(*formats[0])
    measured["output"] = bounds.assert_rounded_like(computed[0].cpu(), true[0], least, most * products)
    least, most = bounds.rounding_noise(*formats[1])
    # A gradient also meets the noise of what was computed forward.
    errors = [bounds.relative_error(tensor.cpu(), other) for tensor, other in zip(computed[1:], true[1:])]
    matrices = [error for error, tensor in zip(errors, computed[1:]) if tensor.dim() == 2]
    measured["gradient"] = max(matrices)
    assert least <= min(matrices) and max(matrices) <= most * 2 * products, f"gradients are off by {matrices}"
    assert max(errors) <= most * 2 * products, f"gradients are off by {errors}"


@fp8_gpu
@every_recipe
@pytest.mark.parametrize("name", list(LAYERS))
@proves("a layer in FP8 carries the noise of its recipe's products, no less and no more, forward and backward")
def test_layer(name: str, recipe: str, device: str, measured: Dict[str, Any]) -> None:
    make, truth, products = LAYERS[name]
    layer, chosen = make(), te_recipe(recipe)
    x, gradient = x_and_gradient(FEATURES if name == "LayerNormMLP" else OUTPUTS)
    settle(layer, chosen, x, gradient)
    assert_noise(run(layer, chosen, x, gradient), in_float64(truth, layer, x, gradient), recipe, products, measured)


@fp8_gpu
@every_recipe
@pytest.mark.parametrize("name", list(LAYERS))
@proves("FP8 adds noise to a layer's gradients and nothing else: their slope is 1, less what rounding takes")
def test_gradients_have_slope_1(name: str, recipe: str, device: str, measured: Dict[str, Any]) -> None:
    make, truth, products = LAYERS[name]
    layer, chosen = make(), te_recipe(recipe)
    x, gradient = x_and_gradient(FEATURES if name == "LayerNormMLP" else OUTPUTS)
    settle(layer, chosen, x, gradient)
    most = bounds.rounding_noise(*RECIPES[recipe][1])[1] * 2 * products
    for computed, true in zip(run(layer, chosen, x, gradient)[1:], in_float64(truth, layer, x, gradient)[1:]):
        error = bounds.relative_error(computed.cpu(), true)
        assert error <= most, f"noise {error:.3g}, more than {most:.3g}"  # a gradient of zeros is 1 off in both
        slope = bounds.slope(computed.cpu(), true)
        measured["slope"] = max(slope, measured.get("slope", slope), key=lambda value: abs(value - 1))
        assert_slope(computed.cpu(), true)


def assert_slope(computed: torch.Tensor, true: torch.Tensor, most: float = bounds.SLOPE) -> None:
    """Assert that the slope is 1, less what rounding takes; that of a norm's few weights strays with their noise."""
    slope, error = bounds.slope(computed, true), bounds.relative_error(computed, true)
    most += 4 * error / len(true) ** 0.5 if true.dim() == 1 else 0
    assert abs(slope + error**2 - 1) <= most, f"slope {slope:.5f} of {tuple(true.shape)} with noise {error:.3g}"


@fp8_gpu
@every_recipe
@proves(
    "a TransformerLayer in FP8 is the layer in float64, output and gradients, with the noise of its products and no "
    "scale besides"
)
def test_transformer_layer(recipe: str, device: str, measured: Dict[str, Any]) -> None:
    layer, chosen = transformer_layer(), te_recipe(recipe)
    x, gradient = (torch.randn(80, 2, FEATURES, device="cuda").to(BF16) for _ in range(2))
    settle(layer, chosen, x, gradient)
    computed = [tensor.double().cpu() for tensor in run(layer, chosen, x, gradient)]
    # Without what the residual carries past the layer; of zeros nothing is wrong by less than all of it.
    computed[0] -= x.double().cpu()
    computed[1] -= gradient.double().cpu()
    true = in_float64(in_formulas, layer, x, gradient)
    errors = [bounds.relative_error(result, exact) for result, exact in zip(computed, true)]
    measured["output"], measured["gradient"] = errors[0], max(errors[1:])
    # From the least noise of one product to that of all five in a row, added in quadrature: two in attention, and three
    # in gate, up and down. A gradient also carries the noise of the forward products.
    (least, forward), (_, backward) = (bounds.rounding_noise(*formats) for formats in RECIPES[recipe])
    most = [5**0.5 * forward, *[(5 * (forward**2 + backward**2)) ** 0.5] * (len(errors) - 1)]
    assert len(computed) == len(true) == 10
    assert all(least <= error <= limit for error, limit in zip(errors, most)), f"off by {errors}"
    assert_slope(computed[0], true[0])
    for result, exact in zip(computed[1:], true[1:]):
        assert_slope(result, exact, 2 * bounds.SLOPE)


@fp8_gpu
@every_recipe
@pytest.mark.parametrize("name", [*LAYERS, "TransformerLayer"])
@proves(
    "each product of a layer in FP8 runs as one FP8 kernel, three to a weight, forward and backward, and none does in "
    "bfloat16"
)
def test_products_ran_in_fp8(name: str, recipe: str, device: str, measured: Dict[str, Any]) -> None:
    layer = transformer_layer() if name == "TransformerLayer" else LAYERS[name][0]()
    chosen = te_recipe(recipe)
    shape = (80, 2, FEATURES) if name == "TransformerLayer" else (ROWS, FEATURES)
    x = torch.randn(*shape, device="cuda").to(BF16)
    with torch.no_grad():
        gradient = torch.randn_like(layer(x))
    settle(layer, chosen, x, gradient)
    weights = {"Linear": 1, "LayerNormLinear": 1, "LayerNormMLP": 2, "TransformerLayer": 4}[name]
    step = lambda on: run(layer, chosen if on else None, x, gradient)  # noqa: E731
    measured.update(assert_float8_products(step, exactly=3 * weights))


@fp8_gpu
@proves("its FP8 context leaves torch's own layers alone: no product of a torch.nn.Linear runs in FP8", seed="A12")
def test_other_layers_stay_as_they_are(device: str, measured: Dict[str, Any]) -> None:
    layer = torch.nn.Linear(FEATURES, OUTPUTS, device=device, dtype=BF16)
    x, gradient = x_and_gradient(OUTPUTS)
    ran = products(gpu_kernels_run(lambda: run(layer, te_recipe("delayed"), x, gradient)))
    assert ran
    assert not any(FLOAT8.search(name) for name in ran)
    measured["kernel"] = sorted(ran)[0][:80]


def scales_of(layer: torch.nn.Module) -> Tuple[torch.Tensor, torch.Tensor]:
    """The amax history [steps, tensors] and the scales [tensors] of a layer's forward pass; tensor 0 is the input."""
    meta = layer.fp8_meta["scaling_fwd"]
    return meta.amax_history.cpu().clone(), meta.scale.cpu().clone()


WINDOW = 16  # steps
# The input's size in each step, as a power of two, exact in bfloat16: it grows for 5 steps, then shrinks for 20. So do
# the sizes of the weight, which begins near 0.1, and the gradient. Each is sometimes below and sometimes above 448, and
# the gradient also above 57,344, the largest number of its format.
SIZES = [0, 4, 8, 12, 14, *range(13, -7, -1)]


@fp8_gpu
@proves(
    "delayed scaling: the first scale is 1, then in each step the largest number of the format over the largest value "
    "of the last 16 steps, of an input, weight and gradient that grow far beyond that number and shrink again",
    since="1.6",  # older versions compute it when the next step begins
)
def test_amax_history(device: str, measured: Dict[str, Any]) -> None:
    layer, chosen = LAYERS["Linear"][0](), te_recipe("delayed")
    x, gradient = x_and_gradient(OUTPUTS)
    weight = layer.weight.detach().clone()
    in_e4m3 = [tensor.to(torch.float8_e4m3fn).double() for tensor in (x, weight)]
    first = run(layer, chosen, x, gradient)[0].double()
    measured["scale 1"] = bounds.relative_error(first, in_e4m3[0] @ in_e4m3[1].t())
    # The codes are the same: only the result is rounded, to 8 bits, and the sum in FP8's accumulator, to more bits.
    assert measured["scale 1"] <= 2 * 2.0**-8 < bounds.rounding_noise(E4M3)[0]
    for step in range(len(SIZES)):
        factor = 2.0 ** SIZES[step]
        with torch.no_grad():
            layer.weight.copy_(weight * factor)
        if step:
            run(layer, chosen, x * factor, gradient * factor)
        largest = 2.0 ** max(SIZES[max(0, step + 1 - WINDOW) : step + 1])
        assert step != SIZES.index(max(SIZES)) or all(
            float(tensor.abs().max()) * largest > most for most, tensor in ((448, x), (448, weight), (57344, gradient))
        ), "nothing is above the largest number of its format: this measures little"
        for way, most, tensors in (("fwd", 448, (x, weight)), ("bwd", 57344, (gradient,))):
            scales = layer.fp8_meta[f"scaling_{way}"].scale.tolist()[: len(tensors)]
            exact = [most / float(tensor.abs().max()) / largest for tensor in tensors]
            assert scales == pytest.approx(exact, rel=2.0**-22), f"scaling_{way} after step {step}"


@fp8_gpu
@proves("delayed scaling forgets a large value after as many steps as its history is long, 16")
def test_amax_history_is_as_long_as_asked(device: str, measured: Dict[str, Any]) -> None:
    layer, chosen = LAYERS["Linear"][0](), te_recipe("delayed")
    x, gradient = x_and_gradient(OUTPUTS)
    settle(layer, chosen, x, gradient)
    _, before = scales_of(layer)
    run(layer, chosen, 16 * x, gradient)
    if float(scales_of(layer)[1][0]) == float(before[0]):  # before 1.6, it is computed when the next step begins
        run(layer, chosen, x, gradient)
    _, small = scales_of(layer)
    assert float(before[0] / small[0]) == pytest.approx(16, rel=1e-6)
    steps = 0
    while float(scales_of(layer)[1][0]) == float(small[0]) and steps < 40:
        run(layer, chosen, x, gradient)
        steps += 1
    measured["steps"] = steps
    # 16 steps count: the one that saw the value still does after 15 more, but not after 16.
    assert steps == 16
    assert float(scales_of(layer)[1][0]) == float(before[0])


@fp8_gpu
@every_recipe
@proves(
    "a Linear over 8,192 and over 16,384 terms of one sign is too small by four truncations at most where its recipe "
    "splits accumulators, by one for every 8 terms where not, and never too large",
    since="2.3",
)
def test_products_of_one_sign(recipe: str, device: str, measured: Dict[str, Any]) -> None:
    chosen = te_recipe(recipe)
    product_of = getattr(chosen, "fp8_gemm_fprop", None)  # delayed scaling has none, and splits none forward
    split = product_of is not None and product_of.use_split_accumulator
    for terms in (8192, 16384):
        layer = te.Linear(terms, OUTPUTS, bias=False, params_dtype=BF16)
        # Codes of e4m3, the largest 448, so that casting changes none; rows of other sizes, so that spacings differ.
        sizes = [torch.exp2(torch.rand(count, 1, device="cuda")) for count in (ROWS, OUTPUTS)]
        x, weight = (
            (torch.rand(len(size), terms, device="cuda") * 224 * size).to(torch.float8_e4m3fn) for size in sizes
        )
        x, weight = x.to(BF16), weight.to(BF16)
        x[0, 0] = weight[0, 0] = 448
        with torch.no_grad():
            layer.weight.copy_(weight * 2.0**-10)
        gradient = torch.randn(ROWS, OUTPUTS, device="cuda").to(BF16)
        settle(layer, chosen, x, gradient)
        product = run(layer, chosen, x, gradient)[0].cpu().double()
        bias = float((product / (x.double() @ layer.weight.detach().double().t()).cpu() - 1).mean())
        measured[f"bias of {terms}"] = bias
        # A Hopper tensor core keeps 13 fraction bits of a sum and truncates the rest. A split sum moves to float32
        # every 128 terms and is truncated four times in between. Each result is rounded, and the mean of these
        # roundings scatters.
        rounding = 4 * bounds.ceiling(BF16, 1) / (ROWS + OUTPUTS) ** 0.5
        # A sum that is not split adds 32 terms at once, in parts of undocumented size; over 8,192 terms, an H200 loses
        # 0.045 in all.
        most = (4 if split else terms // 8) * 2.0**-13
        assert -most - rounding <= bias <= rounding, f"off by {bias:.3g} on average over {terms} terms"


@fp8_gpu
@every_recipe
@proves(
    "the scales of a Linear follow an input and a gradient 1,024 times larger, beyond 448, within two steps: the noise "
    "is what it was"
)
def test_scales_follow(recipe: str, device: str, measured: Dict[str, Any]) -> None:
    make, truth, products = LAYERS["Linear"]
    layer, chosen = make(), te_recipe(recipe)
    x, gradient = x_and_gradient(OUTPUTS)
    settle(layer, chosen, x, gradient)
    large = 1024 * x, 1024 * gradient
    assert (
        min(float(tensor.abs().max()) for tensor in large)
        > 448
        > max(float(result.abs().max()) for result in (x, gradient))
    )
    settle(layer, chosen, *large)
    assert_noise(run(layer, chosen, *large), in_float64(truth, layer, *large), recipe, products, measured)


@fp8_gpu
@every_recipe
@proves("an update of the weights reaches their FP8 copy, unless the layer is asked to keep that copy")
def test_weight_updates_reach_the_copy(recipe: str, device: str, measured: Dict[str, Any]) -> None:
    layer, chosen = LAYERS["Linear"][0](), te_recipe(recipe)
    x, _ = x_and_gradient(OUTPUTS)

    def output(first: bool) -> torch.Tensor:
        with te_autocast(chosen):
            product: torch.Tensor = layer(x, is_first_microbatch=first)
        return product.detach().double().cpu()

    for _ in range(2):
        before = output(first=True)
    with torch.no_grad():
        layer.weight.neg_()  # of the same size, so that no scale has to follow
    measured["kept"], measured["renewed"] = (bounds.slope(output(first), before) for first in (False, True))
    assert measured["kept"] == pytest.approx(1, abs=1e-3)
    assert measured["renewed"] == pytest.approx(-1, abs=1e-3)


@fp8_gpu
@every_recipe
@proves("a layer's state, scales included, survives a checkpoint: the next output is bit-equal")
def test_state_round_trip(recipe: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE", "1")  # 2.18 refuses its own state without it
    make, chosen = LAYERS["Linear"][0], te_recipe(recipe)
    layer, other = make(), make()
    x, gradient = x_and_gradient(OUTPUTS)
    settle(layer, chosen, 3 * x, gradient)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=False))
    after = [run(module, chosen, x, gradient)[0] for module in (layer, other)]
    assert torch.equal(*after)


@fp8_gpu
@proves("a layer that resumed from a checkpoint keeps following its input, 16 times larger, as delayed scaling does")
def test_resumed_scales_follow(device: str, measured: Dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE", "1")  # as above
    make, chosen = LAYERS["Linear"][0], te_recipe("delayed")
    layer, resumed = make(), make()
    x, gradient = x_and_gradient(OUTPUTS)
    settle(layer, chosen, x, gradient)
    resumed.load_state_dict(layer.state_dict())
    settle(resumed, chosen, 16 * x, gradient)
    _, (before, *_) = scales_of(layer)
    _, (after, *_) = scales_of(resumed)
    measured["factor"] = float(before / after)
    assert measured["factor"] == pytest.approx(16, rel=1e-6)


@fp8_gpu
@pytest.mark.parametrize("ahead", [0, 1], ids=["in turn", "ahead"])
@proves(
    "activations that are computed again in the backward pass change no bit under delayed scaling: not of output, "
    "gradients, scales, or amax history, while the input grows and shrinks, also where the next forward pass runs "
    "before the backward pass",
    since="2.0",
)
def test_recompute(ahead: int, device: str) -> None:
    plain, other = (
        torch.nn.Sequential(*[te.Linear(*sizes, bias=False, params_dtype=BF16) for sizes in widths])
        for widths in [[(FEATURES, OUTPUTS), (OUTPUTS, FEATURES)]] * 2
    )
    other.load_state_dict(plain.state_dict())
    x, gradient = x_and_gradient(FEATURES)
    chosen, histories = te_recipe("delayed"), []
    for layer in (plain, Recomputed(other)):  # one after the other: scales of all layers are updated together
        steps, linears = [], [part for part in layer.modules() if isinstance(part, te.Linear)]
        under_way: List[Tuple[torch.Tensor, ...]] = []
        for factor in (1.0, 3.0, 0.7, 11.0, 0.3, 5.0):  # not powers of two, which would give the same codes
            leaf = (x * factor).requires_grad_()
            with te_autocast(chosen):
                under_way.append((leaf, layer(leaf), gradient / factor))
            if len(under_way) <= ahead:
                continue
            leaf, output, its = under_way.pop(0)
            layer.zero_grad()
            output.backward(its)
            results = [output.detach(), leaf.grad, *[part.weight.grad for part in linears]]
            metas = [part.fp8_meta[way] for part in linears for way in ("scaling_fwd", "scaling_bwd")]
            state = [tensor.clone() for meta in metas for tensor in (meta.scale, meta.amax_history)]
            steps.append([tensor.clone() for tensor in (*results, *state)])
        histories.append(steps)
    for step, (stored, again) in enumerate(zip(*histories)):
        same = [torch.equal(*pair) for pair in zip(stored, again)]
        assert len(stored) == len(again) == 4 + 8 and all(same), f"step {step}: {same}"


class Recomputed(torch.nn.Module):  # type: ignore[misc]
    """A layer that keeps no activations."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = te.checkpoint(self.layer, x, use_reentrant=False)
        return output


@fp8_gpu
@pytest.mark.parametrize(("features", "rows"), [(FEATURES - 8, ROWS), (FEATURES, ROWS - 1)], ids=["features", "rows"])
@proves("a size that FP8 products cannot take is refused in a sentence that names the divisor")
def test_odd_sizes_are_refused(features: int, rows: int, device: str, measured: Dict[str, Any]) -> None:
    layer = te.Linear(features, OUTPUTS, params_dtype=BF16)
    with pytest.raises((AssertionError, ValueError, RuntimeError), match=r"divisible by (8|16)|% 16 != 0") as refused:
        run(layer, te_recipe("delayed"), torch.randn(rows, features, device="cuda").to(BF16), torch.ones(()))
    measured["said"] = str(refused.value).splitlines()[0]


@fp8_gpu
@proves("on a GPU without FP8 (simulated: compute capability 8.0) it is refused in a sentence that says what is needed")
def test_a_gpu_without_fp8_is_refused(device: str, measured: Dict[str, Any]) -> None:
    expected = pytest.raises((AssertionError, RuntimeError), match=r"capability 8\.9 or higher")
    with te_without_fp8(), expected as refused, te_autocast(te_recipe("delayed")):
        pass
    measured["said"] = str(refused.value).splitlines()[0]


@fp8_gpu
@pytest.mark.parametrize("recipe", ["delayed", "current"])
@proves("a layer captured in a CUDA graph gives the eager layer's bits, forward and backward", since="2.9")
def test_graphed(recipe: str, device: str) -> None:
    make = LAYERS["LayerNormMLP"][0]
    layer, other = make(), make()
    other.load_state_dict(layer.state_dict())
    x, gradient = x_and_gradient(FEATURES)
    chosen = te_recipe(recipe)
    graphed = te.make_graphed_callables(other, (x.clone().requires_grad_(),), enabled=True, recipe=te_recipe(recipe))
    for _ in range(4):  # as many as delayed scales need to be the same on both sides
        eager = run(layer, chosen, x, gradient)
        captured = run(graphed, chosen, x, gradient)
    assert all(torch.equal(*pair) for pair in zip(eager, captured))
