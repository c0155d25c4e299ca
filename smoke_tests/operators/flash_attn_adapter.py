"""Operators of flash-attn and of FlashAttention 4."""

from __future__ import annotations

import importlib
import inspect

import torch

from smoke_tests.operators.torch_adapter import TorchRope


def flash_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, module: str = "flash_attn"
) -> torch.Tensor:
    attend = importlib.import_module(module).flash_attn_func
    # By default, its backward adds up blocks in the order in which they finish.
    exact = {"deterministic": True} if torch.are_deterministic_algorithms_enabled() else {}
    attended = attend(*[tensor.transpose(1, 2) for tensor in (query, key, value)], causal=True, **exact)
    result: torch.Tensor = attended[0] if isinstance(attended, tuple) else attended  # FlashAttention 4's logsumexp
    return result.transpose(1, 2)


def flash_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    from flash_attn.ops.triton.layer_norm import rms_norm_fn

    normalized: torch.Tensor = rms_norm_fn(x, weight, None, eps=eps)
    return normalized


def flash_add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    from flash_attn.ops.triton.layer_norm import rms_norm_fn

    return torch.cat(rms_norm_fn(x, weight, None, residual=residual, eps=eps, prenorm=True), dim=-1)


def flash_cross_entropy(logits: torch.Tensor, labels: torch.Tensor, ignore_index: int) -> torch.Tensor:
    from flash_attn.ops.triton.cross_entropy import cross_entropy_loss

    new = "ignore_index" in inspect.signature(cross_entropy_loss).parameters
    name = "ignore_index" if new else "ignored_index"  # 2.3.3
    computed = cross_entropy_loss(logits, labels, **{name: ignore_index})
    losses: torch.Tensor = computed[0] if isinstance(computed, tuple) else computed  # 2.3.3 returns them alone
    return losses.sum() / (labels != ignore_index).sum()


def flash_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    from flash_attn.ops.activations import swiglu

    product: torch.Tensor = swiglu(gate, up)
    return product


class FlashRope(TorchRope):
    """The Triton kernel of flash-attn's layers."""

    def rotate(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        from flash_attn.layers.rotary import apply_rotary_emb

        turned: torch.Tensor = apply_rotary_emb(x.transpose(1, 2), cosine, sine)
        return turned.transpose(1, 2)
