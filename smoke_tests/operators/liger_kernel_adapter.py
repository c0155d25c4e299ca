"""Operators of Liger Kernel."""

from __future__ import annotations

import torch

from smoke_tests.operators.torch_adapter import TorchRope


def liger_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    from liger_kernel.transformers.functional import liger_rms_norm as normalize

    normalized: torch.Tensor = normalize(x, weight, eps, in_place=False)
    return normalized


def liger_add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    from liger_kernel.transformers.functional import liger_fused_add_rms_norm

    return torch.cat(liger_fused_add_rms_norm(x, residual, weight, eps, in_place=False), dim=-1)


def liger_cross_entropy(logits: torch.Tensor, labels: torch.Tensor, ignore_index: int) -> torch.Tensor:
    from liger_kernel.transformers.functional import liger_cross_entropy as entropy

    loss: torch.Tensor = entropy(logits, labels, ignore_index=ignore_index)
    return loss


def liger_linear_cross_entropy(
    x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, ignore_index: int
) -> torch.Tensor:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    loss: torch.Tensor = liger_fused_linear_cross_entropy(x, weight, labels, ignore_index=ignore_index)
    return loss


def liger_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    from liger_kernel.transformers.functional import liger_swiglu as multiply

    product: torch.Tensor = multiply(gate, up)
    return product


class LigerRope(TorchRope):
    """Liger's kernel, which turns queries and keys at once and wants each cosine twice."""

    def rotate(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        from liger_kernel.transformers.functional import liger_rope

        turned: torch.Tensor = liger_rope(
            x, x.detach().clone(), *[torch.cat([t, t], -1)[None] for t in (cosine, sine)]
        )[0]
        return turned
