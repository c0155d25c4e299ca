"""flash-attn's own limits."""

from __future__ import annotations

from functools import partial
from typing import Any, Dict, List

import flash_attn
import pytest
import torch

from smoke_tests.claims import needs, proves
from smoke_tests.operators import bounds, references
from smoke_tests.operators.flash_attn_adapter import flash_attention
from smoke_tests.operators.samples import sample


def leaves_sizes_out(manifest: Dict[str, Any]) -> bool:
    """Whether this build was patched to leave out kernels of some head sizes."""
    patches = manifest["packages"]["flash-attn"]["patches"]
    return any("leave-out-disabled-head-sizes" in patch["file"] for patch in patches)


@needs(sm=(8, 0))
@pytest.mark.parametrize("size", [24, 72, 256])
@proves(
    "a head size without kernels in this build is refused in a sentence that names those with kernels; a build with "
    "kernels for every size computes it as float64 does",
    since="2.8",
)
def test_other_head_sizes_are_refused(
    size: int, device: str, measured: Dict[str, Any], manifest: Dict[str, Any]
) -> None:
    if not leaves_sizes_out(manifest):
        given = sample("attention", torch.bfloat16, size=size)
        computed = bounds.forward_and_backward(flash_attention, given.inputs, given.gradient, device)
        truth = bounds.in_float64(references.attention, given.inputs, given.gradient)
        bounds.assert_as_in_float64(computed, truth, torch.bfloat16, given.roundings, measured)
        return
    heads = torch.randn(1, 5, 2, size, device=device).to(torch.bfloat16)
    with pytest.raises(RuntimeError, match=rf"without kernels for head size {size} \(it has 64, 128\)") as refused:
        flash_attn.flash_attn_func(heads, heads, heads)
    measured["said"] = str(refused.value).splitlines()[0]


@needs(sm=(8, 0))
@pytest.mark.parametrize("size", [24, 72, 256])
@proves("a release before 2.8 refuses a head size without kernels in the same sentence", since="2.1", until="2.8")
def test_older_releases_refuse_them_too(
    size: int, device: str, measured: Dict[str, Any], manifest: Dict[str, Any]
) -> None:
    test_other_head_sizes_are_refused(size, device, measured, manifest)


def gradients(heads: List[torch.Tensor], gradient: torch.Tensor, deterministic: bool) -> List[torch.Tensor]:
    """The gradients of causal attention's query, key and value [b, l, h, d]."""
    leaves = [tensor.clone().requires_grad_() for tensor in heads]
    attended = flash_attn.flash_attn_func(*leaves, causal=True, deterministic=deterministic)
    return list(torch.autograd.grad(attended, leaves, gradient))


@needs(sm=(8, 0))
@pytest.mark.parametrize("size", [64, 128])
@proves(
    "asked to be deterministic, backward over 4,096 tokens gives the same bits in 30 runs, and different bits "
    "otherwise",
    since="2.4.1",
)
def test_deterministic_backward(size: int, device: str, measured: Dict[str, Any]) -> None:
    heads = [torch.randn(2, 4096, count, size, device=device).to(torch.bfloat16) for count in (6, 2, 2)]
    gradient = torch.randn(2, 4096, 6, size, device=device).to(torch.bfloat16)
    bounds.assert_repeats_only_if_asked(partial(gradients, heads, gradient), measured)


@needs(cuda=True)
@proves("its RMSNorm gives a row the same bits alone and in a batch, forward and backward", since="2.5")
def test_a_row_is_the_same_alone(device: str) -> None:
    bounds.assert_batch_invariant("rms_norm", "flash-attn", torch.bfloat16, device)


@needs(sm=(8, 0))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@proves("a dtype without kernels is refused, not cast")
def test_other_dtypes_are_refused(dtype: torch.dtype, device: str, measured: Dict[str, Any]) -> None:
    heads = torch.randn(1, 5, 2, 64, device=device, dtype=dtype)
    with pytest.raises(RuntimeError, match=r"fp16 and bf16") as refused:
        flash_attn.flash_attn_func(heads, heads, heads)
    measured["said"] = str(refused.value).splitlines()[0]
