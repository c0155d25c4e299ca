"""Faults of the operators of the table: attention, norms, losses and SwiGLU."""

from __future__ import annotations

import importlib
import math
from typing import Any, Callable, ContextManager, Dict
from unittest import mock

import torch

from smoke_tests.faults.planting import CASTS, Call, Wrap, backward_of, in_table, patched, wrong

# --- of any operator ---

TENSORS = ("attention", "rms_norm", "add_rms_norm", "swiglu", "mlp")  # tensors in and out
LOSSES = ("cross_entropy", "linear_cross_entropy")


@wrong("wrong scale", *TENSORS, *LOSSES)
def output_2_percent_too_large(call: Call) -> Call:
    return lambda *given: call(*given) * 1.02


@wrong("wrong gradient", *TENSORS, *LOSSES)
def gradients_2_percent_too_large(call: Call) -> Call:
    return lambda *given: backward_of((output := call(*given)), output * 1.02)


@wrong("dropped gradient", *TENSORS, "linear_cross_entropy")
def no_gradient_of_the_second_input(call: Call) -> Call:
    return lambda first, second, *others: call(first, second.detach(), *others)


@wrong("too few bits", *TENSORS, *LOSSES, dtype="float32")
def inputs_rounded_to_bfloat16(call: Call) -> Call:
    return lambda x, *others: call(x.bfloat16().to(x.dtype), *others)


@wrong("nondeterminism", "attention", "cross_entropy", "rms_norm", "swiglu", by="test_runs_are_bit_equal")
def last_bit_is_random(call: Call) -> Call:
    def noisy(*given: Any) -> torch.Tensor:
        output = call(*given)
        bit = torch.finfo(output.dtype).eps * torch.randint(-1, 2, output.shape, device=output.device)
        return output * (1 + bit).to(output.dtype)

    return noisy


@wrong("nondeterminism", "attention", by="test_runs_are_bit_equal", column="flash-attn")
def not_deterministic_though_told_so(attend: Call) -> Call:
    def random(*given: torch.Tensor) -> torch.Tensor:
        deterministic = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(False)
        try:
            return attend(*given)
        finally:
            torch.use_deterministic_algorithms(deterministic)

    return random


@patched("nondeterminism", "test_flash_attn.py::test_deterministic_backward", "flash-attn")
def deterministic_flag_of_flash_attn_ignored(_: str) -> ContextManager[Any]:
    module = importlib.import_module("flash_attn")
    own = module.flash_attn_func
    random = lambda *given, **named: own(*given, **{**named, "deterministic": False})  # noqa: E731
    return mock.patch.object(module, "flash_attn_func", random)


ALONE = "::test_a_row_is_the_same_alone"


# Not torch.compile, for which no claim says this.
@patched("batch variance", CASTS + ALONE, "torch")
@patched("batch variance", "test_liger_kernel.py" + ALONE, "liger-kernel")
@patched("batch variance", "test_flash_attn.py" + ALONE, "flash-attn")
def a_row_alone_is_computed_otherwise(column: str) -> ContextManager[Any]:
    def wrap(normalize: Call) -> Call:
        def otherwise(x: torch.Tensor, *others: Any) -> torch.Tensor:
            output = normalize(x, *others)
            return output * (1 + torch.finfo(output.dtype).eps) if len(x) == 1 else output

        return otherwise

    return in_table("rms_norm", wrap)(column)


