"""Every implementation in the table of fused operators, against the float64 truth and against itself."""

from __future__ import annotations

import math
import random
import re
from typing import Any, Dict, Iterator, List, NamedTuple, Set

import pytest
import torch

from smoke_tests.claims import every, needs, proves
from smoke_tests.operators import attention_noise, bounds, references
from smoke_tests.operators import table as fused_ops
from smoke_tests.operators.kernels import gpu_kernels_run, gpu_launches
from smoke_tests.operators.known_cpu import known_cpu
from smoke_tests.operators.samples import EPS, IGNORED, Sample, assert_refused, mlp_sample, sample, sample_for
from smoke_tests.operators.table import OPERATORS, operator

__all__ = ["known_cpu"]  # a fixture

TERMS = 8192  # of the longest sum that a sample of many tiles makes


class Results(NamedTuple):
    """Output and gradients of an implementation, and those of the reference in float64."""

    computed: List[torch.Tensor]
    truth: List[torch.Tensor]


def results_of(name: str, column: str, given: Sample, device: str) -> Results:
    """Run an implementation and its reference, forward and backward."""
    call, reference = given.bind(operator(name, column), device), given.bind(getattr(references, name))
    return Results(
        bounds.forward_and_backward(call, given.inputs, given.gradient, device),
        bounds.in_float64(reference, given.inputs, given.gradient),
    )


def assert_equals_float64(
    results: Results, given: Sample, dtype: torch.dtype, device: str, measured: Dict[str, Any], terms: int = 64
) -> None:
    """Assert that output and gradients are those of float64, up to the roundings of the dtype."""
    computed, truth = map(list, results)
    if truth[0].dim() == 0:
        # One number has no noise to measure: each rounding moves it by half a spacing at most. A loss may come in
        # float32 from logits in fewer bits; in float32, and on a CPU in any dtype, the sum is rounded at every row.
        loss, true_loss = float(computed.pop(0)), float(truth.pop(0))
        sums = int((given.others[0] != IGNORED).sum()) if dtype is torch.float32 or device == "cpu" else 0
        off = abs(loss - true_loss) / abs(true_loss)
        most = (given.roundings + sums) * 2.0 ** -(bounds.MANTISSA[dtype] + 1)
        assert off <= most, f"a loss of {loss}, not {true_loss}"
    bounds.assert_as_in_float64(computed, truth, dtype, given.roundings, measured, terms=terms)


def assert_equals_float64_beyond(first: int, results: Results, given: Sample, dtype: torch.dtype, terms: int) -> None:
    """Assert that what lies behind the first so many rows, or numbers of a row, alone is that of float64.

    It is cut from each result that is longer, along its longest dimension: in the norm of the whole it may be too
    little to show.
    """
    tails = []
    for pair in zip(*results):
        longest = max(range(pair[0].dim()), key=lambda dim: pair[0].shape[dim], default=None)
        if longest is not None and pair[0].shape[longest] > first:
            tails.append([tensor.narrow(longest, first, tensor.shape[longest] - first) for tensor in pair])
    assert tails, "no result is longer: this measures nothing"
    computed, truth = map(list, zip(*tails))
    bounds.assert_as_in_float64(computed, truth, dtype, given.roundings, {}, terms=terms)


