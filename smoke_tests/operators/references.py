"""The truth: what each operator computes, in plain torch. Given float64 tensors it computes in float64.

Shapes: b batch, h heads, k key/value heads, l length, d head size, n rows, f features, v vocabulary.
"""

from __future__ import annotations

import math
from typing import Sequence, Tuple

import torch


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal softmax(q k^T / sqrt(d)) v, each key/value head serving h/k query heads in turn.

    query [b, h, l, d], key and value [b, k, l, d] -> [b, h, l, d]. Vaswani et al. 2017 (1706.03762), eq. 1;
    grouped heads as in Ainslie et al. 2023 (2305.13245).
    """
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return torch.softmax(scores.masked_fill(future, -math.inf), dim=-1) @ value


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension; eps is under the root.

    x [n, f], weight [f] -> [n, f]. Zhang and Sennrich 2019 (1910.07467), eq. 4.
    """
    return x / torch.sqrt(x.pow(2).mean(dim=-1, keepdim=True) + eps) * weight


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """Mean over the rows that count of log(sum(exp(logits))) - logits[label].

    logits [n, v], labels [n] (ignore_index: the row does not count) -> scalar.
    """
    counted = labels != ignore_index
    logits, labels = logits[counted], labels[counted]
    return (torch.logsumexp(logits, dim=-1) - logits.gather(1, labels[:, None])[:, 0]).mean()


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The RMS norm of x + residual, and beside it that sum itself.

    x and residual [n, f], weight [f] -> [n, 2f].
    """
    return torch.cat([rms_norm(x + residual, weight, eps), x + residual], dim=-1)


def linear_cross_entropy(
    x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, ignore_index: int
) -> torch.Tensor:
    """The cross entropy of the logits x weight^T. x [n, f], weight [v, f], labels [n] -> scalar."""
    return cross_entropy(x @ weight.t(), labels, ignore_index)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gate / (1 + exp(-gate)) * up, any equal shapes. Shazeer 2020 (2002.05202), eq. 5 with beta = 1."""
    return gate / (1 + torch.exp(-gate)) * up


def mlp(
    x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, *biases: torch.Tensor
) -> torch.Tensor:
    """down swiglu(gate x, up x), each projection with its bias: Shazeer 2020 (2002.05202), eq. 6, with biases.

    x [n, f], gate and up [h, f], down [f, h], biases [h], [h] and [f] -> [n, f].
    """
    return swiglu(x @ gate.t() + biases[0], x @ up.t() + biases[1]) @ down.t() + biases[2]


def rope(x: torch.Tensor, start: int, base: float) -> torch.Tensor:
    """Rotate the complex numbers x[i] + x[i + d/2] j at position p by the angle p * base^(-2i/d), in closed form.

    x [b, h, l, d] at positions start .. start + l - 1 -> the same shape. Su et al. 2021 (2104.09864), section 3.4.2,
    with the two halves of a head paired, as Llama checkpoints have it.
    """
    half = x.shape[-1] // 2
    frequency = base ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(start, start + x.shape[-2], dtype=torch.float64)[:, None] * frequency
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.exp(1j * angle)
    return torch.cat([turned.real, turned.imag], dim=-1)


def adamw(
    parameter: torch.Tensor,
    gradients: Sequence[torch.Tensor],
    lr: float,
    betas: Tuple[float, float],
    eps: float,
    weight_decay: float,
) -> torch.Tensor:
    """The parameter after one step per gradient, weight decay decoupled from the gradient.

    Any equal shapes. Loshchilov and Hutter 2019 (1711.05101), algorithm 2, the schedule multiplier being lr.
    """
    first, second = torch.zeros_like(parameter), torch.zeros_like(parameter)
    for step, gradient in enumerate(gradients, start=1):
        first = betas[0] * first + (1 - betas[0]) * gradient
        second = betas[1] * second + (1 - betas[1]) * gradient.pow(2)
        update = (first / (1 - betas[0] ** step)) / (torch.sqrt(second / (1 - betas[1] ** step)) + eps)
        parameter = parameter * (1 - lr * weight_decay) - lr * update
    return parameter
