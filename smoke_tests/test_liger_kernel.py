"""Liger's linear cross entropy never holds all logits, its purpose; and each row of its norm is on its own."""

from __future__ import annotations

from typing import Any, Dict

import liger_kernel  # noqa: F401  (a Liger that cannot be imported refutes these claims)
import torch

from smoke_tests.claims import needs, proves
from smoke_tests.operators import bounds
from smoke_tests.operators.table import operator

ROWS, FEATURES, VOCABULARY = 4096, 256, 32768


@needs(cuda=True)
@proves("Liger's RMSNorm gives a row the same bits alone and in a batch, forward and backward")
def test_a_row_is_the_same_alone(device: str) -> None:
    bounds.assert_batch_invariant("rms_norm", "liger-kernel", torch.bfloat16, device)


@needs(cuda=True)
@proves("the linear cross entropy takes less than a quarter of the memory that all logits need, forward and backward")
def test_logits_are_never_whole(device: str, measured: Dict[str, Any]) -> None:
    x, weight = (
        torch.nn.Parameter(torch.randn(count, FEATURES, device=device).to(torch.bfloat16) / 16)
        for count in (ROWS, VOCABULARY)
    )
    labels = torch.randint(VOCABULARY, (ROWS,), device=device)
    logits = ROWS * VOCABULARY * 2  # bytes, in bfloat16
    for column in ("liger-kernel", "torch"):
        x.grad = weight.grad = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        operator("linear_cross_entropy", column)(x, weight, labels, -100).backward()
        measured[column] = (torch.cuda.max_memory_allocated() - before) / logits
    assert measured["liger-kernel"] < 0.25
    assert measured["torch"] > 1, "the contrast holds them as well: this measures nothing"
