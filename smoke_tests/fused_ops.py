"""The one table of fused operators: operator x package -> callable. Differences between versions live only here.

A column is a distribution, with a variant after a dot where it has several. Packages are imported when an entry is
called, so that a broken package refutes only the claims about itself.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Callable, Dict, Iterable, Tuple

import torch
import torch.nn.functional as F

Parameters = Iterable[torch.nn.Parameter]


def version_of_torch() -> Tuple[int, int]:
    """(2, 13) for 2.13.0+cpu."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


# --- attention(query [b, h, l, d], key [b, k, l, d], value [b, k, l, d]) -> [b, h, l, d], causal ---


def torch_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if version_of_torch() >= (2, 5):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


# --- rms_norm(x [n, f], weight [f], eps) -> [n, f] ---


def torch_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


# --- cross_entropy(logits [n, v], labels [n], ignore_index) -> scalar, the mean over rows that count ---


def torch_cross_entropy(logits: torch.Tensor, labels: torch.Tensor, ignore_index: int) -> torch.Tensor:
    return F.cross_entropy(logits, labels, ignore_index=ignore_index)


# --- swiglu(gate, up) -> silu(gate) * up, any equal shapes ---


def torch_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


# --- rope(head size, base) -> rotate(x [b, h, l, d], start) -> the same shape, halves paired ---


class TorchRope:
    """Rotary embedding with a table of cosines and sines that grows with the longest position asked for."""

    def __init__(self, head_size: int, base: float) -> None:
        self.frequency = base ** (-torch.arange(0, head_size, 2, dtype=torch.float64) / head_size)
        self.cosine = self.sine = torch.empty(0, head_size // 2, dtype=torch.float64)

    def __call__(self, x: torch.Tensor, start: int) -> torch.Tensor:
        stop = start + x.shape[-2]
        if stop > len(self.cosine):
            angle = torch.arange(stop, dtype=torch.float64)[:, None] * self.frequency
            self.cosine, self.sine = angle.cos(), angle.sin()
        cosine, sine = self.cosine[start:stop].to(x.dtype), self.sine[start:stop].to(x.dtype)
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


class TransformersRope:
    """The rotary embedding of transformers' Mistral, built for few positions so that its table has to grow."""

    def __init__(self, head_size: int, base: float) -> None:
        from transformers.models.mistral import modeling_mistral

        self.embedding = modeling_mistral.MistralRotaryEmbedding(head_size, max_position_embeddings=8, base=base)
        self.apply = modeling_mistral.apply_rotary_pos_emb

    def __call__(self, x: torch.Tensor, start: int) -> torch.Tensor:
        positions = torch.arange(start, start + x.shape[-2])[None]
        cosine, sine = self.embedding(x, seq_len=start + x.shape[-2])
        turned: torch.Tensor = self.apply(x, x, cosine, sine, positions)[0]
        return turned


# --- adamw(parameters, lr, betas, eps, weight_decay) -> optimizer with step() ---


def torch_adamw(parameters: Parameters, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, fused=True, **settings)


def deepspeed_cpu_adamw(parameters: Parameters, **settings: Any) -> torch.optim.Optimizer:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    optimizer: torch.optim.Optimizer = DeepSpeedCPUAdam(list(parameters), adamw_mode=True, **settings)
    return optimizer


def deepspeed_fused_adamw(parameters: Parameters, **settings: Any) -> torch.optim.Optimizer:
    from deepspeed.ops.adam import FusedAdam

    optimizer: torch.optim.Optimizer = FusedAdam(list(parameters), adam_w_mode=True, **settings)
    return optimizer


# --- scaled_mm(a [m, k] fp8, b [n, k] fp8, scale_a, scale_b, dtype) -> (a scale_a) (b scale_b)^T [m, n] in dtype ---


def torch_scaled_mm(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    product = torch._scaled_mm(a, b.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=dtype)
    # Until 2.5 it returned the product's largest magnitude as well.
    return product[0] if isinstance(product, tuple) else product


# --- linear(model, keep) -> the model, its torch.nn.Linear layers replaced except those that keep(name) names ---


def torch_linear(model: torch.nn.Module, keep: Callable[[str], bool]) -> torch.nn.Module:
    return model


def torchao_linear(model: torch.nn.Module, keep: Callable[[str], bool], recipe: str) -> torch.nn.Module:
    """torchao's float8 training layers; without an FP8 GPU their products are emulated in float32."""
    import dataclasses

    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    emulate = not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9)
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    return convert_to_float8_training(model, config=config, module_filter_fn=lambda layer, name: not keep(name))


OPERATORS: Dict[str, Dict[str, Callable[..., Any]]] = {
    "attention": {"torch": torch_attention},
    "rms_norm": {"torch": torch_rms_norm},
    "cross_entropy": {"torch": torch_cross_entropy},
    "swiglu": {"torch": torch_swiglu},
    "rope": {"torch": TorchRope, "transformers": TransformersRope},
    "adamw": {
        "torch": torch_adamw,
        "deepspeed.cpu": deepspeed_cpu_adamw,
        "deepspeed.fused": deepspeed_fused_adamw,
    },
    "scaled_mm": {"torch": torch_scaled_mm},
    "linear": {
        "torch": torch_linear,
        "torchao.tensorwise": functools.partial(torchao_linear, recipe="tensorwise"),
        "torchao.rowwise": functools.partial(torchao_linear, recipe="rowwise"),
        "torchao.rowwise_with_gw_hp": functools.partial(torchao_linear, recipe="rowwise_with_gw_hp"),
    },
}


def operator(name: str, column: str) -> Callable[..., Any]:
    """The entry of the table, e.g. operator("adamw", "deepspeed.cpu"); KeyError if there is none."""
    return OPERATORS[name][column]


def float8_overflow(dtype: torch.dtype) -> float:
    """What torch casts values beyond the largest of a float8 format to (infinity included)."""
    if dtype is torch.float8_e5m2:
        return math.inf
    return torch.finfo(dtype).max if version_of_torch() >= (2, 12) else math.nan
