"""Documents packed into windows, each attending to itself alone, as Llama 3 is trained (arXiv 2407.21783, section 3.2).

A separator belongs to the document that it ends, and the token behind it begins the next. Rotary positions are those of
the window: a score depends on the distance of two tokens alone, so that positions of each document would change nothing
but roundings.

Shapes: b windows, l length, h heads, k key/value heads, d head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def documents_of(tokens: torch.Tensor, separator: int) -> torch.Tensor:
    """The number of each token's document in its window, counted from 0: tokens [b, l] -> [b, l]."""
    ends = (tokens == separator).long()
    return ends.cumsum(1) - ends


def mask_of(documents: torch.Tensor) -> torch.Tensor:
    """Whether a token attends to another, itself or an earlier one of its document: [b, l] -> [b, 1, l, l]."""
    return (documents.unsqueeze(-1) == documents.unsqueeze(-2)).tril()[:, None]


def starts_of(documents: torch.Tensor) -> torch.Tensor:
    """Where documents begin in the windows laid end to end, and where the last ends: [b, l] -> int32 [documents + 1].

    A window begins with a document of its own. Waits for the device.
    """
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return F.pad(begins.flatten().nonzero().flatten(), (0, 1), value=documents.numel()).int()


def torch_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """torch's attention under a mask of mask_of(): query [b, h, l, d], key and value [b, k, l, d] -> [b, h, l, d]."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


def flash_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """flash-attn's attention within the documents of starts_of(); shapes as above."""
    from flash_attn import flash_attn_varlen_func

    windows, _, length, _ = query.shape
    exact = {"deterministic": True} if torch.are_deterministic_algorithms_enabled() else {}
    packed = [each.transpose(1, 2).flatten(0, 1) for each in (query, key, value)]
    attended: torch.Tensor = flash_attn_varlen_func(*packed, starts, starts, length, length, causal=True, **exact)
    return attended.unflatten(0, (windows, length)).transpose(1, 2)
