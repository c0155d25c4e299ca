"""The PyTorch half of Transformer Engine: its kernels behind one call from Python."""

from __future__ import annotations

import torch
import transformer_engine.pytorch as te  # it loads the library that the module below needs
import transformer_engine_torch as tex

from smoke_tests.claims import needs, proves


@needs(sm=(8, 9))
@proves("its cast to e4m3 gives the codes that torch's cast gives, bit for bit")
def test_cast(device: str) -> None:
    values = torch.randn(160, 256, device=device).to(torch.bfloat16)
    scale = torch.full((1,), 16.0, device=device)
    quantizer = te.Float8Quantizer(scale=scale, amax=torch.zeros(1, device=device), fp8_dtype=tex.DType.kFloat8E4M3)
    codes = quantizer(values)._data
    expected = (values.float() * scale).to(torch.float8_e4m3fn)
    assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8))
