"""Implementations that newer versions have in place of those in the table: with other kernels, or fewer limits."""

from __future__ import annotations

import torch

from smoke_tests.operators.implements import implements
from smoke_tests.operators.table import FLASH_BACKWARD, FLASH_FORWARD, HALF, MIXED
from smoke_tests.operators.transformer_engine_adapter import te_cross_entropy
from smoke_tests.operators.xformers_adapter import xformers_attention


@implements(
    "cross_entropy",
    "transformer-engine",
    newer="2.20",
    cuda=MIXED,
    forward="cross_entropy_forward_kernel",
    backward="cross_entropy_backward_kernel",  # before, the gradient was computed forward
)
def te_cross_entropy_both_ways(logits: torch.Tensor, labels: torch.Tensor, ignore_index: int) -> torch.Tensor:
    return te_cross_entropy(logits, labels, ignore_index)


@implements(
    "attention", "xformers.flash", newer="0.0.33", cuda=HALF, forward=FLASH_FORWARD, backward=FLASH_BACKWARD
)  # of any head size that is a multiple of 8, by the kernels of the package flash-attn
def xformers_attention_by_flash_attn(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return xformers_attention(query, key, value, backend="flash")
