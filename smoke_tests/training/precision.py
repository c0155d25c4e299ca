"""The precision of a model's linear layers: bfloat16 or float32, FP8 by a package, or a shortened mantissa.

A precision is "float32", "bf16", "fp8" (Transformer Engine's delayed scaling), a column of the table's linear layers
("torchao.tensorwise", "transformer-engine.current"), or "e8m3" to "e8m6": bfloat16 with that many bits of mantissa.
The head always stays in high precision. MS-AMP, whose weights and optimizer are others as well, is in ms_amp.py.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Tuple

import torch
import torch.nn.functional as F

from smoke_tests.operators.table import OPERATORS, operator
from smoke_tests.operators.torch_adapter import version_of_torch
from smoke_tests.operators.transformer_engine_adapter import InFp8

Compute = Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]
ALIASES = {"fp8": "transformer-engine.delayed", "bf16": "torch", "float32": "torch"}
CUT = {f"e8m{bits}": bits for bits in (3, 4, 5, 6)}
# The layers in FP8 that can be computed by hand, and those of Transformer Engine that do more than one product.
IN_FP8 = {("torchao", "Float8Linear"), ("transformer_engine", "Linear")}
FUSED = ("LayerNormLinear", "LayerNormMLP", "GroupedLinear")
PRECISIONS = (*ALIASES, *CUT, *(column for column in OPERATORS["linear"] if column != "torch"))


def column_of(precision: str) -> str:
    """The column of linear layers that a precision takes: "fp8" -> "transformer-engine.delayed"."""
    return "torch" if precision in CUT else ALIASES.get(precision, precision)


def convert(model: torch.nn.Module, precision: str) -> torch.nn.Module:
    """The model with its linear layers, all but the head, in that precision."""
    if precision in CUT:
        compute_by(layers_of(model), rounded(CUT[precision], CUT[precision]))
    converted: torch.nn.Module = operator("linear", column_of(precision))(model, keep=lambda name: name == "head")
    return converted


def inner(model: torch.nn.Module) -> torch.nn.Module:
    """The model itself, without the wrapper that lets Transformer Engine's layers compute in FP8."""
    return model.model if isinstance(model, InFp8) else model


def mantissas(precision: str) -> Tuple[int, int]:
    """To how many bits of mantissa that FP8 rounds the factors of a product forward, and its gradient backward."""
    return (3, 3) if precision.endswith(("rowwise", "blockwise", "gw_hp")) else (3, 2)


# --- the same layers, computed in another way ---


def layers_of(model: torch.nn.Module) -> List[torch.nn.Module]:
    """Every linear layer but the head, of torch, torchao or Transformer Engine."""
    named = inner(model).named_modules()
    return [layer for name, layer in named if hasattr(layer, "in_features") and name.rpartition(".")[2] != "head"]


def in_fp8(model: torch.nn.Module) -> Dict[str, torch.nn.Module]:
    """The linear layers in FP8 or in a cut mantissa, by name: of torchao, of Transformer Engine, and of compute_by().

    ValueError names a layer in FP8 that computed() cannot compute, or whose weight does not show a step's change.
    """
    layers = {}
    for name, layer in inner(model).named_modules():
        package, kind = type(layer).__module__.partition(".")[0], type(layer).__name__
        if package == "msamp" or (package == "transformer_engine" and kind in FUSED):
            raise ValueError(f"{name} is a {kind} of {package}, which the guard cannot compute in high precision")
        off = package == "transformer_engine" and isinstance(model, InFp8) and model.recipe is None
        if not off and ((package, kind) in IN_FP8 or ("forward" in layer.__dict__ and hasattr(layer, "in_features"))):
            weight = layer.weight.data
            if type(weight) is not torch.Tensor or weight.dtype is not torch.float32:
                raise ValueError(
                    f"{name}.weight is a {type(weight).__name__} in {weight.dtype}, and the guard compares whole "
                    "weights in float32, in which the change of a few steps shows"
                )
            layers[name] = layer
    return layers


def compute_by(layers: Iterable[torch.nn.Module], compute: Compute) -> None:
    """Let each of these layers compute compute(layer, x) from now on."""
    for layer in layers:
        layer.forward = functools.partial(compute, layer)


