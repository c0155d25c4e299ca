"""What FlashAttention 3 does beside the causal attention of the table, and what this build of it leaves out."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Callable, Dict, List

import flash_attn_interface
import pytest
import torch

from smoke_tests import hardware
from smoke_tests.claims import needs, proves
from smoke_tests.operators import bounds, references
from smoke_tests.operators.kernels import gpu_kernels_run
from smoke_tests.operators.samples import Sample, sample
from smoke_tests.operators.table import operator

hopper = needs(sm=(9, 0))
pytestmark = pytest.mark.skipif(
    any(gpu.sm > (9, 0) for gpu in hardware.probe().gpus), reason="needs compute capability 9.0, no newer one"
)


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
    """Its causal attention of heads [b, h, l, d]."""
    heads = [tensor.transpose(1, 2) for tensor in (query, key, value)]
    attended: torch.Tensor = flash_attn_interface.flash_attn_func(*heads, causal=True, **options)
    return attended.transpose(1, 2)


def assert_like_reference(
    call: Callable[..., torch.Tensor],
    reference: Callable[..., torch.Tensor],
    given: Sample,
    device: str,
    measured: Dict[str, Any],
) -> None:
    """Assert that the output and the gradients of a call are those of its reference in float64."""
    computed = bounds.forward_and_backward(call, given.inputs, given.gradient, device)
    truth = bounds.in_float64(reference, given.inputs, given.gradient)
    bounds.assert_as_in_float64(computed, truth, torch.bfloat16, given.roundings, measured)


@hopper
@pytest.mark.parametrize("size", [24, 72, 96, 192, 256])
@proves("heads of 24 to 256, in multiples of 8, are computed as in float64, forward and backward")
def test_every_head_size(size: int, device: str, measured: Dict[str, Any]) -> None:
    given = sample("attention", torch.bfloat16, size=size)
    assert_like_reference(operator("attention", "flash-attn-3"), references.attention, given, device, measured)


@hopper
@pytest.mark.parametrize(("size", "values"), [(192, 128), (64, 256)])
@proves("values of another head size than their keys are computed as in float64, forward and backward")
def test_values_of_another_size(size: int, values: int, device: str, measured: Dict[str, Any]) -> None:
    given = sample("attention", torch.bfloat16, size=size)
    query, key, _ = given.inputs
    inputs = [query, key, torch.randn(*key.shape[:-1], values).bfloat16()]
    given = given._replace(inputs=inputs, gradient=torch.randn(*query.shape[:-1], values).bfloat16())
    assert_like_reference(attend, references.attention, given, device, measured)


@hopper
@proves("causal attention to the last 65 tokens equals float64 forward and backward, over more than one tile")
def test_window(device: str, measured: Dict[str, Any]) -> None:
    given = sample("attention", torch.bfloat16, count=301, size=64)

    def windowed(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        group, length = query.shape[1] // key.shape[1], query.shape[2]
        key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
        seen = torch.ones(length, length, dtype=torch.bool).tril().triu(-64)
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
        return torch.softmax(scores.masked_fill(~seen, -math.inf), dim=-1) @ value

    assert_like_reference(partial(attend, window_size=(64, 0)), windowed, given, device, measured)


@hopper
@proves("each of several texts packed in one row attends only to itself, forward and backward, as in float64")
def test_packed_texts(device: str, measured: Dict[str, Any]) -> None:
    lengths = [5, 137, 1, 64]
    ends = torch.tensor([0, *lengths]).cumsum(0).int().to(device)
    inputs = [torch.randn(sum(lengths), heads, 64).bfloat16() for heads in (6, 2, 2)]
    gradient = torch.randn(sum(lengths), 6, 64).bfloat16()

    def packed(*heads: torch.Tensor) -> torch.Tensor:
        longest = (max(lengths), max(lengths))
        attended: torch.Tensor = flash_attn_interface.flash_attn_varlen_func(*heads, ends, ends, *longest, causal=True)
        return attended

    def apart(*heads: torch.Tensor) -> torch.Tensor:
        texts = zip(*[tensor.transpose(0, 1)[None].split(lengths, dim=2) for tensor in heads])
        return torch.cat([references.attention(*text) for text in texts], dim=2)[0].transpose(0, 1)

    given = sample("attention", torch.bfloat16)._replace(inputs=inputs, gradient=gradient)
    assert_like_reference(packed, apart, given, device, measured)


@hopper
@pytest.mark.parametrize("size", [64, 128])
@proves(
    "attention of FP8 heads, with a scale for each text and key head, runs an FP8 kernel and differs from float64 on "
    "the same numbers as rounding the probabilities to FP8 does"
)
def test_float8(size: int, device: str, measured: Dict[str, Any]) -> None:
    query, key, value = (torch.randn(2, heads, 517, size) for heads in (6, 2, 2))
    scales = [tensor.unflatten(1, (2, -1)).abs().amax(dim=(2, 3, 4)) / 448 for tensor in (query, key, value)]
    spread = [
        scale.repeat_interleave(tensor.shape[1] // 2, dim=1)[:, :, None, None]
        for scale, tensor in zip(scales, (query, key, value))
    ]
    codes = [(tensor / scale).to(torch.float8_e4m3fn) for tensor, scale in zip((query, key, value), spread)]
    names = ("q_descale", "k_descale", "v_descale")
    given = {name: scale.to(device) for name, scale in zip(names, scales)}
    on_device = [code.to(device) for code in codes]
    outputs: List[torch.Tensor] = []
    ran = gpu_kernels_run(lambda: outputs.append(attend(*on_device, **given)))
    (measured["kernel"],) = (name[:120] for name in ran if "FlashAttnFwdSm90" in name)
    assert any("float_e4m3_t" in name for name in ran), f"no FP8 kernel ran: {sorted(ran)}"
    truth = references.attention(*[code.double() * scale.double() for code, scale in zip(codes, spread)])
    assert outputs[0].dtype == torch.bfloat16
    floor, ceiling = bounds.rounding_noise(bounds.E4M3, bounds.MANTISSA[torch.bfloat16])
    # The largest probability of each row, which is rounded as 1, has no error.
    measured["error"] = bounds.assert_rounded_like(outputs[0].cpu(), truth, floor / 2, ceiling)


def gradients(heads: List[torch.Tensor], gradient: torch.Tensor, deterministic: bool) -> List[torch.Tensor]:
    """The gradients of causal attention's query, key and value [b, h, l, d]."""
    leaves = [tensor.clone().requires_grad_() for tensor in heads]
    return list(torch.autograd.grad(attend(*leaves, deterministic=deterministic), leaves, gradient))


