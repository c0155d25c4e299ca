"""How far the last tokens of attention and its gradients may be off, where few roundings decide.

A relative bound fails there. To the gradient of the last key only the last row contributes, once per head, so that one
rounding moves all of its features together. And dP - D, by which each score's gradient is multiplied, is a difference:
where it nearly cancels, the roundings of dP and D remain, and the result that they are compared with does not.
"""

from __future__ import annotations

import math
from functools import partial
from typing import List, Sequence

import torch

from smoke_tests.operators import bounds

# The probability that a correct result is refused is e^-20 = 2e-9 for its error, and twice that for its slope.
EXPONENT = 20.0
# On a CPU torch sums a head's gradients in their dtype, 32 rows at a time if there are fewer than 192, 256 at a time if
# there are 768 or more (ATen/native/cpu/FlashAttentionKernel.cpp): five parts of 129 rows and of 1,025.
PARTS_ON_A_CPU = 5


def variances(
    inputs: Sequence[torch.Tensor], gradient: torch.Tensor, first: int, parts: int
) -> List[List[torch.Tensor]]:
    """The variances of the errors of output, dQ, dK and dV from token `first` on, as a multiple of one rounding's.

    inputs: query [b, h, l, d], key and value [b, k, l, d]; gradient [b, h, l, d]. For each result, groups of units: the
    errors of two units of a group are independent, and the variance of a unit is the sum over its features.

    To first order in the roundings, with P the probabilities, dP = dO V^T, D the row sums of P dP, dS = P (dP - D), and
    every rounding by itself. Rounded are P, dP, dS, the output, and the gradients of each head and of their group. D
    comes from the rounded output, or from the rounded P and dP; both are counted. parts: how often the sum of a head's
    gradient is rounded, each time as if it were whole.
    """
    query, key, value = (tensor.double() for tensor in inputs)
    gradient = gradient.double()
    kv_heads, group = key.shape[1], query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    scale = 1 / math.sqrt(query.shape[-1])
    future = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool).triu(1)
    p = torch.softmax((query @ key.transpose(-1, -2) * scale).masked_fill(future, -math.inf), dim=-1)
    output, dp = p @ value, gradient @ value.transpose(-1, -2)
    ds = p * (dp - (p * dp).sum(-1, keepdim=True))
    of_d = 2 * (p * dp).pow(2).sum(-1) + (gradient * output).pow(2).sum(-1)  # [b, h, l]
    of_ds = (p * dp).pow(2) + 2 * ds.pow(2)  # without D, which the scores of a row have in common

    def added(by_pair: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Of sums over independent pairs [b, h, l, l'] times rows [b, h, l', d], from `first` on."""
        return (by_pair @ rows.pow(2).sum(-1)[..., None])[:, :, first:, 0]

    rounded = partial(_of_gradients, kv_heads=kv_heads, first=first, parts=parts)
    of_dq = added(scale**2 * of_ds, key) + (scale**2 * of_d * (p @ key).pow(2).sum(-1))[:, :, first:]
    of_d_to_keys = scale**2 * of_d * query.pow(2).sum(-1) * p[..., first:].pow(2).sum(-1)  # from a row to all keys
    return [
        [added(p.pow(2), value), output[:, :, first:].pow(2)],
        [of_dq, parts * (ds @ key * scale)[:, :, first:].pow(2)],
        [added(scale**2 * of_ds.mT, query), of_d_to_keys, *rounded(ds.mT @ query * scale)],
        [added(p.pow(2).mT, gradient), *rounded(p.mT @ gradient)],
    ]


def _of_gradients(by_head: torch.Tensor, kv_heads: int, first: int, parts: int) -> List[torch.Tensor]:
    """The variances that rounding the gradient of each head [b, h, l, d], and of its group, adds to each number."""
    together = by_head.unflatten(1, (kv_heads, -1)).sum(2)
    return [parts * by_head[:, :, first:].pow(2), together[:, :, first:].pow(2)]


def assert_as_in_float64_beyond(
    first: int,
    computed: Sequence[torch.Tensor],
    truth: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    gradient: torch.Tensor,
    terms: int,
    parts: int = 1,
) -> None:
    """Assert that output and gradients from token `first` on are those of float64, up to the roundings of their dtype.

    Roundings are independent, without bias and at most half a spacing (the model of Higham and Mary 2019,
    doi 10.1137/18M1226312), so that their sum is sub-Gaussian with its own variance. The square of the norm of such
    errors with covariance S exceeds tr S + 2 sqrt(t tr S^2) + 2 t |S| with a probability of e^-t at most (Hsu, Kakade
    and Zhang 2012, arXiv 1110.2842). Of independent units tr S^2 is at most the sum of their squared variances, and |S|
    the largest variance; of a sum of groups the roots of the former, and the latter, add. float32 accumulates in
    float32: there each of the terms of a sum counts as one more rounding, as in `bounds.ceiling`.

    Emulated in bfloat16 for 129 tokens and 1,000 seeds, each with the roundings of a fused kernel and with those of
    separate operators, the error was at most 0.32 of this bound, and so was that of the slope. `bounds.ceiling`, which
    takes the roundings of all numbers for independent, was exceeded in 17 of these 2,000.
    """
    for result, true, groups in zip(computed, truth, variances(inputs, gradient, first, parts)):
        dtype, result, true = result.dtype, result[:, :, first:], true[:, :, first:]
        least, one = bounds.rounding_noise(bounds.MANTISSA[dtype])
        one *= math.sqrt(terms) if dtype is torch.float32 else 1.0
        total = sum(float(group.sum()) for group in groups)
        spread = sum(float(group.norm()) for group in groups)
        largest = sum(float(group.max()) for group in groups)
        size = float(true.norm())
        most = one * math.sqrt(total + 2 * math.sqrt(EXPONENT) * spread + 2 * EXPONENT * largest) / size
        error, slope = bounds.relative_error(result, true), bounds.slope(result, true)
        assert error <= most, f"relative error {error:.3g} is above {most:.3g}"
        least *= max(0.0, 1 - bounds.scatter(true.numel()))
        assert error >= least, f"relative error {error:.3g} is below {least:.3g}: not in this format"
        off = max(bounds.SLOPE, one * math.sqrt(2 * EXPONENT * largest) / size)
        assert abs(slope - 1) <= off, f"slope {slope:.5f} with noise {error:.3g}"
