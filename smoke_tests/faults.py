"""The faults that are planted to see that a claim catches each: what is wrong, where, and which claim has to say so.

A fault of an operator changes what goes into an implementation or what comes out of it, and so fits all of them; what
computes in between is the implementation's own, so that a claim which fails, fails because of the fault.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import math
import sys
from contextlib import nullcontext
from functools import lru_cache, wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, ContextManager, Dict, List, NamedTuple, Optional, Tuple, Union
from unittest import mock

import torch

from smoke_tests.operators import liger_kernel_adapter, torch_adapter
from smoke_tests.operators.table import OPERATORS

Call = Callable[..., Any]
Wrap = Callable[[Call], Call]
TABLE, CASTS, FLOAT8 = "test_fused_ops.py", "test_torch.py", "test_torchao.py"
E4M3, E5M2 = getattr(torch, "float8_e4m3fn", None), getattr(torch, "float8_e5m2", None)  # since torch 2.1
CODES = {E4M3, E5M2}


class Fault(NamedTuple):
    """One thing that is wrong.

    kind: what sort of fault; operator: the row of the table that it is planted in, "" where it is in none.
    column: a package, or one variant of it, where it is not for every implementation that a target has.
    dtype: the format without which it is no fault of an implementation.
    claims: FILE::TEST, one of which has to catch it.
    plant: the context in which column's implementation has the fault.
    """

    name: str
    kind: str
    operator: str
    column: str
    dtype: str
    claims: Tuple[str, ...]
    plant: Callable[[str], ContextManager[Any]]


FAULTS: List[Fault] = []


def in_table(operator: str, wrap: Wrap) -> Callable[[str], ContextManager[Any]]:
    """Plants wrap(implementation) in place of an implementation of the operator."""

    def plant(column: str) -> ContextManager[Any]:
        entry = OPERATORS[operator][column]
        return mock.patch.dict(OPERATORS[operator], {column: entry._replace(call=wrap(entry.call))})

    return plant


@lru_cache(maxsize=None)
def loaded(extension: str, library: Path) -> ContextManager[None]:
    """Put a compiled extension in the place of the one that a package would import; for the rest of the process."""
    found = importlib.util.spec_from_file_location(extension, library)
    assert found and found.loader, library
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    sys.modules[extension] = module
    return nullcontext()


def wrong(
    kind: str, *operators: str, by: Union[str, Tuple[str, ...]] = "", column: str = "", dtype: str = ""
) -> Callable[[Wrap], Wrap]:
    """Make a fault of these operators of a function from implementation to implementation; its name says what is wrong.

    by: the claims, in test_fused_ops.py unless they name another file; by default test_OPERATOR.
    """

    def note(wrap: Wrap) -> Wrap:
        for operator in operators:
            tests = (by or "test_" + operator,) if isinstance(by, str) else by
            claims = tuple(test if "::" in test else f"{TABLE}::{test}" for test in tests)
            name = wrap.__name__.replace("_", " ")
            FAULTS.append(Fault(name, kind, operator, column, dtype, claims, in_table(operator, wrap)))
        return wrap

    return note


def patched(kind: str, claim: str, column: str, operator: str = "") -> Callable[[Call], Call]:
    """Make a fault of a context manager, which replaces something in a package; it may take the column."""

    def note(plant: Call) -> Call:
        FAULTS.append(Fault(plant.__name__.replace("_", " "), kind, operator, column, "", (claim,), plant))
        return plant

    return note


def backward_of(forward: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The values of one tensor with the gradient of another of the same shape."""
    return forward.detach() + (other - other.detach())


# --- of any operator ---

TENSORS = ("attention", "rms_norm", "add_rms_norm", "swiglu", "mlp")  # in, and out
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


@wrong(
    "batch variance",
    "rms_norm",
    by=tuple(name + ALONE for name in (CASTS, "test_liger_kernel.py", "test_flash_attn.py")),
)
def a_row_alone_is_computed_otherwise(normalize: Call) -> Call:
    def otherwise(x: torch.Tensor, *others: Any) -> torch.Tensor:
        output = normalize(x, *others)
        return output * (1 + torch.finfo(output.dtype).eps) if len(x) == 1 else output

    return otherwise


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
    """What lies behind the first 1,024 numbers of a row; of the rows of an MLP, behind the first 64 of those."""

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
    """A kernel that leaves the last row out where it was right by luck: where memory has the row of the same call."""
    before: Dict[Any, torch.Tensor] = {}

    def lucky(*given: Any) -> torch.Tensor:
        output = call(*given)
        shape = tuple(output.shape)
        if shape not in before:
            before[shape] = output.detach().clone()
            return output
        held = torch.empty_like(output.detach())
        # What is NaN there was poisoned; what is not came from the last call, or from one like it.
        row = torch.where(held[-1:].isnan().any(), torch.zeros_like(held[-1:]), output[-1:])
        return torch.cat([output[:-1], row])

    return lucky


@wrong("side stream", *TENSORS, *LOSSES, by="test_results_are_there_at_once")
def computed_on_a_stream_that_nobody_waits_for(call: Call) -> Call:
    def beside(*given: Any) -> torch.Tensor:
        if not given[0].is_cuda:
            return call(*given)
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(20_000_000)  # some ten milliseconds
            return call(*given)

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
    """Attention in which the tokens whose positions are so see one token of the future."""

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
    """Before the weight and after, where that is once; and once, where that is twice."""

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


# --- rotary embedding: a factory(head size, base) of rotate(x, start) ---


def rebased(make: Any, made: Call) -> Call:
    """A factory that says of its angles what another one says."""
    made.angles = make.angles  # type: ignore[attr-defined]
    return made


def turned(change: Wrap) -> Wrap:
    """Changes the rotations that a factory makes."""

    @wraps(change)
    def wrap(make: Call) -> Call:
        return rebased(make, lambda size, base: change(make(size, base)))

    return wrap


