"""Operators of FlashAttention 3, which has kernels for Hopper only."""

from __future__ import annotations

from importlib import metadata

import torch

from smoke_tests import hardware
from smoke_tests.operators.flash_attn_adapter import flash_attention
from smoke_tests.operators.implements import implements
from smoke_tests.operators.table import HALF

FLASH_3_FORWARD, FLASH_3_BACKWARD = "FlashAttnFwdSm90", "FlashAttnBwdSm90"
# A machine without a GPU has the rows, too, and says what they need; where it is not installed, none is looked for.
INSTALLED = any(True for _ in metadata.distributions(name="flash-attn-3"))
HOPPER = HALF if not INSTALLED or all(gpu.sm == (9, 0) for gpu in hardware.probe().gpus) else ()


@implements("attention", "flash-attn-3", cuda=HOPPER, forward=FLASH_3_FORWARD, backward=FLASH_3_BACKWARD)
def flash_attention_3(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return flash_attention(query, key, value, module="flash_attn_interface")
