"""flash-attn's own limits."""

from __future__ import annotations

from typing import Any, Dict

import flash_attn
import pytest
import torch

from claims import needs, proves


@needs(sm=(8, 0))
@pytest.mark.parametrize("size", [24, 72, 256])
@proves("a head size without kernels in this build is refused in a sentence that names those with kernels", since="2.8")
def test_other_head_sizes_are_refused(size: int, device: str, measured: Dict[str, Any]) -> None:
    heads = torch.randn(1, 5, 2, size, device=device).to(torch.bfloat16)
    with pytest.raises(RuntimeError, match=rf"without kernels for head size {size} \(it has 64, 128\)") as refused:
        flash_attn.flash_attn_func(heads, heads, heads)
    measured["said"] = str(refused.value).splitlines()[0]


@needs(sm=(8, 0))
@pytest.mark.parametrize("size", [24, 72, 256])
@proves("a release before 2.8 refuses a head size without kernels in the same sentence", since="2.1", until="2.8")
def test_older_releases_refuse_them_too(size: int, device: str, measured: Dict[str, Any]) -> None:
    test_other_head_sizes_are_refused(size, device, measured)


@needs(sm=(8, 0))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@proves("a dtype that it has no kernels for is refused, not cast")
def test_other_dtypes_are_refused(dtype: torch.dtype, device: str, measured: Dict[str, Any]) -> None:
    heads = torch.randn(1, 5, 2, 64, device=device, dtype=dtype)
    with pytest.raises(RuntimeError, match=r"fp16 and bf16") as refused:
        flash_attn.flash_attn_func(heads, heads, heads)
    measured["said"] = str(refused.value).splitlines()[0]