@hopper
@pytest.mark.parametrize("size", [64, 128])
@proves(
    "its backward over 4,096 tokens gives the same bits in 30 runs if asked to be deterministic, else different bits"
)
def test_deterministic_backward(size: int, device: str, measured: Dict[str, Any]) -> None:
    heads = [torch.randn(2, count, 4096, size, device=device).bfloat16() for count in (6, 2, 2)]
    gradient = torch.randn(2, 6, 4096, size, device=device).bfloat16()
    bounds.assert_repeats_only_if_asked(partial(gradients, heads, gradient), measured)


@hopper
@proves("a deterministic backward of heads of 256, which it lacks, is refused in a sentence")
def test_deterministic_backward_of_wide_heads_is_refused(device: str, measured: Dict[str, Any]) -> None:
    heads = [torch.randn(1, 2, 5, 256, device=device).bfloat16() for _ in range(3)]
    with pytest.raises(RuntimeError, match="not supported for hdim 256") as refused:
        gradients(heads, torch.randn_like(heads[0]), deterministic=True)
    measured["refusal"] = str(refused.value).splitlines()[0]


@hopper
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@proves("heads in float32 and float64, for which it has no kernels, are refused, not cast")
def test_other_dtypes_are_refused(dtype: torch.dtype, device: str, measured: Dict[str, Any]) -> None:
    heads = torch.randn(1, 2, 5, 64, device=device, dtype=dtype)
    with pytest.raises(RuntimeError, match="fp16, bf16, and fp8") as refused:
        attend(heads, heads, heads)
    measured["refusal"] = str(refused.value).splitlines()[0]


@hopper
@pytest.mark.parametrize(
    ("option", "reason"), [({"softcap": 30.0}, "softcapping"), ({"num_splits": 2}, "splits")], ids=["softcap", "splits"]
)
@proves("an option that this build leaves out is refused in a sentence, not ignored")
def test_left_out_options_are_refused(
    option: Dict[str, Any], reason: str, device: str, measured: Dict[str, Any]
) -> None:
    heads = torch.randn(1, 2, 5, 64, device=device).bfloat16()
    with pytest.raises(RuntimeError, match=f"does not support .*{reason}") as refused:
        attend(heads, heads, heads, **option)
    measured["refusal"] = str(refused.value).splitlines()[0]


@hopper
@pytest.mark.parametrize(("cache", "verb"), [("appended", "appending"), ("paged", "paged")])
@proves("keys appended to a cache, or in pages of 16 tokens, are refused in a sentence by this build, not ignored")
def test_left_out_caches_are_refused(cache: str, verb: str, device: str, measured: Dict[str, Any]) -> None:
    query, new, cached = (torch.randn(2, length, 2, 64, device=device).bfloat16() for length in (1, 1, 16))
    used = torch.full((2,), 8, dtype=torch.int32, device=device)
    pages = torch.arange(2, dtype=torch.int32, device=device)[:, None]
    options = {"k": new, "v": new} if cache == "appended" else {"page_table": pages}
    with pytest.raises(RuntimeError, match=f"does not support {verb} KV") as refused:
        flash_attn_interface.flash_attn_with_kvcache(query, cached, cached, cache_seqlens=used, causal=True, **options)
    measured["refusal"] = str(refused.value).splitlines()[0]
