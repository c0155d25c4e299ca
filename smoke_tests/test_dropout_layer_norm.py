"""dropout_layer_norm, flash-attn's fused dropout, sum and norm: its dropout, and the row lengths it refuses."""

from __future__ import annotations

from typing import Any, Dict

import dropout_layer_norm  # noqa: F401  (without it flash-attn's wrappers do not import)
import pytest
import torch

from smoke_tests.claims import needs, proves
from smoke_tests.operators import bounds, references
from smoke_tests.operators.table import operator

ROWS, FEATURES, DROPPED = 64, 1024, 0.25


@needs(cuda=True)
@proves(
    "dropout drops the requested share and scales up the rest, and the norm is that of the result",
    seed=("B09", "B45"),
)
def test_dropout(device: str, measured: Dict[str, Any]) -> None:
    from flash_attn.ops.rms_norm import dropout_add_rms_norm

    x, residual = torch.randn(ROWS, FEATURES, device=device), torch.randn(ROWS, FEATURES, device=device)
    weight = torch.randn(FEATURES, device=device)
    normal, total, mask = dropout_add_rms_norm(
        x, residual, weight, None, DROPPED, 1e-5, prenorm=True, return_dropout_mask=True
    )
    measured["dropped"] = 1 - float(mask.float().mean())
    # The standard deviation of this share over 65536 draws is 0.0017.
    assert measured["dropped"] == pytest.approx(DROPPED, abs=0.01)
    truth = (x * mask / (1 - DROPPED) + residual).double().cpu()
    most = bounds.ceiling(torch.float32, 4)
    bounds.assert_rounded_like(total.cpu(), truth, 0.0, most)
    bounds.assert_rounded_like(normal.cpu(), references.rms_norm(truth, weight.double().cpu(), 1e-5), 0.0, most)


@needs(cuda=True)
@pytest.mark.parametrize("features", [73, 8200])
@proves("rows of a length without a kernel are refused, not computed in another way", seed="B45")
def test_other_lengths_are_refused(features: int, device: str, measured: Dict[str, Any]) -> None:
    x, weight = torch.randn(3, features, device=device), torch.ones(features, device=device)
    with pytest.raises(RuntimeError, match="hidden_size") as refused:
        operator("rms_norm", "dropout-layer-norm")(x, weight, 1e-5)
    measured["said"] = str(refused.value).splitlines()[0]
