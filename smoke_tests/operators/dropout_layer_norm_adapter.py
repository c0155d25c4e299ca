"""Operators of dropout_layer_norm, through flash-attn's layers."""

from __future__ import annotations

import torch


def dropout_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    from flash_attn.ops.rms_norm import rms_norm

    normalized: torch.Tensor = rms_norm(x, weight, eps)
    return normalized


def dropout_add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    from flash_attn.ops.rms_norm import dropout_add_rms_norm as normalize

    return torch.cat(normalize(x, residual, weight, None, 0.0, eps, prenorm=True), dim=-1)
