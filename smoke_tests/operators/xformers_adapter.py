"""Operators of xformers."""

from __future__ import annotations

import importlib

import torch


def xformers_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, backend: str) -> torch.Tensor:
    """xformers' attention by this module of its fmha; with a gradient it takes grouped heads only as equal ones."""
    from xformers.ops import LowerTriangularMask, memory_efficient_attention

    module = importlib.import_module("xformers.ops.fmha." + backend)
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    heads = [tensor.transpose(1, 2) for tensor in (query, key, value)]
    attended: torch.Tensor = memory_efficient_attention(
        *heads, attn_bias=LowerTriangularMask(), op=(module.FwOp, module.BwOp)
    )
    return attended.transpose(1, 2)


def xformers_mlp(
    x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, *biases: torch.Tensor, kind: str
) -> torch.Tensor:
    """xformers' SwiGLU by this operator; the packed one wants gate and up side by side in memory."""
    from xformers.ops import swiglu, swiglu_op, unbind

    first, second, last = biases
    if kind == "packed":
        (gate, up), (first, second) = (unbind(torch.stack(pair), 0) for pair in ((gate, up), (first, second)))
    kinds = {
        "packed": swiglu_op.SwiGLUPackedFusedOp,
        "fused": swiglu_op.SwiGLUFusedOp,
        "decomposed": swiglu_op._SwiGLUDecomposedOp,
    }
    projected: torch.Tensor = swiglu(x, gate, first, up, second, down, last, op=kinds[kind])
    return projected
