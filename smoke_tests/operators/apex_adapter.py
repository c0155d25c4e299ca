"""Operators of apex, and the optimizer that other packages adopted from it."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from smoke_tests.operators.torch_adapter import Parameters


def apex_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    from apex.normalization.fused_layer_norm import fused_rms_norm_affine

    normalized: torch.Tensor = fused_rms_norm_affine(x, weight, weight.shape, eps)
    return normalized


def apex_mixed_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """What apex's MixedFusedRMSNorm calls: the result has the weight's dtype."""
    from apex.normalization.fused_layer_norm import mixed_dtype_fused_rms_norm_affine

    normalized: torch.Tensor = mixed_dtype_fused_rms_norm_affine(x, weight, weight.shape, eps)
    return normalized


def fused_adamw(parameters: Parameters, module: str, **settings: Any) -> torch.optim.Optimizer:
    """The FusedAdam of apex, which Transformer Engine and DeepSpeed adopted with its arguments."""
    make = importlib.import_module(module).FusedAdam
    optimizer: torch.optim.Optimizer = make(list(parameters), adam_w_mode=True, **settings)
    return optimizer