@patched("batch variance", CASTS + ALONE, "torch")
def a_text_is_attended_as_the_batch_around_it_is_long(column: str) -> ContextManager[Any]:
    def crowded(attend: Call) -> Call:
        def attended(query: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
            output = attend(query, *others)
            return output * (1 + torch.finfo(output.dtype).eps) if len(query) > 1 else output

        return attended

    return in_table("attention", crowded)(column)


@wrong("NaN at extremes", "attention", "cross_entropy", "rms_norm", "swiglu", by="test_extremes_stay_finite")
def an_exponential_overflows(call: Call) -> Call:
    return lambda x, *others: call((x.float() + 0 * x.float().abs().exp()).to(x.dtype), *others)


@wrong("wrong format", "attention", "swiglu", by=("test_extremes_stay_finite", "test_large_swiglu"), dtype="bfloat16")
def float16_instead_of_bfloat16(call: Call) -> Call:
    def narrow(*given: torch.Tensor) -> torch.Tensor:
        if given[0].dtype is not torch.bfloat16:
            return call(*given)
        return call(*[tensor.half() for tensor in given]).bfloat16()

    return narrow


@wrong("beyond a tile", *TENSORS[1:], by="test_many_tiles")
def rows_2_percent_too_large_from_1024_on(call: Call) -> Call:
    """The numbers after the first 1,024 of a row; in the rows of an MLP, after the first 64."""

    def second(*given: Any) -> torch.Tensor:
        output = call(*given)
        if output.shape[-1] <= 1024:
            return torch.cat([output[:64], output[64:] * 1.02])
        return torch.cat([output[:, :1024], output[:, 1024:] * 1.02], -1)

    return second


@wrong("beyond a tile", *LOSSES, by="test_many_tiles")
def classes_from_1024_on_count_2_percent_more(call: Call) -> Call:
    def more(x: torch.Tensor, *others: Any) -> torch.Tensor:
        weights = others[0] if len(others) == 3 else x  # the classes are rows of the one and columns of the other
        if weights is x:
            return call(torch.cat([x[:, :1024], x[:, 1024:] * 1.02], -1), *others)
        return call(x, torch.cat([weights[:1024], weights[1024:] * 1.02]), *others[1:])

    return more


@wrong("input mutated", *TENSORS, *LOSSES, by="test_inputs_keep_their_bits")
def last_number_of_the_input_doubled_afterwards(call: Call) -> Call:
    def mutating(x: torch.Tensor, *others: Any) -> torch.Tensor:
        output = call(x * 1, *others)
        x.data.view(-1)[-1:].mul_(2)
        return output

    return mutating


@wrong("uninitialised memory", *TENSORS, by="test_memory_is_written_before_it_is_read")
def last_row_is_what_memory_held(call: Call) -> Call:
    """A kernel that leaves the last row out, and is right by luck if memory still holds the row of an equal call."""
    before: Dict[Any, torch.Tensor] = {}

    def lucky(*given: Any) -> torch.Tensor:
        shapes = tuple(each.shape for each in given if isinstance(each, torch.Tensor))
        if shapes not in before:
            output = call(*given)
            before[shapes] = output.detach().clone()
            return output
        held = torch.empty_like(before[shapes])  # first, before the call leaves numbers of its own in memory
        output = call(*given)
        # NaN means poisoned memory; other values come from the last call or a similar one.
        row = torch.where(held[-1:].isnan().any(), torch.zeros_like(held[-1:]), output[-1:])
        return torch.cat([output[:-1], row])

    return lucky


@wrong("side stream", *TENSORS, *LOSSES, by="test_results_are_there_at_once")
def computed_on_a_stream_that_nobody_waits_for(call: Call) -> Call:
    def beside(*given: Any) -> torch.Tensor:
        if not given[0].is_cuda:
            return call(*given)
        with torch.cuda.stream(torch.cuda.Stream()):
            output = call(*given)  # first, since some operators compile there, or wait for the GPU
            torch.cuda._sleep(20_000_000)  # some ten milliseconds
            return output * 1

    return beside


@wrong("shape", "rms_norm", "swiglu", by="test_one_row")
def a_single_row_is_left_as_it_is(call: Call) -> Call:
    return lambda x, *others: call(x, *others) if len(x) > 1 else x * 1


# --- attention ---


@wrong("softmax scale", "attention")
def softmax_scale_2_percent_off(attend: Call) -> Call:
    return lambda query, key, value: attend(query * 1.02, key, value)


@wrong("softmax scale", "attention")
def softmax_scale_of_half_the_head_size(attend: Call) -> Call:
    return lambda query, key, value: attend(query * math.sqrt(2), key, value)


@wrong("grouped heads", "attention")
def key_heads_repeated_in_turn(attend: Call) -> Call:
    """Query head i takes key head i modulo k, which is `repeat` in place of `repeat_interleave`."""

    def misaligned(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        order = torch.arange(query.shape[1], device=query.device).view(-1, key.shape[1]).t().flatten()
        return attend(query[:, order], key, value)[:, order.argsort()]

    return misaligned


@wrong("grouped heads", "attention")
def value_heads_in_reverse(attend: Call) -> Call:
    return lambda query, key, value: attend(query, key, value.flip(1))


@wrong("causal mask", "attention", by="test_attention_is_causal")
def a_token_sees_the_next_one(attend: Call) -> Call:
    return lambda query, key, value: attend(query, key.roll(-1, 2), value.roll(-1, 2))


@wrong("causal mask", "attention", by="test_attention_is_causal")
def a_token_does_not_see_itself(attend: Call) -> Call:
    def before(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[:, :, :1], x[:, :, :-1]], 2)

    return lambda query, key, value: attend(query, before(key), before(value))


@wrong("causal mask", "attention", by="test_attention_is_causal")
def the_last_token_leaks_a_little(attend: Call) -> Call:
    return lambda *given: (output := attend(*given)) + output[:, :, -1:] * 2.0**-9


def seeing_the_next(which: Callable[[torch.Tensor], torch.Tensor]) -> Wrap:
    """Attention in which the tokens at some positions see one token of the future."""

    def wrap(attend: Call) -> Call:
        def leaky(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            position = torch.arange(query.shape[2], device=query.device)
            ahead = attend(query, key.roll(-1, 2), value.roll(-1, 2))
            return torch.where(which(position)[:, None], ahead, attend(query, key, value))

        return leaky

    return wrap


@wrong("causal mask", "attention", by=("test_attention_is_causal", "test_long_attention"))
def tokens_beyond_64_see_the_next_one(attend: Call) -> Call:
    return seeing_the_next(lambda position: position > 64)(attend)


@wrong("causal mask", "attention", by="test_attention_is_causal")
def tokens_at_multiples_of_128_see_the_next_one(attend: Call) -> Call:
    return seeing_the_next(lambda position: (position % 128 == 0) & (position > 0))(attend)


@wrong("causal mask", "attention", by=("test_attention_is_causal", "test_long_attention"))
def tokens_away_from_multiples_of_128_see_the_next_one(attend: Call) -> Call:
    return seeing_the_next(lambda position: position % 128 > 0)(attend)


@wrong("beyond a tile", "attention", by="test_long_attention")
def a_tile_of_one_token_comes_out_2_percent_too_large(attend: Call) -> Call:
    def larger(query: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        output = attend(query, *others)
        if output.shape[2] % 128 != 1 or output.shape[2] == 1:
            return output
        return torch.cat([output[:, :, :-1], output[:, :, -1:] * 1.02], 2)

    return larger


@wrong("beyond a tile", "attention", by="test_long_attention")
def softmax_scale_wrong_beyond_128_tokens(attend: Call) -> Call:
    def scaled(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        factor = 1 + 0.5 * (torch.arange(query.shape[2], device=query.device) >= 128)
        return attend(query * factor.to(query)[:, None], key, value)

    return scaled


@wrong("bias", "attention", by="test_equal_maxima_have_no_bias")
def attention_rounds_towards_zero(attend: Call) -> Call:
    """Every result half a spacing of bfloat16 too small, which hides in the noise of eight bits."""
    return lambda *given: attend(*given) * (1 - 2.0**-8)


@wrong("another kernel", "attention", by=("test_own_kernels_ran", f"{CASTS}::test_flash_attention_ran"))
def mathematics_in_place_of_the_fused_kernel(attend: Call) -> Call:
    def plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).triu(1)
        return scores.masked_fill(future, -math.inf).softmax(-1) @ value

    return lambda *given: plain(*given)


# --- norms ---


@wrong("eps", "rms_norm")
def eps_outside_the_root(normalize: Call) -> Call:
    def outside(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        square = x.float().pow(2).mean(-1, keepdim=True)
        factor = torch.sqrt(square + eps) / (torch.sqrt(square) + eps)
        return (normalize(x, weight, eps).float() * factor).to(x.dtype)

    return outside


@wrong("eps", "rms_norm")
def eps_twice_as_large(normalize: Call) -> Call:
    return lambda x, weight, eps: normalize(x, weight, 2 * eps)


@wrong("eps", "rms_norm", by="test_extremes_stay_finite")
def no_eps(normalize: Call) -> Call:
    return lambda x, weight, eps: normalize(x, weight, 0.0)


@wrong("another formula", "rms_norm")
def mean_subtracted(normalize: Call) -> Call:
    return lambda x, weight, eps: normalize(x - x.mean(-1, keepdim=True), weight, eps)


@wrong("another formula", "rms_norm")
def weight_counted_from_one(normalize: Call) -> Call:
    return lambda x, weight, eps: normalize(x, 1 + weight, eps)


@wrong("cast order", "rms_norm", by="test_rms_norm_rounds_in_its_order", dtype="bfloat16")
def rounded_in_the_other_order(normalize: Call) -> Call:
    """Rounded before and after the weight where once is right, and once where twice is right."""

    def other(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        ones = torch.ones_like(weight.float())
        late = normalize(x.float(), weight.float(), eps).to(x.dtype)
        early = normalize(x.float(), ones, eps).to(x.dtype) * weight
        given = normalize(x.detach(), weight.detach(), eps)
        return early if (given == late).sum() >= (given == early).sum() else late

    return other


@wrong("another kernel", "rms_norm", by="test_own_kernels_ran")
def plain_operators_in_place_of_the_fused_norm(normalize: Call) -> Call:
    def plain(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight

    return lambda *given: plain(*given)


@wrong("another formula", "add_rms_norm")
def residual_returned_without_the_sum(normalize: Call) -> Call:
    def stale(x: torch.Tensor, residual: torch.Tensor, *others: Any) -> torch.Tensor:
        return torch.cat([normalize(x, residual, *others)[:, : x.shape[1]], residual], -1)

    return stale


@wrong("dropped gradient", "add_rms_norm")
def no_gradient_through_the_sum(normalize: Call) -> Call:
    def cut(x: torch.Tensor, *others: Any) -> torch.Tensor:
        both, width = normalize(x, *others), x.shape[1]
        return torch.cat([both[:, :width], both[:, width:].detach()], -1)

    return cut


@wrong("another formula", "add_rms_norm")
def residual_added_twice(normalize: Call) -> Call:
    return lambda x, residual, *others: normalize(x + residual, residual, *others)


# --- losses; the labels are the third argument but one ---


@wrong("ignored labels", *LOSSES)
def ignored_rows_count_as_class_0(entropy: Call) -> Call:
    return lambda *given: entropy(*given[:-2], given[-2].clamp(min=0), given[-1])


@wrong("ignored labels", "cross_entropy", by="test_cross_entropy_ignores")
def ignored_rows_leak_into_the_loss(entropy: Call) -> Call:
    def leaking(logits: torch.Tensor, labels: torch.Tensor, ignored: int) -> torch.Tensor:
        leak = (logits.float() * (labels == ignored)[:, None]).mean()
        return entropy(logits, labels, ignored) + leak * 2.0**-3

    return leaking


@wrong("ignored labels", *LOSSES)
def mean_over_ignored_rows_too(entropy: Call) -> Call:
    return lambda *given: entropy(*given) * (given[-2] != given[-1]).float().mean()


@wrong("label shift", *LOSSES)
def labels_shifted_by_one(entropy: Call) -> Call:
    return lambda *given: entropy(*given[:-2], given[-2].roll(1), given[-1])


@wrong("another formula", "cross_entropy")
def labels_smoothed_by_1_percent(entropy: Call) -> Call:
    def smoothed(logits: torch.Tensor, labels: torch.Tensor, ignored: int) -> torch.Tensor:
        even = -logits.float().log_softmax(-1).mean(-1)[labels != ignored].mean()
        return 0.99 * entropy(logits, labels, ignored) + 0.01 * even

    return smoothed


@wrong("another formula", "cross_entropy")
def logits_capped_at_30(entropy: Call) -> Call:
    return lambda logits, *others: entropy(30 * torch.tanh(logits / 30), *others)


# --- SwiGLU ---


@wrong("another formula", "swiglu")
def gate_and_up_swapped(multiply: Call) -> Call:
    return lambda gate, up: multiply(up, gate)


@wrong("another formula", "swiglu")
def quick_gelu_in_place_of_silu(multiply: Call) -> Call:
    return lambda gate, up: multiply(gate * 1.702, up / 1.702)


@wrong("wrong gradient", "swiglu")
def sigmoid_taken_as_constant_in_backward(multiply: Call) -> Call:
    return lambda gate, up: backward_of(multiply(gate, up), gate * gate.sigmoid().detach() * up)


@wrong("clipping", "swiglu")
def gate_clipped_at_7(multiply: Call) -> Call:
    return lambda gate, up: multiply(gate.clamp(max=7.0), up)
