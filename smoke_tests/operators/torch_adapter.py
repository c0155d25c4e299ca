"""PyTorch's own operators, alone and behind torch.compile, and the casts that differ between its versions."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, Callable, ContextManager, Iterable, List, Tuple

import torch
import torch.nn.functional as F

Parameters = Iterable[torch.nn.Parameter]


def version_of_torch() -> Tuple[int, int]:
    """(2, 13) for 2.13.0+cpu."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function behind torch.compile, compiled once for all shapes when it is first called."""
    make = lru_cache(maxsize=None)(lambda: torch.compile(function, dynamic=True))
    return lambda *arguments, **named: make()(*arguments, **named)


def torch_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if version_of_torch() >= (2, 5):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return attention_of_equal_heads(query, key, value)


def attention_of_equal_heads(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def only(backend: str) -> ContextManager[Any]:
    """The context in which torch's attention uses this backend alone."""
    context: ContextManager[Any]
    if version_of_torch() >= (2, 3):
        from torch.nn.attention import SDPBackend, sdpa_kernel

        context = sdpa_kernel(SDPBackend.__members__[backend])
        return context
    flash = backend == "FLASH_ATTENTION"
    context = torch.backends.cuda.sdp_kernel(enable_flash=flash, enable_math=False, enable_mem_efficient=not flash)
    return context


def sdpa(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, backend: str) -> torch.Tensor:
    """torch's attention by this backend alone; the memory-efficient backend does not support grouped heads."""
    with only(backend):
        attend = attention_of_equal_heads if backend == "EFFICIENT_ATTENTION" else torch_attention
        return attend(query, key, value)


def torch_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def torch_add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    total = x + residual
    return torch.cat([torch_rms_norm(total, weight, eps), total], dim=-1)


def torch_cross_entropy(logits: torch.Tensor, labels: torch.Tensor, ignore_index: int) -> torch.Tensor:
    return F.cross_entropy(logits, labels, ignore_index=ignore_index)


def torch_linear_cross_entropy(
    x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, ignore_index: int
) -> torch.Tensor:
    return F.cross_entropy(x @ weight.t(), labels, ignore_index=ignore_index)


def torch_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


def torch_mlp(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, *biases: torch.Tensor) -> Any:
    return F.linear(F.silu(F.linear(x, gate, biases[0])) * F.linear(x, up, biases[1]), down, biases[2])


def rotate_halves(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """x [b, h, l, d], cosine and sine [l, d / 2] -> [b, h, l, d]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


class TorchRope:
    """Rotary embedding with a table of cosines and sines that grows with the longest position asked for."""

    angles = torch.float64  # the dtype of the angles

    def __init__(self, head_size: int, base: float) -> None:
        self.frequency = base ** (-torch.arange(0, head_size, 2, dtype=torch.float64) / head_size)
        self.cosine = self.sine = torch.empty(0, head_size // 2, dtype=torch.float64)

    def __call__(self, x: torch.Tensor, start: int) -> torch.Tensor:
        stop = start + x.shape[-2]
        if stop > len(self.cosine):
            angle = torch.arange(stop, dtype=torch.float64)[:, None] * self.frequency
            # On the device, because a CUDA graph cannot hold a copy from the host.
            self.cosine, self.sine = angle.cos().to(x.device), angle.sin().to(x.device)
        return self.rotate(x, self.cosine[start:stop].to(x), self.sine[start:stop].to(x))

    def rotate(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        return rotate_halves(x, cosine, sine)


rotate_halves_compiled = compiled(rotate_halves)


class CompiledRope(TorchRope):
    """The same behind torch.compile."""

    def rotate(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        turned: torch.Tensor = rotate_halves_compiled(x, cosine, sine)
        return turned


def torch_adamw(parameters: Parameters, **settings: Any) -> torch.optim.Optimizer:
    """torch's AdamW of parameters, or of groups of them: fused, except on a CPU before torch 2.4, which lacks it."""
    given: List[Any] = list(parameters)
    first = given[0]["params"][0] if isinstance(given[0], dict) else given[0]
    return torch.optim.AdamW(given, fused=first.is_cuda or version_of_torch() >= (2, 4), **settings)


def torch_scaled_mm(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, dtype: torch.dtype, **more: Any
) -> torch.Tensor:
    product = torch._scaled_mm(a, b.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=dtype, **more)
    # Until 2.5 it returned the product's largest magnitude as well.
    return product[0] if isinstance(product, tuple) else product


def torch_linear(model: torch.nn.Module, keep: Callable[[str], bool]) -> torch.nn.Module:
    return model


def float8_overflow(dtype: torch.dtype) -> float:
    """What torch casts values beyond the largest of a float8 format to (infinity included)."""
    if dtype is torch.float8_e5m2:
        return math.inf
    return torch.finfo(dtype).max if version_of_torch() >= (2, 12) else math.nan
