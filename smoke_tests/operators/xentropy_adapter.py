"""The cross entropy of xentropy_cuda_lib."""

from __future__ import annotations

from typing import Any, Tuple

import torch


class Xentropy(torch.autograd.Function):  # type: ignore[misc]
    """The loss of each row by xentropy_cuda_lib alone; flash-attn's own layer is Triton's from 2.4 on."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, ignore_index: int) -> torch.Tensor:
        import xentropy_cuda_lib

        losses, logsumexp = xentropy_cuda_lib.forward(logits, labels, 0.0)
        ctx.save_for_backward(logits, logsumexp, labels)
        ctx.ignore_index = ignore_index
        counted: torch.Tensor = losses.masked_fill(labels == ignore_index, 0)
        return counted

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Tuple[torch.Tensor, None, None]:
        import xentropy_cuda_lib

        logits, logsumexp, labels = ctx.saved_tensors
        counted = gradients[0].masked_fill(labels == ctx.ignore_index, 0)
        return xentropy_cuda_lib.backward(counted, logits, logsumexp, labels, 0.0, False), None, None


def xentropy_cross_entropy(logits: torch.Tensor, labels: torch.Tensor, ignore_index: int) -> torch.Tensor:
    losses: torch.Tensor = Xentropy.apply(logits, labels, ignore_index)
    return losses.sum() / (labels != ignore_index).sum()
