"""xentropy_cuda_lib, the CUDA kernel of flash-attn's cross entropy, beyond what the table of fused operators asks."""

from __future__ import annotations

from typing import Any, Dict

import torch
import xentropy_cuda_lib

from smoke_tests.claims import needs, proves
from smoke_tests.operators import bounds

ROWS, VOCABULARY = 37, 83


@needs(cuda=True)
@proves("smoothed labels give the loss and the gradient of float64", seed=("B08", "B44"))
def test_smoothing(device: str, measured: Dict[str, Any]) -> None:
    logits, labels = torch.randn(ROWS, VOCABULARY) * 4, torch.randint(VOCABULARY, (ROWS,))
    losses, logsumexp = xentropy_cuda_lib.forward(logits.to(device), labels.to(device), 0.1)
    gradient = torch.randn(ROWS)
    result = xentropy_cuda_lib.backward(
        gradient.to(device), logits.to(device), logsumexp, labels.to(device), 0.1, False
    )
    leaf = logits.double().requires_grad_()
    truth = torch.nn.functional.cross_entropy(leaf, labels, label_smoothing=0.1, reduction="none")
    truth.backward(gradient.double())
    assert leaf.grad is not None
    pairs = ((losses.cpu(), truth.detach()), (result.cpu(), leaf.grad))
    most = bounds.ceiling(torch.float32, 3)
    measured["loss"], measured["gradient"] = (bounds.assert_rounded_like(*pair, 0.0, most) for pair in pairs)


@needs(cuda=True)
@proves("a gradient result in place of the logits has the bits of one in memory of its own", seed=("B08", "B44"))
def test_in_place(device: str) -> None:
    logits = (torch.randn(ROWS, VOCABULARY, device=device) * 4).to(torch.bfloat16)
    labels, gradient = torch.randint(VOCABULARY, (ROWS,), device=device), torch.randn(ROWS, device=device)
    _, logsumexp = xentropy_cuda_lib.forward(logits, labels, 0.0)
    apart = xentropy_cuda_lib.backward(gradient, logits.clone(), logsumexp, labels, 0.0, False)
    assert not torch.equal(apart, logits)
    xentropy_cuda_lib.backward(gradient, logits, logsumexp, labels, 0.0, True)
    assert torch.equal(apart, logits)
