"""Transformer Engine's operators, its linear layers in FP8, and what differs between its versions."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from typing import Any, Callable, Dict, Iterator
from unittest import mock

import torch


def te_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    from transformer_engine.pytorch import DotProductAttention

    heads, groups, size = query.shape[1], key.shape[1], query.shape[-1]
    attend = DotProductAttention(
        heads, size, num_gqa_groups=groups, qkv_format="bshd", attn_mask_type="causal", attention_dropout=0.0
    )
    attended: torch.Tensor = attend(*[tensor.transpose(1, 2).contiguous() for tensor in (query, key, value)])
    return attended.unflatten(-1, (heads, size)).transpose(1, 2)


def te_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    from transformer_engine.pytorch import RMSNorm

    module = RMSNorm(weight.shape, eps=eps, params_dtype=weight.dtype)
    module.weight = weight if isinstance(weight, torch.nn.Parameter) else torch.nn.Parameter(weight)
    normalized: torch.Tensor = module(x)
    return normalized


def te_cross_entropy(logits: torch.Tensor, labels: torch.Tensor, ignore_index: int) -> torch.Tensor:
    from transformer_engine.pytorch.cross_entropy import parallel_cross_entropy

    # [rows, 1, v]: batch and length. It returns the mean as [1].
    loss: torch.Tensor = parallel_cross_entropy(logits[:, None], labels[:, None], 0.0, True, None, ignore_index)
    return loss.sum()


def te_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    from transformer_engine.pytorch.ops import SwiGLU

    product: torch.Tensor = SwiGLU()(torch.cat([gate, up], dim=-1))
    return product


class TransformerEngineRope:
    """Transformer Engine's fused kernel, which takes the angles. Until 2.0 it knows no base but 10000."""

    angles = torch.float32

    def __init__(self, head_size: int, base: float) -> None:
        attention = importlib.import_module("transformer_engine.pytorch.attention")
        self.module = getattr(attention, "rope", attention)  # a module of its own from 2.0 on
        others = {} if base == 10000.0 else {"rotary_base": base}
        self.embedding = self.module.RotaryPositionEmbedding(head_size, **others)

    def __call__(self, x: torch.Tensor, start: int) -> torch.Tensor:
        angles = self.embedding(start + x.shape[-2])[start:].to(x.device)
        turned: torch.Tensor = self.module.apply_rotary_pos_emb(
            x.transpose(1, 2), angles, tensor_format="bshd", fused=True
        )
        return turned.transpose(1, 2)


class InFp8(torch.nn.Module):  # type: ignore[misc]
    """A model whose layers of Transformer Engine compute in FP8."""

    def __init__(self, model: torch.nn.Module, recipe: Any) -> None:
        super().__init__()
        self.model, self.recipe = model, recipe

    def forward(self, *inputs: torch.Tensor, **named: Any) -> torch.Tensor:
        with te_autocast(self.recipe):
            output: torch.Tensor = self.model(*inputs, **named)
        return output


def te_autocast(recipe: Any) -> Any:
    """The context in which layers of Transformer Engine compute in FP8; in that of None they do not."""
    import transformer_engine.pytorch as te

    if hasattr(te, "autocast"):  # from 2.9 on
        return te.autocast(enabled=recipe is not None, recipe=recipe)
    return te.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe)


def te_recipe(name: str) -> Any:
    """Transformer Engine's scaling recipe of that name: e4m3 forward, e5m2 backward, but blockwise e4m3 for both."""
    from transformer_engine.common import recipe

    if name == "delayed":
        return recipe.DelayedScaling(fp8_format=recipe.Format.HYBRID, amax_history_len=16)
    return {"current": recipe.Float8CurrentScaling, "blockwise": recipe.Float8BlockScaling}[name]()


@contextlib.contextmanager
def te_without_fp8() -> Iterator[None]:
    """Transformer Engine as it is on a GPU of compute capability 8.0, which has no FP8."""
    package = "transformer_engine.pytorch"
    if importlib.util.find_spec(package + ".quantization"):  # from 2.9 on
        module = importlib.import_module(package + ".quantization")
        unasked = mock.patch.object(module, "_FP8_SUPPORT", None)
    else:
        module = importlib.import_module(package + ".fp8")
        # A refusal leaves it as if inside the context, and then no later step would update its scales.
        state: Dict[str, Any] = {"fp8_available": None, "FP8_AUTOCAST_DEPTH": 0, "FP8_ENABLED": False}
        unasked = mock.patch.multiple(module.FP8GlobalStateManager, **state)
    with unasked, mock.patch.object(module, "get_device_compute_capability", lambda: (8, 0)):
        yield


def te_linear(model: torch.nn.Module, keep: Callable[[str], bool], recipe: str) -> torch.nn.Module:
    """Transformer Engine's linear layers in place of torch's, with their weights."""
    for name, layer in list(model.named_modules()):
        if type(layer) is torch.nn.Linear and not keep(name):
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, te_linear_of(layer))
    return InFp8(model, te_recipe(recipe))


def te_linear_of(layer: torch.nn.Module) -> torch.nn.Module:
    """Transformer Engine's linear layer with the parameters of one of torch's; they stay the same objects."""
    from transformer_engine.pytorch import Linear

    sizes, dtype = (layer.in_features, layer.out_features), layer.weight.dtype
    return _with_parameters(Linear(*sizes, bias=layer.bias is not None, params_dtype=dtype, device="cuda"), layer)


def te_norm_of(norm: torch.nn.Module, eps: float) -> torch.nn.Module:
    """Transformer Engine's LayerNorm, or its RMSNorm if there is no bias, with the parameters of another norm."""
    from transformer_engine.pytorch import LayerNorm, RMSNorm

    kind = RMSNorm if getattr(norm, "bias", None) is None else LayerNorm
    return _with_parameters(kind(norm.weight.shape, eps=eps, params_dtype=norm.weight.dtype), norm)


def _with_parameters(made: torch.nn.Module, layer: torch.nn.Module) -> torch.nn.Module:
    for name, parameter in layer.named_parameters(recurse=False):
        setattr(made, name, parameter)
    return made
