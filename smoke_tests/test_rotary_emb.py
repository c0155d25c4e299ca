"""rotary_emb, the CUDA kernel of flash-attn's rotary embedding, as models call it that bring their own layers."""

from __future__ import annotations

import pytest
import rotary_emb
import torch

from smoke_tests.claims import needs, proves


@needs(cuda=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["float32", "bf16", "float16"])
@proves(
    "rotating in place gives the bits of rotating out of place, and rotating back gives the input", seed=("B07", "B43")
)
def test_in_place_and_back(dtype: torch.dtype, device: str) -> None:
    heads = torch.randn(2, 37, 3, 24, device=device).to(dtype)
    angle = torch.arange(37, device=device)[:, None, None] * 0.3 ** torch.arange(12, device=device)
    cosine, sine = angle.cos().to(dtype), angle.sin().to(dtype)
    turned, rotated = torch.empty_like(heads), heads.clone()
    rotary_emb.apply_rotary(*heads.chunk(2, -1), cosine, sine, *turned.chunk(2, -1), False)
    rotary_emb.apply_rotary(*rotated.chunk(2, -1), cosine, sine, *rotated.chunk(2, -1), False)
    assert torch.equal(turned, rotated)
    assert not torch.equal(turned, heads)
    rotary_emb.apply_rotary(*rotated.chunk(2, -1), cosine, sine, *rotated.chunk(2, -1), True)
    # Rounded there and back, and a cosine and sine that are rounded are off the circle by as much: four roundings.
    torch.testing.assert_close(rotated, heads, rtol=0, atol=float(4 * torch.finfo(dtype).eps * heads.abs().max()))