def of_one_text(given: Sample) -> Sample:
    """A sample of attention with its first text and half of its heads."""
    heads = [tensor[:1, : max(1, tensor.shape[1] // 2)] for tensor in given.inputs]
    return given._replace(inputs=heads, gradient=given.gradient[:1, : heads[0].shape[1]])


@every("attention")
@pytest.mark.parametrize("size", [40, 64, 128])
@proves(
    "causal attention with grouped heads and an odd length equals float64 forward and backward, or raises the error "
    "of a known limit",
    seed="B06",
    package="torch",
)
def test_attention(column: str, dtype: torch.dtype, size: int, device: str, measured: Dict[str, Any]) -> None:
    given = sample("attention", dtype, size=size)
    if f"head size {size}" in OPERATORS["attention"][column].limits:
        assert_refused(operator("attention", column), given.inputs, given.gradient, device, measured)
        return
    assert_equals_float64(results_of("attention", column, given, device), given, dtype, device, measured)


@every("attention", once=True)
@pytest.mark.parametrize("count", [129, 1025])
@proves(
    "causal attention of 129 and 1,025 tokens, no multiples of a tile, equals float64 forward and backward, and so do"
    " the tokens beyond the first 128 alone",
    package="torch",
)
def test_long_attention(column: str, dtype: torch.dtype, count: int, device: str, measured: Dict[str, Any]) -> None:
    given = of_one_text(sample_for("attention", column, dtype, count=count))
    parts = attention_noise.PARTS_ON_A_CPU if device == "cpu" else 1
    given = given._replace(roundings=given.roundings + parts - 1)
    results = results_of("attention", column, given, device)
    assert_equals_float64(results, given, dtype, device, measured, terms=count)
    attention_noise.assert_as_in_float64_beyond(128, *results, given.inputs, given.gradient, count, parts)


@every("attention", once=True)
@proves(
    "causal attention never looks ahead, at the edges of tiles and between them: different future tokens leave the "
    "past bit-equal",
    package="torch",
)
def test_attention_is_causal(column: str, dtype: torch.dtype, device: str) -> None:
    attention, length = operator("attention", column), 1025
    # The first token of the future, one batch each: an early one, the first or second of a tile, or any.
    edges = range(64, length, 64)
    second = [edge + 1 for edge in edges if edge % 128 == 0 and edge + 1 < length]
    nows = sorted({2, 19, *edges, *second, *random.sample(range(3, length), 4)})
    size = OPERATORS["attention"][column].size or 40
    later = (torch.arange(length) >= torch.tensor(nows)[:, None])[:, None, :, None]
    inputs = [torch.randn(1, heads, length, size).to(dtype).repeat(len(nows), 1, 1, 1) for heads in (2, 1, 1)]
    others = [torch.where(later, torch.randn(old[:1].shape).to(dtype), old) for old in inputs]
    gradient = torch.randn(inputs[0].shape).masked_fill(later, 0)
    before, *gradients = bounds.forward_and_backward(attention, inputs, gradient, device)
    after = attention(*[tensor.to(device) for tensor in others]).cpu()
    assert torch.equal(before.masked_fill(later, 0), after.masked_fill(later, 0))
    for index, now in enumerate(nows):
        assert not torch.equal(before[index, :, now], after[index, :, now]), f"token {now} sees nothing of itself"
        assert all((tensor[index, :, now - 1] != 0).any() for tensor in gradients), f"token {now - 1} has no gradient"
    assert all((tensor.masked_fill(~later, 0) == 0).all() for tensor in gradients)


@every("attention", once=True)
@proves(
    "where keys repeat, so that rows have several equal maxima, attention has no bias",
    package="torch",
)
def test_equal_maxima_have_no_bias(column: str, dtype: torch.dtype, device: str, measured: Dict[str, Any]) -> None:
    count, size = 257, OPERATORS["attention"][column].size or 64
    query, key = torch.randn(1, 6, count, size), torch.randn(1, 2, 7, size).repeat(1, 1, 37, 1)[:, :, :count]
    # All of one sign, each feature of another size, so that the spacings of the results differ.
    value = -(1 + torch.rand(1, 2, count, size)) * torch.exp2(torch.rand(size))
    inputs = [tensor.to(dtype) for tensor in (query, key, value)]
    attended = operator("attention", column)(*[tensor.to(device) for tensor in inputs]).cpu().double()
    truth = references.attention(*[tensor.double() for tensor in inputs])
    measured["bias"] = float((attended / truth - 1).mean())
    # A row's probabilities and each result are rounded; the error of the former is common to a row. The bound is four
    # times the scatter of the mean over these rows, if each rounding is as often up as down.
    most = 4 * bounds.ceiling(dtype, 2, terms=count) / math.sqrt(truth[..., 0].numel())
    assert abs(measured["bias"]) <= most, f"off by {measured['bias']:.3g} on average, which {most:.3g} would explain"


@every("rms_norm")
@pytest.mark.parametrize("scale", [1.0, 1e-4], ids=["ordinary", "tiny"])
@proves(
    "RMSNorm equals float64 forward and backward, eps under the root, also where the input is tiny",
    seed="B09",
    package="torch",
)
def test_rms_norm(column: str, dtype: torch.dtype, scale: float, device: str, measured: Dict[str, Any]) -> None:
    given = sample_for("rms_norm", column, dtype, scale=scale)
    assert_equals_float64(results_of("rms_norm", column, given, device), given, dtype, device, measured)


@every("rms_norm")
@proves(
    "RMSNorm in bfloat16 rounds once, after the weight; Liger and apex also round before the weight",
    package="torch",
)
def test_rms_norm_rounds_in_its_order(column: str, device: str, measured: Dict[str, Any]) -> None:
    given = sample_for("rms_norm", column, torch.bfloat16, count=257)
    x, weight = given.inputs
    normalized = operator("rms_norm", column)(x.to(device), weight.to(device), EPS).cpu()
    exact = references.rms_norm(x.double(), torch.ones(x.shape[1], dtype=torch.float64), EPS)
    late = (exact * weight.double()).bfloat16()
    early = (exact.bfloat16().double() * weight.double()).bfloat16()
    own, other = (early, late) if OPERATORS["rms_norm"][column].early else (late, early)
    measured["own"], measured["other"] = (float((normalized == rounded).double().mean()) for rounded in (own, other))
    assert (early != late).double().mean() > 0.1, "the two orders give the same: this measures nothing"
    # float32 is off by up to 40 roundings (a sum of 73 squares, a root), twice: in that share of a bfloat16 spacing,
    # 2^-8 at least, it rounds the other way. Doubled for a row that has fewer bits left.
    assert measured["own"] >= 1 - 2 * 2 * 40 * 2.0**-24 / 2.0**-8 * (x.shape[1] / 73), "not in the order it is said to"


@every("add_rms_norm")
@proves("RMSNorm of a sum with its residual equals float64 forward and backward, and so does the sum", package="torch")
def test_add_rms_norm(column: str, dtype: torch.dtype, device: str, measured: Dict[str, Any]) -> None:
    given = sample_for("add_rms_norm", column, dtype)
    assert_equals_float64(results_of("add_rms_norm", column, given, device), given, dtype, device, measured)


@every("cross_entropy")
@proves("cross entropy with ignored rows equals float64 forward and backward", seed="B08", package="torch")
def test_cross_entropy(column: str, dtype: torch.dtype, device: str, measured: Dict[str, Any]) -> None:
    given = sample("cross_entropy", dtype)
    assert_equals_float64(results_of("cross_entropy", column, given, device), given, dtype, device, measured)


@every("linear_cross_entropy")
@proves("the cross entropy of a linear layer's output equals float64 forward and backward", package="torch")
def test_linear_cross_entropy(column: str, dtype: torch.dtype, device: str, measured: Dict[str, Any]) -> None:
    given = sample("linear_cross_entropy", dtype)
    assert_equals_float64(results_of("linear_cross_entropy", column, given, device), given, dtype, device, measured)


@every("cross_entropy")
@proves(
    "the logits of ignored rows change no bit of the loss or of a gradient, and their own gradient is zero",
    package="torch",
)
def test_cross_entropy_ignores(column: str, dtype: torch.dtype, device: str) -> None:
    given = sample("cross_entropy", dtype)
    (logits,), ignored = given.inputs, given.others[0] == IGNORED
    others = torch.where(ignored[:, None], torch.randn(logits.shape).to(dtype) * 9, logits)
    assert not torch.equal(logits, others)
    call = given.bind(operator("cross_entropy", column), device)
    before, after = (bounds.forward_and_backward(call, [tensor], given.gradient, device) for tensor in (logits, others))
    assert all(torch.equal(*pair) for pair in zip(before, after))
    assert (before[1][ignored] == 0).all()


@every("swiglu")
@proves("SwiGLU equals float64 forward and backward", seed="B10", package="torch")
def test_swiglu(column: str, dtype: torch.dtype, device: str, measured: Dict[str, Any]) -> None:
    given = sample("swiglu", dtype)
    assert_equals_float64(results_of("swiglu", column, given, device), given, dtype, device, measured)


@every("swiglu")
@proves("SwiGLU equals float64 also where its result is near the largest number of the dtype", package="torch")
def test_large_swiglu(column: str, dtype: torch.dtype, device: str, measured: Dict[str, Any]) -> None:
    given = sample("swiglu", dtype)
    gate, up = given.inputs
    given = given._replace(inputs=[gate, up * (torch.finfo(dtype).max / 2**10)])
    assert_equals_float64(results_of("swiglu", column, given, device), given, dtype, device, measured)


@every("mlp")
@proves("SwiGLU with its three projections and their biases equals float64 forward and backward", package="torch")
def test_mlp(column: str, dtype: torch.dtype, device: str, measured: Dict[str, Any]) -> None:
    given = sample("mlp", dtype)
    assert_equals_float64(results_of("mlp", column, given, device), given, dtype, device, measured)


@every("rope")
@pytest.mark.parametrize("base", [10000.0, 5e5], ids=["1e4", "5e5"])
@proves(
    "RoPE equals the complex closed form of its base for position 0 and for a short, a long and a shifted call, or "
    "raises the error of a known limit for another base than 10000",
    seed="B07",
    package="torch",
)
def test_rope(column: str, dtype: torch.dtype, base: float, device: str, measured: Dict[str, Any]) -> None:
    make = operator("rope", column)
    if base != 10000.0 and "another base" in OPERATORS["rope"][column].limits:
        x = torch.randn(2, 3, 7, 24).to(dtype)
        assert_refused(lambda x: make(24, base)(x, 0), [x], torch.randn(x.shape), device, measured)
        return
    bounds.assert_rope_as_in_float64(make, base, dtype, device, measured)


@pytest.mark.usefixtures("known_cpu")
@every("adamw")
@proves(
    "fused AdamW follows the float64 algorithm over eight steps, decay decoupled, for each of 43 tensors",
    seed="B11",
    package="torch",
)
def test_adamw(column: str, device: str, measured: Dict[str, Any]) -> None:
    measured["error"] = bounds.assert_adamw_as_in_float64(operator("adamw", column), device)


@pytest.mark.usefixtures("known_cpu")
@every("adamw")
@proves(
    "fused AdamW with zero gradients only decays each of 43 tensors: p * (1 - lr * weight_decay)",
    seed="B11",
    package="torch",
)
def test_adamw_decays_without_gradient(column: str, device: str) -> None:
    bounds.assert_adamw_decays(operator("adamw", column), device)


@every("rms_norm", "add_rms_norm", "swiglu", "mlp", "cross_entropy", "linear_cross_entropy", once=True)
@proves(
    "an operator equals float64 forward and backward also over many tiles, and so does what lies beyond 1,024 alone: "
    "hundreds of rows of 4,096, or of 32,003 classes",
    package="torch",
)
def test_many_tiles(name: str, column: str, dtype: torch.dtype, device: str, measured: Dict[str, Any]) -> None:
    entropy = name in ("cross_entropy", "linear_cross_entropy")
    long = {"width": 32003} if entropy else {"features": 4096, "width": 4096}
    sizes = {"count": 1025 if device == "cuda" and not entropy else 131, **long}
    if name == "mlp":
        given = mlp_sample(dtype, 131, features=4096, width=1344)  # no multiple of 128 between its projections
    else:
        given = sample_for(name, column, dtype, **sizes)
    results = results_of(name, column, given, device)
    assert_equals_float64(results, given, dtype, device, measured, terms=TERMS)
    assert_equals_float64_beyond(1024, results, given, dtype, terms=TERMS)


# --- over all operators ---


@every("attention", "rms_norm", "add_rms_norm", "swiglu", "mlp", "cross_entropy", "linear_cross_entropy", once=True)
@proves("a single row or token gives the result of float64, or the error of a known limit", package="torch")
def test_one_row(name: str, column: str, dtype: torch.dtype, device: str, measured: Dict[str, Any]) -> None:
    given = sample_for(name, column, dtype, count=1)
    if "one row" in OPERATORS[name][column].limits:
        assert_refused(given.bind(operator(name, column), device), given.inputs, given.gradient, device, measured)
        return
    computed = bounds.forward_and_backward(
        given.bind(operator(name, column), device), given.inputs, given.gradient, device
    )
    truth = bounds.in_float64(given.bind(getattr(references, name)), given.inputs, given.gradient)
    # With attention to a single token, some gradients are zero, so errors are relative to the largest result, or to the
    # largest input for a loss, which is the difference of two logits and no more exact than they are.
    of_loss = given.inputs if truth[0].dim() == 0 else []
    largest = max([float(tensor.norm()) for tensor in truth] + [float(tensor.abs().max()) for tensor in of_loss])
    ceiling = bounds.ceiling(dtype, given.roundings, max(tensor.numel() for tensor in truth))
    measured["error"] = max(float((result.double() - true).norm()) / largest for result, true in zip(computed, truth))
    assert measured["error"] <= ceiling, f"relative error {measured['error']:.3g} is above {ceiling:.3g}"


@every("attention", "rms_norm", "add_rms_norm", "swiglu", once=True)
@proves(
    "an input without rows gives an output without rows and gradients that are zero, or the error of a known limit",
    package="torch",
)
def test_no_rows(name: str, column: str, dtype: torch.dtype, device: str, measured: Dict[str, Any]) -> None:
    given = sample_for(name, column, dtype, count=3)
    inputs = [tensor if tensor.dim() == 1 else tensor[:0] for tensor in given.inputs]
    call = given.bind(operator(name, column), device)
    if "no rows" in OPERATORS[name][column].limits:
        assert_refused(call, inputs, given.gradient[:0], device, measured)
        return
    output, *gradients = bounds.forward_and_backward(call, inputs, given.gradient[:0], device)
    assert output.shape == given.gradient[:0].shape
    assert [tensor.shape for tensor in gradients] == [tensor.shape for tensor in inputs]
    assert all((tensor == 0).all() for tensor in gradients)


def swept(name: str, column: str, dtype: torch.dtype) -> Sample:
    """Input for an operator, each row sweeping -30 .. 30 with zeros, subnormals and 1e5 in between.

    It is [5, 120], or as long as the implementation wants its rows; of attention [5, 3 * 40], or as it wants its heads.

    1e5 is beyond float16: what goes through it without being in it becomes infinite.
    """
    smallest, large = torch.finfo(dtype).tiny / 4, 1e5 if dtype is not torch.float16 else 100.0
    special = torch.tensor([0.0, smallest, -smallest, large, -large])
    size = OPERATORS[name][column].size
    width = 3 * (size or 40) if name == "attention" else max(120, size)
    sweep = torch.stack([torch.linspace(-30, 30, width).roll(shift) for shift in range(5)])
    sweep[:, :: width // 5][:, :5] = special
    x = sweep.to(dtype)
    if name == "attention":
        heads = x.view(1, 1, 15, width // 3)
        scored = heads.clamp(-1e4, 1e4)  # scores of 1e10 would be 1024 apart, and no softmax is computed twice alike
        return Sample([scored, scored, heads], (), torch.ones_like(heads).float(), 0)
    if name == "cross_entropy":
        return Sample([x], (torch.arange(5), IGNORED), torch.ones(()), 0)
    if name == "rms_norm":
        return Sample([torch.cat([x, torch.zeros_like(x[:1])]), x[0]], (EPS,), torch.ones(6, width), 0)
    return Sample([x, x.flip(0)], (), torch.ones(5, width), 0)


every_operator = every("attention", "cross_entropy", "rms_norm", "swiglu", once=True)


@every_operator
@proves("inputs from -30 to 30, zeros, subnormals and 1e5 give finite outputs and gradients", package="torch")
def test_extremes_stay_finite(name: str, column: str, dtype: torch.dtype, device: str) -> None:
    given = swept(name, column, dtype)
    call = given.bind(operator(name, column), device)
    for tensor in bounds.forward_and_backward(call, given.inputs, given.gradient, device):
        assert tensor.isfinite().all()


@every_operator
@proves(
    "twenty runs on the same 2,051 tokens give the same bits, and so does backward where attention is asked to be "
    "deterministic and can be",
    package="torch",
)
def test_runs_are_bit_equal(
    name: str, column: str, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attends = name == "attention"
    given = sample_for(name, column, dtype, count=2051)
    if attends and device == "cpu":  # all of it would take four times as long
        given = of_one_text(given)
    call = given.bind(operator(name, column), device)
    # Blocks add to the gradient of queries as each finishes, in a random order unless told otherwise.
    ordered = not attends or fused_ops.repeats(column)
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")  # Transformer Engine's own way to be told
    torch.use_deterministic_algorithms(attends and ordered)
    try:
        runs = (bounds.forward_and_backward(call, given.inputs, given.gradient, device) for _ in range(20))
        first = next(runs)
        for run in runs:
            assert all(torch.equal(*pair) for pair in zip(first[: None if ordered else 1], run))
    finally:
        torch.use_deterministic_algorithms(False)


every_tensor = every(
    "attention", "rms_norm", "add_rms_norm", "swiglu", "mlp", "cross_entropy", "linear_cross_entropy", once=True
)


@every_tensor
@proves(
    "inputs keep their bits forward and backward, except in implementations that are known to overwrite them with "
    "their gradients",
    package="torch",
)
def test_inputs_keep_their_bits(name: str, column: str, dtype: torch.dtype, device: str) -> None:
    given = sample_for(name, column, dtype)
    leaves = [torch.nn.Parameter(tensor.to(device, copy=True)) for tensor in given.inputs]
    others = [other.to(device, copy=True) if isinstance(other, torch.Tensor) else other for other in given.others]
    output = operator(name, column)(*leaves, *others)
    output.backward(given.gradient.to(output))
    same = [torch.equal(leaf.detach().cpu(), tensor) for leaf, tensor in zip(leaves, given.inputs)]
    if "own input" in OPERATORS[name][column].limits:
        assert not any(same), f"it leaves an input alone: take that limit out of the table; same: {same}"
        assert all(torch.equal(leaf.detach(), leaf.grad) for leaf in leaves)
    else:
        assert all(same), f"same: {same}"
    assert all(torch.equal(a.cpu(), b) for a, b in zip(others, given.others) if isinstance(b, torch.Tensor))


def poison(given: Sample, device: str) -> None:
    """Fill with NaN, and free, the memory that an operator's tensors will lie in."""
    if device == "cuda":
        torch.cuda.empty_cache()  # cached blocks may still hold the right results of an earlier call
        # torch takes 2 MiB from the driver for tensors of up to 1 MiB, and 20 MiB for those of up to 10 MiB. Bytes of
        # 255 are NaN in every floating-point dtype.
        sizes = [*sorted(free_beside_tensors()), *[2**20] * 32, *[20 * 2**20] * 4]
        held = [torch.full((size,), 255, dtype=torch.uint8, device=device) for size in sizes]
    else:
        shapes = [tensor.shape for tensor in (*given.inputs, given.gradient)]
        kinds = (given.inputs[0].dtype, torch.float32)
        held = [torch.full(shape, math.nan, dtype=kind, device=device) for shape in shapes * 8 for kind in kinds]
    del held


def free_beside_tensors() -> Iterator[int]:
    """The sizes, in bytes, of tensors that fill the free memory beside tensors in use, if smaller ones are made first.

    torch puts a tensor into the smallest free piece in which it fits, and these are smaller than new ones.
    """
    for segment in torch.cuda.memory_snapshot():
        largest = 2**20 if segment["segment_type"] == "small" else segment["total_size"]
        for block in segment["blocks"]:
            if block["state"] == "inactive":
                yield from [largest] * (block["size"] // largest)
                yield block["size"] % largest


@every_tensor
@proves("output and gradients are also right in memory that held NaN before", package="torch")
def test_memory_is_written_before_it_is_read(
    name: str, column: str, dtype: torch.dtype, device: str, measured: Dict[str, Any]
) -> None:
    given = sample_for(name, column, dtype)
    # The first call compiles and tunes, which also takes memory.
    bounds.forward_and_backward(given.bind(operator(name, column), device), given.inputs, given.gradient, device)
    poison(given, device)
    assert_equals_float64(results_of(name, column, given, device), given, dtype, device, measured)


@needs(cuda=True)
@every_tensor
@proves(
    "output and gradients are complete for the next work on the current stream, without synchronizing", package="torch"
)
def test_results_are_there_at_once(name: str, column: str, dtype: torch.dtype, device: str) -> None:
    given = sample_for(name, column, dtype)
    call = given.bind(operator(name, column), device)
    bounds.forward_and_backward(call, given.inputs, given.gradient, device)  # compile and tune now
    leaves = [torch.nn.Parameter(tensor.to(device)) for tensor in given.inputs]
    gradient = given.gradient.to(device)
    torch.cuda.synchronize()
    output = call(*leaves)
    early = [output.detach().clone()]
    output.backward(gradient.to(output))
    early += [leaf.grad.clone() for leaf in leaves if leaf.grad is not None]
    torch.cuda.synchronize()
    late = [output.detach(), *[leaf.grad for leaf in leaves if leaf.grad is not None]]
    assert all(torch.equal(*pair) for pair in zip(early, late))
    assert all(tensor.isfinite().all() for tensor in late)


# --- what ran ---

# The kernels of an AdamW without a fused one, by what each computes; a count of steps is no part of it.
UNFUSED = re.compile(r"lerp|addc(mul|div)|sqrt|MulFunctor|multiplies|DivFunctor|divides|PointwiseOp", re.IGNORECASE)


def assert_ran(kernels: Set[str], pattern: str, when: str) -> str:
    """Assert that a kernel of that name ran; which one."""
    named = sorted(name for name in kernels if re.search(pattern, name))
    assert named, f"no kernel like {pattern} ran {when}, but " + ", ".join(sorted(kernels))
    return named[0]


@every("linear")
@proves(
    "every Linear of a model except those to keep is replaced by a layer of its sizes with the same weights and no "
    "others",
    package="torch",
)
def test_linear_takes_the_place(column: str, dtype: torch.dtype, device: str) -> None:
    inner = torch.nn.Sequential(torch.nn.Linear(32, 48, bias=False), torch.nn.Linear(48, 32))
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), inner).to(device, dtype)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    sizes = [(32, 32), (32, 48), (48, 32)]
    operator("linear", column)(model, lambda name: name == "1.1")
    layers = {name: layer for name, layer in model.named_modules() if hasattr(layer, "in_features")}
    assert {name for name, layer in layers.items() if type(layer) is torch.nn.Linear} == {"1.1"}
    assert [(layer.in_features, layer.out_features) for layer in layers.values()] == sizes
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


@needs(cuda=True)
@every("attention", "rms_norm", "add_rms_norm", "cross_entropy", "linear_cross_entropy", "swiglu", "mlp", seen=True)
@proves("an operator runs the fused kernel of its own implementation, forward and backward", package="torch")
def test_own_kernels_ran(name: str, column: str, dtype: torch.dtype, device: str, measured: Dict[str, Any]) -> None:
    entry, given = OPERATORS[name][column], sample_for(name, column, dtype)
    call = given.bind(entry.call, device)
    bounds.forward_and_backward(call, given.inputs, given.gradient, device)  # compile and tune now
    leaves = [torch.nn.Parameter(tensor.to(device)) for tensor in given.inputs]
    outputs: List[torch.Tensor] = []
    forward = gpu_kernels_run(lambda: outputs.append(call(*leaves)))
    backward = gpu_kernels_run(lambda: outputs[0].backward(given.gradient.to(outputs[0])))
    measured["forward"] = assert_ran(forward, entry.forward, "forward")
    measured["backward"] = assert_ran(backward, entry.backward, "backward")


@needs(cuda=True)
@every("rope", seen=True)
@proves("RoPE runs the fused kernel of its own implementation, forward and backward", package="torch")
def test_own_rope_ran(column: str, dtype: torch.dtype, device: str, measured: Dict[str, Any]) -> None:
    entry, rotate = OPERATORS["rope"][column], operator("rope", column)(24, 10000.0)
    x = torch.nn.Parameter(torch.randn(2, 3, 37, 24, device=device).to(dtype))
    if column == "torch.compile":
        torch._dynamo.reset()  # beyond a limit of cases, it silently stops compiling a function
    rotate(x, 0).sum().backward()  # compile and tune now
    outputs: List[torch.Tensor] = []
    forward = gpu_kernels_run(lambda: outputs.append(rotate(x, 0)))
    backward = gpu_kernels_run(outputs[0].sum().backward)
    measured["forward"] = assert_ran(forward, entry.forward, "forward")
    measured["backward"] = assert_ran(backward, entry.backward, "backward")


@needs(cuda=True)
@every("adamw", seen=True)
@proves(
    "a step of AdamW runs the fused kernel of its own implementation once, and no unfused kernel",
    seed="B11",
    package="torch",
)
def test_own_adamw_ran(column: str, device: str, measured: Dict[str, Any]) -> None:
    parameter = torch.nn.Parameter(torch.randn(5, device=device))
    parameter.grad = torch.randn(5, device=device)
    optimizer = operator("adamw", column)([parameter], **bounds.ADAMW)
    optimizer.step()
    launches, own = gpu_launches(optimizer.step), OPERATORS["adamw"][column].forward
    measured["kernel"] = assert_ran(set(launches), own, "in a step")
    assert sum(len(times) for kernel, times in launches.items() if re.search(own, kernel)) == 1
    beside = [kernel for kernel in launches if UNFUSED.search(kernel) and not re.search(own, kernel)]
    assert not beside, f"beside it ran {beside}"