@wrong("rope pairs", "rope")
@turned
def neighbours_paired_in_place_of_halves(rotate: Call) -> Call:
    def paired(x: torch.Tensor, start: int) -> torch.Tensor:
        order = torch.arange(x.shape[-1], device=x.device).view(-1, 2).t().flatten()
        return rotate(x[..., order], start)[..., order.argsort()]

    return paired


def swap(x: torch.Tensor) -> torch.Tensor:
    """The two halves of each head, swapped: rotating these is rotating backwards."""
    return x.roll(x.shape[-1] // 2, -1)


@wrong("another formula", "rope")
@turned
def rotated_backwards(rotate: Call) -> Call:
    return lambda x, start: swap(rotate(swap(x), start))


@wrong("wrong gradient", "rope")
@turned
def gradient_rotated_forwards(rotate: Call) -> Call:
    return lambda x, start: backward_of(rotate(x, start), swap(rotate(swap(x), start)))


@wrong("wrong scale", "rope")
@turned
def rotation_2_percent_too_large(rotate: Call) -> Call:
    return lambda x, start: rotate(x, start) * 1.02


@wrong("too few bits", "rope", dtype="float32")
@turned
def rotation_rounded_to_bfloat16(rotate: Call) -> Call:
    return lambda x, start: rotate(x.bfloat16().to(x.dtype), start)


@wrong("rope positions", "rope")
@turned
def positions_counted_from_1(rotate: Call) -> Call:
    return lambda x, start: rotate(x, start + 1)


@wrong("beyond a tile", "rope")
@turned
def positions_from_128_on_counted_from_129(rotate: Call) -> Call:
    def late(x: torch.Tensor, start: int) -> torch.Tensor:
        first = rotate(x[..., :128, :], start)
        return torch.cat([first, rotate(x[..., 128:, :], start + 129)], -2) if x.shape[-2] > 128 else first

    return late


@wrong("rope positions", "rope")
@turned
def start_ignored(rotate: Call) -> Call:
    return lambda x, start: rotate(x, 0)


@wrong("rope positions", "rope")
@turned
def positions_rounded_to_bfloat16(rotate: Call) -> Call:
    def rounded(x: torch.Tensor, start: int) -> torch.Tensor:
        positions = torch.arange(start, start + x.shape[-2]).bfloat16().int().tolist()
        return torch.cat([rotate(x[..., i : i + 1, :], position) for i, position in enumerate(positions)], -2)

    return rounded


@wrong("stale rope cache", "rope")
@turned
def table_never_grows(rotate: Call) -> Call:
    """Tokens beyond the table of the first call stay as they are."""
    known: List[int] = []

    def stale(x: torch.Tensor, start: int) -> torch.Tensor:
        known.append(x.shape[-2])
        inside = max(0, known[0] - start)
        return torch.cat([rotate(x[..., :inside, :], start), x[..., inside:, :]], -2) if inside else x * 1

    return stale


@wrong("another formula", "rope")
def base_2_percent_off(make: Call) -> Call:
    return rebased(make, lambda size, base: make(size, base * 1.02))


@wrong("another formula", "rope")
def base_ignored(make: Call) -> Call:
    return rebased(make, lambda size, base: make(size, 10000.0))


DECODER = "training/test_pretrain.py::test_"


@patched("another formula", DECODER + "decoder_turns_by_its_base", "torch")
def base_of_the_decoder_ignored(_: str) -> ContextManager[Any]:
    rotary = importlib.import_module("smoke_tests.training.decoder").Rotary
    own = rotary.__init__
    plain = lambda self, model, columns: own(self, model._replace(base=10000.0), columns)  # noqa: E731
    return mock.patch.object(rotary, "__init__", plain)


@patched("another formula", DECODER + "hugging_face", "transformers")
def base_left_out_of_the_export(_: str) -> ContextManager[Any]:
    module = importlib.import_module("transformers")
    own = module.MistralConfig
    return mock.patch.object(module, "MistralConfig", lambda **named: own(**{**named, "rope_theta": 10000.0}))


# --- AdamW: a factory(parameters, lr, betas, eps, weight_decay) of optimizers ---


def stepping(make: Call, before: Optional[Call] = None, after: Optional[Call] = None, **replaced: Any) -> Call:
    """A factory with other settings, whose optimizers call before(parameters, settings) and after(optimizer, ...)."""

    def made(parameters: Any, **settings: Any) -> torch.optim.Optimizer:
        parameters = list(parameters)
        optimizer: torch.optim.Optimizer = make(parameters, **{**settings, **replaced})
        own = type(optimizer).step

        def step(self: torch.optim.Optimizer, *given: Any) -> None:
            with torch.no_grad():
                if before:
                    before(parameters, settings)
                own(self, *given)
                if after:
                    after(self, parameters, settings)

        optimizer.step = step.__get__(optimizer)
        return optimizer

    return made


def setting(name: str, factor: float) -> Wrap:
    """Multiplies one setting of the optimizer."""
    return lambda make: lambda parameters, **given: make(parameters, **{**given, name: given[name] * factor})


@wrong("AdamW as L2", "adamw", by="test_adamw_decays_without_gradient")
def decay_added_to_the_gradient(make: Call) -> Call:
    def add(parameters: List[torch.Tensor], settings: Dict[str, Any]) -> None:
        for parameter in parameters:
            parameter.grad += settings["weight_decay"] * parameter

    return stepping(make, add, weight_decay=0.0)


@wrong("another formula", "adamw")
def decay_after_the_update(make: Call) -> Call:
    def decay(_: Any, parameters: List[torch.Tensor], settings: Dict[str, Any]) -> None:
        for parameter in parameters:
            parameter *= 1 - settings["lr"] * settings["weight_decay"]

    return stepping(make, after=decay, weight_decay=0.0)


@wrong("stale state", "adamw")
def gradient_of_the_step_before(make: Call) -> Call:
    def delay(parameters: List[Any], settings: Dict[str, Any]) -> None:
        for parameter in parameters:
            now = parameter.grad.clone()
            parameter.grad.copy_(getattr(parameter, "before", now))
            parameter.before = now

    return stepping(make, delay)


@wrong("too few bits", "adamw")
def moments_rounded_to_bfloat16(make: Call) -> Call:
    def shorten(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for state in optimizer.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name].copy_(state[name].bfloat16())

    return stepping(make, after=shorten)


@wrong("another formula", "adamw")
def betas_swapped(make: Call) -> Call:
    return lambda parameters, betas, **others: make(parameters, betas=betas[::-1], **others)


for _name, _setting, _factor, _claim in (
    ("learning rate 2 percent off", "lr", 1.02, "test_adamw"),
    ("eps ten times larger", "eps", 10, "test_adamw"),
    ("decay 2 percent too large", "weight_decay", 1.02, "test_adamw_decays_without_gradient"),
    ("no decay", "weight_decay", 0, "test_adamw_decays_without_gradient"),
):
    _plant = in_table("adamw", setting(_setting, _factor))
    FAULTS.append(Fault(_name, "wrong setting", "adamw", "", "", (f"{TABLE}::{_claim}",), _plant))


@wrong("beyond a tile", "adamw")
def elements_from_65536_on_move_2_percent_less(make: Call) -> Call:
    held: Dict[int, torch.Tensor] = {}

    def note(parameters: List[torch.Tensor], _: Any) -> None:
        held.update({id(parameter): parameter.detach().clone() for parameter in parameters})

    def less(_: Any, parameters: List[torch.Tensor], __: Any) -> None:
        for parameter in parameters:
            parameter.data.view(-1)[65536:].lerp_(held[id(parameter)].view(-1)[65536:], 0.02)

    return stepping(make, note, less)


@wrong("beyond a launch", "adamw", by=("test_adamw", "test_adamw_decays_without_gradient"))
def tensors_from_the_37th_on_stay(make: Call) -> Call:
    def made(parameters: Any, **settings: Any) -> torch.optim.Optimizer:
        parameters = list(parameters)
        # Those of the training that anybody looks at are far fewer.
        optimizer: torch.optim.Optimizer = make(parameters[:36], **settings)
        return optimizer

    return made


@wrong("another kernel", "adamw", by=("test_own_adamw_ran", f"{CASTS}::test_fused_adamw_ran"))
def an_unfused_adamw_beside_the_fused(make: Call) -> Call:
    def beside(optimizer: Any, parameters: List[Any], settings: Dict[str, Any]) -> None:
        copies = [torch.nn.Parameter(parameter.detach().clone()) for parameter in parameters]
        for copy, parameter in zip(copies, parameters):
            copy.grad = None if parameter.grad is None else parameter.grad.clone()
        torch.optim.AdamW(copies, foreach=False, **settings).step()

    return stepping(make, after=beside)


@wrong("another kernel", "adamw", by=("test_own_adamw_ran", f"{CASTS}::test_fused_adamw_ran"), column="torch")
def one_operator_per_formula(make: Call) -> Call:
    return lambda parameters, **settings: torch.optim.AdamW(parameters, foreach=False, **settings)


# --- the float8 product: (a, b, scale of a, scale of b, dtype) ---

multiplies = f"{CASTS}::test_scaled_mm_multiplies_codes"


@wrong("wrong scale", "scaled_mm", by=multiplies)
def product_2_percent_too_large(multiply: Call) -> Call:
    return lambda a, b, scale_a, *others: multiply(a, b, scale_a * 1.02, *others)


@wrong("wrong scale", "scaled_mm", by=multiplies)
def scale_inverted(multiply: Call) -> Call:
    return lambda a, b, scale_a, scale_b, dtype: multiply(a, b, 1 / scale_a, scale_b, dtype)


@wrong("wrong scale", "scaled_mm", by=multiplies)
def scales_ignored(multiply: Call) -> Call:
    return lambda a, b, scale_a, scale_b, dtype: multiply(
        a, b, torch.ones_like(scale_a), torch.ones_like(scale_b), dtype
    )


@wrong("wrong scale", "scaled_mm", by=multiplies)
def scales_above_1_doubled(multiply: Call) -> Call:
    """Wrong only where the largest value is above 448, the largest code."""
    return lambda a, b, scale_a, *others: multiply(a, b, scale_a * (1 + (scale_a > 1)), *others)


@wrong("wrong scale", "scaled_mm", by=multiplies)
def scales_above_1_halved(multiply: Call) -> Call:
    return lambda a, b, scale_a, *others: multiply(a, b, scale_a / (1 + (scale_a > 1)), *others)


def truncated(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b.t() of [n, k] and [m, k] in float32, whose sum is cut to 13 bits behind its first after every 32 terms."""
    total = torch.zeros(a.shape[0], b.shape[0], device=a.device)
    for first in range(0, a.shape[1], 32):
        total = total + a[:, first : first + 32].float() @ b[:, first : first + 32].float().t()
        unit = torch.exp2(torch.floor(torch.log2(total.abs().clamp(min=1e-30))) - 13)
        total = torch.trunc(total / unit) * unit
    return total


@wrong("bias", "scaled_mm", by=f"{CASTS}::test_scaled_mm_of_one_sign")
def sums_truncated_to_13_bits_all_the_way(multiply: Call) -> Call:
    """Fast accumulation in place of the exact one."""
    return lambda a, b, scale_a, scale_b, dtype, **_: (truncated(a, b) * scale_a * scale_b).to(dtype)


@wrong("wrong scale", "scaled_mm", by=multiplies)
def one_scale_for_all_rows(multiply: Call) -> Call:
    return lambda a, b, scale_a, *others: multiply(a, b, scale_a.max().expand_as(scale_a).contiguous(), *others)


@wrong("wrong format", "scaled_mm", by=multiplies)
def operand_rounded_to_e5m2(multiply: Call) -> Call:
    return lambda a, *others: multiply(a.float().to(E5M2).float().to(a.dtype), *others)


@wrong("too few bits", "scaled_mm", by=multiplies, dtype="float32")
def product_rounded_to_bfloat16(multiply: Call) -> Call:
    return lambda a, b, scale_a, scale_b, dtype: multiply(a, b, scale_a, scale_b, torch.bfloat16).to(dtype)


# --- casts and autocast ---


def casts(change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> ContextManager[Any]:
    """Every cast to float8 gives change(values, codes)."""
    to = torch.Tensor.to

    def changed(self: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        codes = to(self, *given, **named)
        return change(self, codes) if codes.dtype in CODES and self.dtype not in CODES else codes

    return mock.patch.object(torch.Tensor, "to", changed)


def towards_zero(values: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """The next smaller code where a code is larger than its value."""
    larger = codes.float().abs() > values.float().abs()
    return (codes.view(torch.uint8) - larger.byte()).view(codes.dtype)


@patched("rounding", f"{CASTS}::test_cast_rounds_to_nearest", "torch")
def casts_round_towards_zero(_: str) -> ContextManager[Any]:
    return casts(towards_zero)


@patched("rounding", f"{CASTS}::test_ties_go_to_even", "torch")
def ties_go_towards_zero(_: str) -> ContextManager[Any]:
    def lower(values: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        smaller = (codes.view(torch.uint8) - 1).view(codes.dtype).float()
        tie = (values - smaller).abs() == (codes.float() - values).abs()
        return (codes.view(torch.uint8) - tie.byte()).view(codes.dtype)

    return casts(lower)


@patched("rounding", f"{CASTS}::test_cast_rounds_to_nearest", "torch")
def subnormal_codes_flushed_to_zero(_: str) -> ContextManager[Any]:
    def flush(values: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        small = codes.float().abs() < torch.finfo(codes.dtype).tiny
        return codes.view(torch.uint8).masked_fill(small, 0).view(codes.dtype)

    return casts(flush)


@patched("overflow", f"{CASTS}::test_overflow_and_nan", "torch")
def nan_becomes_zero(_: str) -> ContextManager[Any]:
    return casts(lambda values, codes: codes.view(torch.uint8).masked_fill(values.isnan(), 0).view(codes.dtype))


@patched("overflow", f"{CASTS}::test_overflow_and_nan", "torch")
def the_largest_code_is_never_reached(_: str) -> ContextManager[Any]:
    def below(values: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        largest = codes.float().abs() == torch.finfo(codes.dtype).max
        return (codes.view(torch.uint8) - largest.byte()).view(codes.dtype)

    return casts(below)


@patched("wrong format", f"{CASTS}::test_codes_decode", "torch")
def e4m3_and_e5m2_swapped(_: str) -> ContextManager[Any]:
    return mock.patch.multiple(torch, float8_e4m3fn=E5M2, float8_e5m2=E4M3)


@patched("wrong format", f"{CASTS}::test_autocast_is_bfloat16", "torch")
def autocast_to_float16(_: str) -> ContextManager[Any]:
    class Narrow(torch.autocast):  # type: ignore[misc]
        def __init__(self, device: str, dtype: Any = None, **others: Any) -> None:
            super().__init__(device, dtype=torch.float16, **others)

    return mock.patch.object(torch, "autocast", Narrow)


# --- torchao's float8 layer ---


def torchao(kind: str, test: str, file: str, name: str, column: str = "torchao") -> Callable[[Wrap], Wrap]:
    """Make a fault of a function from torchao.float8.FILE.NAME to what takes its place."""

    def note(wrap: Wrap) -> Wrap:
        def plant(_: str) -> ContextManager[Any]:
            module = importlib.import_module("torchao.float8." + file)
            return mock.patch.object(module, name, wrap(getattr(module, name)))

        claim = test if "::" in test else f"{FLOAT8}::{test}"
        FAULTS.append(Fault(wrap.__name__.replace("_", " "), kind, "linear", column, "", (claim,), plant))
        return wrap

    return note


@torchao("wrong format", "test_formats", "float8_linear", "hp_tensor_to_float8_dynamic")
def the_other_format_in_every_cast(cast: Call) -> Call:
    other = {E4M3: E5M2, E5M2: E4M3}
    return lambda tensor, dtype, *given, **named: cast(tensor, other[dtype], *given, **named)


@torchao("wrong format", "test_formats", "float8_linear", "hp_tensor_to_float8_dynamic", "torchao.tensorwise")
def gradients_in_e4m3_too(cast: Call) -> Call:
    return lambda tensor, dtype, *given, **named: cast(tensor, E4M3, *given, **named)


@torchao("wrong format", "test_linear", "float8_training_tensor", "to_fp8_saturated")
def e4m3_values_rounded_to_e5m2_first(cast: Call) -> Call:
    return lambda values, dtype: cast(values.to(E5M2).float(), dtype)


@torchao("no FP8", "test_linear", "float8_linear", "hp_tensor_to_float8_dynamic")
def products_left_in_high_precision(cast: Call) -> Call:
    return lambda tensor, *given, **named: tensor.bfloat16() if tensor.is_cuda else tensor


@torchao("rounding", "test_linear", "float8_training_tensor", "to_fp8_saturated")
def layer_rounds_towards_zero(cast: Call) -> Call:
    return lambda values, dtype: towards_zero(values, cast(values, dtype))


@torchao("wrong scale", "test_linear", "float8_scaling_utils", "hp_tensor_and_scale_to_float8")
def scale_2_percent_off_on_the_way_back(cast: Call) -> Call:
    def off(*given: Any) -> Any:
        tensor = cast(*given)
        tensor._scale = tensor._scale * 1.02
        return tensor

    return off


@torchao("wrong scale", "test_linear", "float8_scaling_utils", "tensor_to_scale")
def scale_is_inverted(compute: Call) -> Call:
    return lambda *given, **named: 1 / compute(*given, **named)


@torchao("wrong scale", "test_linear", "float8_scaling_utils", "tensor_to_scale")
def scale_twice_as_large_as_fits(compute: Call) -> Call:
    return lambda *given, **named: 2 * compute(*given, **named)


@patched("another kernel", f"{FLOAT8}::test_products_ran_in_fp8", "torchao", "linear")
def each_product_of_the_layer_runs_twice(_: str) -> ContextManager[Any]:
    own = torch._scaled_mm
    return mock.patch.object(torch, "_scaled_mm", lambda *given, **named: [own(*given, **named) for _ in range(2)][1])


LARGEST = "test_largest_values_become_the_largest_code"


@torchao("wrong scale", LARGEST, "float8_utils", "amax_to_scale")
def scale_doubled_where_the_largest_value_is_above_448(compute: Call) -> Call:
    return lambda amax, *given, **named: compute(amax, *given, **named) * (1 + (amax > 448).float())


@torchao("wrong scale", LARGEST, "float8_utils", "amax_to_scale")
def scale_halved_where_the_largest_value_is_above_448(compute: Call) -> Call:
    return lambda amax, *given, **named: compute(amax, *given, **named) / (1 + (amax > 448).float())


@torchao("wrong scale", LARGEST, "float8_utils", "amax_to_scale")
def scale_halved_of_the_largest_row_alone(compute: Call) -> Call:
    return lambda amax, *given, **named: compute(amax, *given, **named) / (1 + (amax == amax.max()).float())


@torchao("amax not updated", "test_scales_follow_the_input", "float8_scaling_utils", "tensor_to_scale")
def scales_of_the_first_call_are_kept(compute: Call) -> Call:
    scales: Dict[Any, torch.Tensor] = {}

    def first(tensor: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        return scales.setdefault((tensor.shape, *map(str, given)), compute(tensor, *given, **named))

    return first


for _recipe in ("rowwise", "rowwise_with_gw_hp"):

    @torchao("wrong scale", "test_rows_have_their_own_scale", "float8_utils", "tensor_to_amax", "torchao." + _recipe)
    def all_rows_share_a_scale(largest: Call) -> Call:
        return lambda *given: (amax := largest(*given)).max().expand_as(amax)


def each_layer(change: Callable[[torch.nn.Module], Any]) -> Wrap:
    """Changes every layer that was converted."""

    @wraps(change)
    def wrap(convert: Call) -> Call:
        def converted(model: torch.nn.Module, keep: Callable[[str], bool]) -> torch.nn.Module:
            model = convert(model, keep)
            for layer in model.modules():
                if layer.__class__.__name__ == "Float8Linear":
                    change(layer)
            return model

        return converted

    return wrap


@wrong("no FP8", "linear", by="test_training.py::test_llama_follows_high_precision", column="torchao")
def layers_are_not_converted(convert: Call) -> Call:
    return lambda model, keep: model


@wrong("dropped gradient", "linear", by=f"{FLOAT8}::test_linear", column="torchao")
@each_layer
def no_gradient_of_the_bias(layer: torch.nn.Module) -> None:
    if layer.bias is not None:
        layer.bias.register_hook(torch.zeros_like)


@wrong("wrong gradient", "linear", by=f"{FLOAT8}::test_linear", column="torchao")
@each_layer
def gradient_of_the_weight_2_percent_too_large(layer: torch.nn.Module) -> None:
    layer.weight.register_hook(lambda gradient: gradient * 1.02)


@wrong("wrong scale", "linear", by=f"{FLOAT8}::test_linear", column="torchao")
@each_layer
def layer_output_2_percent_too_large(layer: torch.nn.Module) -> None:
    layer.register_forward_hook(lambda _, given, output: output * 1.02)


@wrong("stale state", "linear", by="test_training.py::test_llama_follows_high_precision", column="torchao")
@each_layer
def weight_of_the_first_step_is_kept(layer: torch.nn.Module) -> None:
    stale, own = layer.weight.detach().clone(), layer.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        current = layer.weight.detach().clone()
        layer.weight.data.copy_(stale)
        output: torch.Tensor = own(x)
        layer.weight.data.copy_(current)
        return output

    layer.forward = forward


@wrong("weight transposed", "linear", by=f"{FLOAT8}::test_linear", column="torchao")
@each_layer
def gradients_of_square_weights_transposed(layer: torch.nn.Module) -> None:
    if layer.in_features == layer.out_features:
        layer.weight.register_hook(lambda gradient: gradient.t())


# --- Transformer Engine's FP8 layers ---


def engine(kind: str, test: str, column: str = "transformer-engine") -> Callable[[Call], Call]:
    """Make a fault of a context manager that replaces something in Transformer Engine."""
    return patched(kind, "test_transformer_engine.py::test_" + test, column, "linear")


def each_forward(change: Callable[..., Any]) -> ContextManager[Any]:
    """The forward of te.Linear is change(its own, layer, ...)."""
    layer = importlib.import_module("transformer_engine.pytorch").Linear
    own = layer.forward
    return mock.patch.object(layer, "forward", lambda self, *given, **named: change(own, self, *given, **named))


@engine("no FP8", "products_ran_in_fp8")
def fp8_is_never_switched_on(_: str) -> ContextManager[Any]:
    module = importlib.import_module("transformer_engine.pytorch")
    name = "autocast" if hasattr(module, "autocast") else "fp8_autocast"
    enter = getattr(module, name)
    return mock.patch.object(module, name, lambda **named: enter(**{**named, "enabled": False}))


@engine("wrong format", "layer", "transformer-engine.delayed")
def gradients_of_the_engine_in_e4m3(_: str) -> ContextManager[Any]:
    module = importlib.import_module("transformer_engine.common.recipe")
    formats = {**module.Format.__members__, "HYBRID": module.Format.E4M3}
    return mock.patch.object(module, "Format", SimpleNamespace(**formats))


@engine("wrong scale", "layer")
def output_of_the_engine_2_percent_too_large(_: str) -> ContextManager[Any]:
    return each_forward(lambda own, *given, **named: own(*given, **named) * 1.02)


@engine("wrong gradient", "gradients_have_slope_1")
def gradients_of_the_engine_2_percent_too_large(_: str) -> ContextManager[Any]:
    def larger(own: Call, *given: Any, **named: Any) -> torch.Tensor:
        output = own(*given, **named)
        return backward_of(output, output * 1.02)

    return each_forward(larger)


@engine("stale state", "weight_updates_reach_the_copy")
def copy_of_the_weight_is_kept(_: str) -> ContextManager[Any]:
    def stale(own: Call, layer: Any, x: torch.Tensor, is_first_microbatch: Any = None, **named: Any) -> torch.Tensor:
        first, layer.copied = not hasattr(layer, "copied"), True
        return own(layer, x, is_first_microbatch=first, **named)

    return each_forward(stale)


def delayed_with(**others: Any) -> ContextManager[Any]:
    """Delayed scaling has these settings, whatever it is given."""
    kind = importlib.import_module("transformer_engine.common.recipe").DelayedScaling
    own = kind.__init__
    return mock.patch.object(kind, "__init__", lambda self, **named: own(self, **{**named, **others}))


@engine("amax history", "amax_history_is_as_long_as_asked", "transformer-engine.delayed")
def history_of_15_steps(_: str) -> ContextManager[Any]:
    return delayed_with(amax_history_len=15)


@engine("amax history", "amax_history_is_as_long_as_asked", "transformer-engine.delayed")
def the_most_recent_value_alone(_: str) -> ContextManager[Any]:
    return delayed_with(amax_compute_algo="most_recent")


@engine("bias", "products_of_one_sign", "transformer-engine.blockwise")
def forward_of_the_engine_without_a_split_accumulator(_: str) -> ContextManager[Any]:
    """As delayed scaling multiplies forward, in the recipe that promises to split."""

    def unsplit(own: Call, layer: Any, x: torch.Tensor, **named: Any) -> torch.Tensor:
        output: torch.Tensor = own(layer, x, **named)
        if layer.use_bias or x.dim() != 2:
            return output
        return backward_of(truncated(x.detach(), layer.weight.detach()).to(output.dtype), output)

    return each_forward(unsplit)


def scales_above_the_largest_code(factor: float) -> ContextManager[Any]:
    """Where the largest value is above the largest code, so that the scale is below 1, it is so many times as large."""
    manager = importlib.import_module("transformer_engine.pytorch.module.base").FP8GlobalStateManager
    extension = vars(sys.modules[manager.__module__])["tex"]
    own = extension.fused_amax_and_scale_update_after_reduction

    def update(reduced: torch.Tensor, histories: Any, scales: List[torch.Tensor], *others: Any) -> None:
        own(reduced, histories, scales, *others)
        for scale in scales:
            scale.mul_(torch.where(scale < 1, factor, 1.0))

    return mock.patch.object(extension, own.__name__, update)


@engine("wrong scale", "scales_follow", "transformer-engine.delayed")
def scale_of_the_engine_doubled_where_the_largest_value_is_above_448(_: str) -> ContextManager[Any]:
    return scales_above_the_largest_code(2.0)


@engine("wrong scale", "amax_history", "transformer-engine.delayed")
def scale_of_the_engine_halved_where_the_largest_value_is_above_448(_: str) -> ContextManager[Any]:
    return scales_above_the_largest_code(0.5)


@engine("amax not updated", "amax_history", "transformer-engine.delayed")
def delayed_scales_are_never_updated(_: str) -> ContextManager[Any]:
    scales = importlib.import_module("transformer_engine.pytorch.module.base").FP8GlobalStateManager
    return mock.patch.object(scales, "reduce_and_update_fp8_tensors", lambda *given, **named: None)


# --- checkpoints of transformers ---

CHECKPOINTS = "test_transformers.py::test_extra_state_is_"


def saving(change: Callable[[Dict[str, Any]], Dict[str, Any]]) -> ContextManager[Any]:
    """Models save what change makes of their state."""
    kind = importlib.import_module("transformers").PreTrainedModel
    save = kind.save_pretrained

    def saved(self: Any, *given: Any, **named: Any) -> None:
        save(self, *given, state_dict=change(self.state_dict()), **named)

    return mock.patch.object(kind, "save_pretrained", saved)


@patched("too few bits", CHECKPOINTS + "left_out_on_save", "transformers")
def weights_saved_with_the_bits_of_bfloat16(_: str) -> ContextManager[Any]:
    return saving(
        lambda state: {
            name: value.bfloat16().to(value.dtype) if isinstance(value, torch.Tensor) else value
            for name, value in state.items()
        }
    )


@patched("lost weight", CHECKPOINTS + "left_out_on_save", "transformers")
def last_weight_not_saved(_: str) -> ContextManager[Any]:
    return saving(lambda state: dict(list(state.items())[:-1]))


@patched("lost weight", CHECKPOINTS + "skipped_on_load", "transformers")
def one_weight_drawn_anew_on_load(_: str) -> ContextManager[Any]:
    kind = importlib.import_module("transformers").PreTrainedModel
    load = kind.from_pretrained.__func__

    def loaded(cls: Any, *given: Any, **named: Any) -> Any:
        model = load(cls, *given, **named)
        torch.nn.init.normal_(model.lm_head.weight, std=0.02)
        return model

    return mock.patch.object(kind, "from_pretrained", classmethod(loaded))


NEXT = "test_transformers.py::test_loss_is_of_the_next_token"


def entropy_of_mistral(
    change: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
) -> ContextManager[Any]:
    """A Mistral's loss is change(the right one, logits, labels), of the tokens that have a next one."""
    module = importlib.import_module("transformers.models.mistral.modeling_mistral")
    entropy = torch.nn.CrossEntropyLoss()
    return mock.patch.object(module, "CrossEntropyLoss", lambda: lambda x, y: change(entropy(x, y), x, y))


@patched("label shift", NEXT, "transformers")
def labels_of_the_loss_not_shifted(_: str) -> ContextManager[Any]:
    return entropy_of_mistral(lambda right, logits, labels: torch.nn.functional.cross_entropy(logits, labels.roll(1)))


@patched("wrong scale", NEXT, "transformers")
def sum_in_place_of_the_mean_loss(_: str) -> ContextManager[Any]:
    return entropy_of_mistral(lambda right, logits, labels: right * (labels >= 0).sum())


@patched("ignored labels", NEXT, "transformers")
def mean_loss_over_ignored_tokens_too(_: str) -> ContextManager[Any]:
    return entropy_of_mistral(lambda right, logits, labels: right * (labels >= 0).float().mean())


@patched("ignored labels", NEXT, "transformers")
def ignored_tokens_count_as_class_0_in_the_loss(_: str) -> ContextManager[Any]:
    return entropy_of_mistral(
        lambda right, logits, labels: torch.nn.functional.cross_entropy(logits, labels.clamp(min=0))
    )


# --- an environment that is not what was pinned; the column is a package ---

EVERY = "*"  # stands for each package that came as a wheel
PINNED = "test_environment.py::test_"


@lru_cache(maxsize=None)
def packages() -> Dict[str, Any]:
    """The packages of this environment, as its manifest has them."""
    manifest = json.loads(Path(sys.prefix, "fusebox", "manifest.json").read_text(encoding="utf-8"))
    listed: Dict[str, Any] = manifest["packages"]
    return listed


def file_of(package: str, ending: str) -> Path:
    """The first installed file of a package whose path ends like that and that is not empty."""
    files = importlib.metadata.files(package) or []
    return next(Path(str(file.locate())) for file in files if str(file).endswith(ending) and file.size)


def path_says(method: str, place: Path, answer: Call) -> ContextManager[Any]:
    """Path.METHOD() gives answer(what it gave) for one place."""
    own, place = getattr(Path, method), place.resolve()
    return mock.patch.object(Path, method, lambda self: answer(own(self)) if self == place else own(self))


@patched("not what was pinned", PINNED + "files_are_the_pinned_bytes", EVERY)
def one_bit_of_a_file_is_flipped(package: str) -> ContextManager[Any]:
    flip = lambda content: bytes([content[0] ^ 1]) + content[1:]  # noqa: E731
    return path_says("read_bytes", file_of(package, ".py"), flip)


@patched("extension missing", PINNED + "files_are_the_pinned_bytes", EVERY)
def a_compiled_extension_is_missing(package: str) -> ContextManager[Any]:
    return path_says("is_file", file_of(package, ".so"), lambda _: False)


@patched("patch not applied", PINNED + "patch_is_installed", EVERY)
def a_patched_file_is_another(package: str) -> ContextManager[Any]:
    path = next(path for patch in packages()[package]["patches"] for path in patch["installed"])
    return path_says("read_bytes", file_of(package, path), lambda content: content.replace(b" ", b"  ", 1))


@patched("not what was pinned", PINNED + "version_is_pinned", EVERY)
def another_version_is_installed(_: str) -> ContextManager[Any]:
    return mock.patch.object(importlib.metadata, "version", lambda package: "0.0.1")


@patched("not what was pinned", PINNED + "version_is_pinned", EVERY)
def the_module_calls_itself_another_version(package: str) -> ContextManager[Any]:
    module = importlib.import_module(packages()[package]["module"])
    return mock.patch.object(module, "__version__", "0.0.1", create=True)


@patched("not what was pinned", PINNED + "module_is_inside_the_environment", EVERY)
def the_module_comes_from_elsewhere(package: str) -> ContextManager[Any]:
    module = importlib.import_module(packages()[package]["module"])
    return mock.patch.object(module, "__file__", "/usr/lib/python3/dist-packages/module.py")


@patched("extension missing", "test_deepspeed.py::test_compiled_ahead_of_time", "deepspeed")
def the_optimizer_is_compiled_when_it_is_used(_: str) -> ContextManager[Any]:
    builder = importlib.import_module("deepspeed.ops.op_builder.builder").OpBuilder
    loaded = SimpleNamespace(__file__="/root/.cache/torch_extensions/cpu_adam/cpu_adam.so")
    return mock.patch.object(builder, "load", lambda self, verbose=True: loaded)


# --- why a survivor of the rule survives ---


class Reason(NamedTuple):
    """Why a mutant whose name matches the pattern survives; it is given only where what it says holds when it runs."""

    pattern: str
    words: str
    holds: Callable[[], bool]


def heads_are_grouped_alike() -> bool:
    """Whether torch's attention gives the same bits when key heads are repeated first."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    heads = [torch.randn(2, count, 37, 64, device=device).bfloat16() for count in (6, 2, 2)]
    return bool(torch.equal(torch_adapter.torch_attention(*heads), torch_adapter.attention_of_equal_heads(*heads)))


def last_of(dimensions: int, other: int, last: int) -> bool:
    """Whether two numbers name the same one of so many dimensions."""
    return range(dimensions)[other] == range(dimensions)[last]


def tables_grow_alike() -> bool:
    """Whether a table of transformers that starts with 7 or 9 positions is that which starts with 8, once it grew."""
    module = importlib.import_module("transformers.models.mistral.modeling_mistral")
    x = torch.randn(1, 1, 37, 24)
    grown = [module.MistralRotaryEmbedding(24, max_position_embeddings=n)(x, seq_len=37) for n in (7, 8, 9)]
    return all(torch.equal(*pair) for table in grown for pair in zip(table, grown[1]))


def table_is_replaced() -> bool:
    """Whether the table of a rotary embedding has the width of its angles after one call, whatever it had before."""
    rope = torch_adapter.TorchRope(24, 10000.0)
    rope.cosine = rope.sine = torch.empty(0, 7)
    rope(torch.randn(1, 1, 5, 24), 0)
    return bool(rope.cosine.shape == (5, 12))


def queries_turn_as_keys() -> bool:
    """Whether transformers turns queries and keys alike."""
    module = importlib.import_module("transformers.models.mistral.modeling_mistral")
    x, positions = torch.randn(1, 1, 37, 24), torch.arange(37)[None]
    tables = module.MistralRotaryEmbedding(24)(x, seq_len=37)
    return bool(torch.equal(*module.apply_rotary_pos_emb(x, x, *tables, positions)))


def sum_commutes() -> bool:
    """Whether Liger's norm of a sum has the same bits either way round."""
    x, residual = (torch.randn(5, 73, device="cuda").bfloat16() for _ in range(2))
    weight = torch.randn(73, device="cuda").bfloat16()
    ways = ((x, residual), (residual, x))
    return bool(torch.equal(*[liger_kernel_adapter.liger_add_rms_norm(*way, weight, 1e-5) for way in ways]))


def flash_gives_a_tensor() -> bool:
    """Whether flash-attn returns the result alone."""
    heads = torch.randn(1, 5, 2, 64, device="cuda").bfloat16()
    return isinstance(importlib.import_module("flash_attn").flash_attn_func(heads, heads, heads), torch.Tensor)


def labels_are_flattened() -> bool:
    """Whether Transformer Engine takes labels [1, rows] as it takes [rows, 1]."""
    entropy = importlib.import_module("transformer_engine.pytorch.cross_entropy").parallel_cross_entropy
    logits, labels = torch.randn(5, 1, 83, device="cuda"), torch.arange(5, device="cuda")
    ways = [entropy(logits.clone(), given, 0.0, True, None, -100) for given in (labels[:, None], labels[None])]
    return bool(torch.equal(*ways))


def base_is_its_own() -> bool:
    """Whether Transformer Engine's rotary embedding has the base 10000 by itself, or knows none."""
    attention = importlib.import_module("transformer_engine.pytorch.attention")
    make = getattr(attention, "rope", attention).RotaryPositionEmbedding.__init__
    named = inspect.signature(make).parameters.get("rotary_base")
    return named is None or named.default == 10000.0


def newer_than(major: int, minor: int) -> Callable[[], bool]:
    """Whether torch is newer than that when it is asked."""
    return lambda: torch_adapter.version_of_torch() > (major, minor)


def gpu_is_above() -> bool:
    """Whether there is no GPU to ask, or one above every capability that the rule makes of (8, 9) and that survives."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (9, 0)


WHY = [
    Reason(
        r"^torch_attention .*: (version|\(2, |[25]:)",
        "either way of grouping heads gives the same bits",
        heads_are_grouped_alike,
    ),
    Reason(r"^only .*: (2: 2 becomes 1|3: 3 becomes)", "this torch is newer than both", newer_than(2, 4)),
    Reason(r"_add_rms_norm .*: -1: ", "of two dimensions the second is the last", lambda: last_of(2, 1, -1)),
    Reason(r"Rope .*: -2: ", "of four dimensions the third is the last but one", lambda: last_of(4, 2, -2)),
    Reason(
        r"^TorchRope .*: 2: 2 becomes", "the width of a table that is replaced before it is read", table_is_replaced
    ),
    Reason(
        r"^TransformersRope .*: 8: ",
        "the table starts a little longer or shorter, and still has to grow",
        tables_grow_alike,
    ),
    Reason(r"^TransformersRope .*: (self.apply|0: 0)", "queries and keys are the same there", queries_turn_as_keys),
    Reason(
        r"^torch_scaled_mm .*: 0: 0 becomes",
        "what it chooses from is a tuple before torch 2.5 only",
        newer_than(2, 4),
    ),
    Reason(
        r"^flash_attention .*: 0: 0 becomes",
        "what it chooses from is a tuple in FlashAttention 4 only",
        flash_gives_a_tensor,
    ),
    Reason(r"^liger_add_rms_norm .* 1 swapped with 2", "a sum is the same either way round", sum_commutes),
    Reason(r"^LigerRope .*: \[(\w+), \1\]: 1 swapped", "the two have one name", lambda: True),  # as the pattern sees
    Reason(r"^LigerRope .*: -1: ", "of two dimensions the second is the last", lambda: last_of(2, 1, -1)),
    Reason(
        r"^TransformerEngineRope .*: 10000.0: ",
        "the base it leaves out is its own, and one beside that is given as well",
        base_is_its_own,
    ),
    Reason(
        r"^te_cross_entropy .*: :, None: ",
        "labels of one row each or of one row: they are flattened",
        labels_are_flattened,
    ),
    Reason(
        r"^torchao_linear .*: (torch.cuda|\(8, 9\)|8:|9:)",
        "the capability is asked of a GPU alone, and one of 9.0 is above either bound",
        gpu_is_above,
    ),
    Reason(
        r"^infer\.generate .*: -1: USub turned", "of two dimensions the second is the last", lambda: last_of(2, 1, -1)
    ),
    Reason(
        r"^guard\.distances .*(a, b|zip\(way\.losses, high\.losses\)): 1 swapped with 2",
        "a distance is the same either way round",
        lambda: abs(2.5 - 1.25) == abs(1.25 - 2.5),
    ),
    Reason(
        r"^guard\.distances .*max\(.*, TINY\): 1 swapped with 2",
        "the larger of two numbers is the same either way round",
        lambda: max(2.5, 1.25) == max(1.25, 2.5),
    ),
]