@contextlib.contextmanager
def computed(
    model: torch.nn.Module, compute: Compute, layers: Optional[List[torch.nn.Module]] = None
) -> Iterator[None]:
    """The context in which layers, by default layers_of(), compute compute(layer, x), eagerly, and none is in FP8."""
    layers = layers_of(model) if layers is None else layers
    before = [(layer, layer.__dict__.get("forward")) for layer in layers]
    wrapped = [(part, part.recipe) for part in model.modules() if isinstance(part, InFp8)]
    with contextlib.ExitStack() as stack:
        if hasattr(torch, "compiler") and hasattr(torch.compiler, "set_stance"):  # compiled code is the other layer's
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        try:
            compute_by(layers, compute)
            for part, _ in wrapped:
                part.recipe = None
            yield
        finally:
            for layer, forward in before:
                del layer.forward
                if forward is not None:
                    layer.forward = forward
            for part, recipe in wrapped:
                part.recipe = recipe


def is_computed_otherwise(model: torch.nn.Module) -> bool:
    """Whether the model is inside such a context."""
    return any("forward" in layer.__dict__ for layer in layers_of(model))


def factors(layer: torch.nn.Module, x: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor, Optional[torch.Tensor]]:
    """Input, weight and bias (None if there is none) in the dtype that autocast, or else the input, asks for."""
    if version_of_torch() >= (2, 4):
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    elif x.is_cuda:
        dtype = torch.get_autocast_gpu_dtype() if torch.is_autocast_enabled() else x.dtype
    else:
        dtype = torch.get_autocast_cpu_dtype() if torch.is_autocast_cpu_enabled() else x.dtype
    bias = getattr(layer, "bias", None)
    has_bias = bias is not None and bias.numel() > 0  # Transformer Engine's bias is empty if there is none
    return x.to(dtype), layer.weight.to(dtype), bias.to(dtype) if bias is not None and has_bias else None


def plain(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The layer in high precision."""
    return F.linear(*factors(layer, x))


def rounded(
    forward_bits: int, backward_bits: int, note: Callable[..., None] = lambda *_: None, scale: float = 1.0
) -> Compute:
    """The layer with its input and weight, and backward the gradient of its output, cut to so many bits of mantissa.

    note(layer, input, weight) is called before they are cut. scale: by which input and weight are multiplied before
    they are cut, and divided behind: another one that is no power of two rounds other values up, by as much.
    """

    def compute(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        x, weight, bias = factors(layer, x)
        note(layer, x, weight)
        if scale != 1:
            x, weight = x * scale, weight * scale
        product: torch.Tensor = RoundedProduct.apply(x, weight, forward_bits, backward_bits)
        if scale != 1:
            product = product / scale**2
        return product if bias is None else product + bias

    return compute


class RoundedProduct(torch.autograd.Function):  # type: ignore[misc]
    """x [..., f] and weight [o, f] -> x weight^T [..., o], each factor of the three products cut."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bits: int, backward_bits: int) -> torch.Tensor:
        x, weight = round_mantissa(x, bits), round_mantissa(weight, bits)
        ctx.save_for_backward(x, weight)
        ctx.bits = backward_bits
        return product(x, weight.t())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor, None, None]:
        x, weight = ctx.saved_tensors
        gradient = round_mantissa(gradients[0], ctx.bits)
        return product(gradient, weight), product(gradient.flatten(0, -2).t(), x.flatten(0, -2)), None, None


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a b, summed in float32; many a CPU multiplies bfloat16 a hundred times slower than float32."""
    return a @ b if a.is_cuda else (a.float() @ b.float()).to(a.dtype)


def round_mantissa(x: torch.Tensor, bits: int) -> torch.Tensor:
    """x with its mantissa (7 bits in bfloat16, 23 in float32) rounded to `bits`, ties to even; the exponent keeps 8.

    Any shape, dtype kept. Subnormals round to multiples of 2^(-126 - bits), infinities and NaN stay.
    """
    code = x.float().view(torch.int32)
    cut = 23 - bits
    # Half a unit, less where the last bit that stays is 0, so that a tie goes to even; a carry raises the exponent.
    nearest = code + ((1 << (cut - 1)) - 1) + ((code >> cut) & 1) & (-1 << cut)
    return torch.where(torch.isfinite(x), nearest.view(torch.float32).to(x.dtype), x)
