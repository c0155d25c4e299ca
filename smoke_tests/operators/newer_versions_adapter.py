"""Implementations that newer versions have in place of those in the table: with other kernels, or fewer limits."""

from __future__ import annotations

import os
from functools import partial
from importlib import metadata
from unittest import mock

import torch

from smoke_tests.operators.flash_attn_3_adapter import FLASH_3_BACKWARD, FLASH_3_FORWARD, HOPPER
from smoke_tests.operators.implements import implements
from smoke_tests.operators.table import FLASH_BACKWARD, FLASH_FORWARD, HALF, MIXED
from smoke_tests.operators.torch_adapter import sdpa
from smoke_tests.operators.transformer_engine_adapter import te_attention, te_cross_entropy
from smoke_tests.operators.xformers_adapter import xformers_attention

CUDNN_FORWARD, CUDNN_BACKWARD = "cudnn.*sdpa.*fprop", "cudnn.*sdpa.*bprop"


@implements(
    "cross_entropy",
    "transformer-engine",
    newer="2.20",
    cuda=MIXED,
    forward="cross_entropy_forward_kernel",
    backward="cross_entropy_backward_kernel",  # older versions compute the gradient forward
)
def te_cross_entropy_both_ways(logits: torch.Tensor, labels: torch.Tensor, ignore_index: int) -> torch.Tensor:
    return te_cross_entropy(logits, labels, ignore_index)


@implements(
    "attention", "xformers.flash", newer="0.0.33", cuda=HALF, forward=FLASH_FORWARD, backward=FLASH_BACKWARD
)  # with the kernels of the package flash-attn, any head size that is a multiple of 8
def xformers_attention_by_flash_attn(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return xformers_attention(query, key, value, backend="flash")


@implements(
    "attention",
    "torch.cudnn",
    newer="2.15",
    cuda=HALF,
    forward=CUDNN_FORWARD,
    backward=CUDNN_BACKWARD,
    limits=("one row",),
)  # it accepts no rows and returns none; 2.11 refuses, and no version between was tried
def torch_cudnn_attention_without_rows(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return sdpa(query, key, value, backend="CUDNN_ATTENTION")


@implements(
    "attention",
    "transformer-engine",
    newer="2.20",
    cuda=HALF,
    forward=CUDNN_FORWARD,
    backward=CUDNN_BACKWARD,
    limits=("no rows",),
)  # for one token it takes FlashAttention, where that is installed; 2.18 with cuDNN 9.19 refuses
def te_attention_to_one_token(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return te_attention(query, key, value)


def te_attention_by_flash_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, major: int
) -> torch.Tensor:
    """Transformer Engine's attention by the FlashAttention of this major version, whichever it would choose itself."""
    from transformer_engine.pytorch.attention.dot_product_attention import _attention_backends

    chosen = {f"NVTE_FLASH_ATTN_V{other}": str(int(other == major)) for other in (2, 3, 4)}
    with mock.patch.dict(os.environ, NVTE_FUSED_ATTN="0", **chosen):
        _attention_backends["backend_selection_requires_update"] = True  # it reads the environment only then
        try:
            return te_attention(query, key, value)
        finally:
            _attention_backends["backend_selection_requires_update"] = True


FLASH_ATTENTION = {
    3: (HOPPER, FLASH_3_FORWARD, FLASH_3_BACKWARD),
    4: (HALF, "FlashAttentionForward", "FlashAttentionBackward"),
}
for major, (dtypes, forward, backward) in FLASH_ATTENTION.items():
    if any(True for _ in metadata.distributions(name=f"flash-attn-{major}")):  # else it would take another kernel
        implements(
            "attention",
            f"transformer-engine.flash-{major}",
            newer="2.20",
            cuda=dtypes,
            forward=forward,
            backward=backward,
            limits=("no rows",),
        )(partial(te_attention_by_flash_attention, major=major))
