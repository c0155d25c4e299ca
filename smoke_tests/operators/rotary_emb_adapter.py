"""The rotary embedding of rotary_emb."""

from __future__ import annotations

from typing import Any, Tuple

import torch

from smoke_tests.operators.torch_adapter import TorchRope


class RotaryEmb(torch.autograd.Function):  # type: ignore[misc]
    """Queries or keys turned by rotary_emb alone; flash-attn's own layer is Triton's from 2.1.2 on."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cosine, sine)
        return RotaryEmb.turn(x, cosine, sine, back=False)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Tuple[torch.Tensor, None, None]:
        cosine, sine = ctx.saved_tensors
        return RotaryEmb.turn(gradients[0], cosine, sine, back=True), None, None

    @staticmethod
    def turn(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, back: bool) -> torch.Tensor:
        import rotary_emb

        turned = torch.empty_like(x)
        rotary_emb.apply_rotary(*x.chunk(2, dim=-1), cosine, sine, *turned.chunk(2, dim=-1), back)
        return turned


class RotaryEmbRope(TorchRope):
    """The CUDA kernel that flash-attn's layers had before Triton's."""

    def rotate(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        turned: torch.Tensor = RotaryEmb.apply(x, cosine, sine)
        return turned
