"""Operators of FlashAttention 3, which has kernels for Hopper only."""

from __future__ import annotations

import torch

from smoke_tests.operators.flash_attn_adapter import flash_attention
from smoke_tests.operators.implements import implements
from smoke_tests.operators.table import HALF

FLASH_3_FORWARD, FLASH_3_BACKWARD = "FlashAttnFwdSm90", "FlashAttnBwdSm90"


@implements("attention", "flash-attn-3", cuda=HALF, forward=FLASH_3_FORWARD, backward=FLASH_3_BACKWARD)
def flash_attention_3(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return flash_attention(query, key, value, module="flash_attn_interface")
