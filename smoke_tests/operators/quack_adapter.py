"""Operators of QuACK, which compiles a kernel for each length of a row when it is first called."""

from __future__ import annotations

import torch

from smoke_tests.operators.implements import implements
from smoke_tests.operators.table import HALF


@implements(
    "rms_norm",
    "quack-kernels",
    cuda=HALF,
    forward="quackrmsnormRMSNorm_object",
    backward="quackrmsnormRMSNormBackward_object",
    size=1000,  # a multiple of 8, which each of its loads takes; no power of two
)
def quack_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    from quack import rmsnorm

    normalized: torch.Tensor = rmsnorm(x, weight, eps=eps)
    return normalized


@implements(
    "add_rms_norm",
    "quack-kernels",
    cuda=HALF,
    forward="quackrmsnormRMSNorm_object",
    backward="quackrmsnormRMSNormBackward_object",
    size=1000,
)
def quack_add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    from quack import rmsnorm

    return torch.cat(rmsnorm(x, weight, residual=residual, eps=eps, prenorm=True), dim=-1)


@implements(
    "cross_entropy",
    "quack-kernels",
    cuda=HALF,
    forward="quackcross_entropyCrossEntropy_object",
    backward="quackcross_entropyCrossEntropyBackward_object",
)
def quack_cross_entropy(logits: torch.Tensor, labels: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """QuACK's cross entropy; classes of probability zero fill a row up to a multiple of 8, which its loads take."""
    from quack import cross_entropy

    missing = -logits.shape[-1] % 8
    filled = torch.nn.functional.pad(logits, (0, missing), value=float("-inf")) if missing else logits
    loss: torch.Tensor = cross_entropy(filled, labels, ignore_index=ignore_index)
    return loss
