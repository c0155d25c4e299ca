"""msamp_arithmetic, MS-AMP's kernel that adds to a tensor kept in FP8."""

from __future__ import annotations

from typing import Any, Dict

import pytest
import torch
from msamp.common.dtype import Dtypes
from msamp.operators.arithmetic import Arithmetic

from smoke_tests.claims import needs, proves
from smoke_tests.operators.bounds import E4M3, assert_rounded_like, rounding_noise


@needs(sm=(8, 9))
@pytest.mark.parametrize("size", [1.0, 2.0**6], ids=["as large", "64 times larger"])
@proves("what is added in place to a tensor in FP8 leaves the noise of the two casts, also where it is far larger")
def test_add_in_place(size: float, device: str, measured: Dict[str, Any]) -> None:
    first, second = torch.randn(96, 80), torch.randn(96, 80) * size
    total = first.to(device).cast(Dtypes.kfloat8_e4m3)
    Arithmetic.add_to_fp8(total.value, total.meta, second.to(device))
    least, most = rounding_noise(E4M3)[0], rounding_noise(E4M3, E4M3)[1]
    measured["error"] = assert_rounded_like(total.float().cpu(), (first + second).double(), least, most)
