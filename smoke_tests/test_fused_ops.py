"""Every implementation in the table of fused operators, against the float64 truth and against itself."""

from __future__ import annotations

import math
import re
from typing import Any, Callable, Dict, List, NamedTuple, Set, Tuple

import pytest
import torch

import bounds
import references
from claims import every, needs, proves
from fused_ops import OPERATORS, operator
from kernels import cuda_errors, gpu_kernels_run

IGNORED = -100
EPS = 1e-5
LONG = 4099  # longer than any vector register and no multiple of one, so that vector code and its tail both run

Operator = Callable[..., torch.Tensor]


class Sample(NamedTuple):
    """What an operator is given: tensors with gradients, further arguments, and the gradient of its output.

    roundings: how many roundings to the dtype an honest implementation makes on the way to its worst result.
    """

    inputs: List[torch.Tensor]
    others: Tuple[Any, ...]
    gradient: torch.Tensor
    roundings: int

    def bind(self, call: Operator, device: str = "cpu") -> Operator:
        """The operator as a function of the tensors with gradients alone."""
        others = [other.to(device) if isinstance(other, torch.Tensor) else other for other in self.others]
        return lambda *inputs: call(*inputs, *others)


def labels_for(count: int, vocabulary: int) -> torch.Tensor:
    """Labels [count], of which every third is ignored, but never all."""
    labels = torch.randint(vocabulary, (count,))
    labels[1::3] = IGNORED
    return labels


def sample(
    name: str, dtype: torch.dtype, count: int = 37, size: int = 40, scale: float = 1.0, features: int = 73
) -> Sample:
    """Random input for an operator: `count` rows (or tokens), odd sizes.

    size: of a head; scale: of x; features: the length of its rows.
    """

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape).to(dtype)

    x = [(torch.randn(count, features) * scale).to(dtype) for _ in range(2)]
    if name == "attention":
        # Three query heads share a key head. Rounded on the way: probabilities, their gradient and that of the scores,
        # each head's result, the sum over a group, the result.
        heads = [draw(2, heads, count, size) for heads in (6, 2, 2)]
        return Sample(heads, (), draw(2, 6, count, size), 6)
    if name == "rms_norm":  # rounded: the normalized row, its product with the weight or the gradient, the result
        return Sample([x[0], draw(features)], (EPS,), draw(count, features), 3)
    if name == "add_rms_norm":  # rounded: the sum, the normalized row, the result, the sum of two gradients
        return Sample([*x, draw(features)], (EPS,), draw(count, 2 * features), 4)
    if name == "cross_entropy":  # rounded: the log-probabilities, the probabilities, the result
        return Sample([(torch.randn(count, 83) * 4).to(dtype)], (labels_for(count, 83), IGNORED), torch.ones(()), 3)
    if name == "linear_cross_entropy":
        # Logits near 1, so that rounding them moves the probabilities by no more than a rounding of those. Rounded:
        # logits, log-probabilities, probabilities, the result; a weight gradient summed in parts, once a part.
        weight = (torch.randn(83, features) / math.sqrt(features)).to(dtype)
        return Sample([x[0], weight], (labels_for(count, 83), IGNORED), torch.ones(()), 8)
    if name == "mlp":
        # Sizes that products by tensor cores take, each other than the next. Rounded on the way to the gradient of x:
        # both projections, silu; the gradients of the product, silu, both projections, of x from each, and their sum.
        shapes = ((88, 72), (88, 72), (72, 88))
        weights = [(torch.randn(*shape) / math.sqrt(shape[1])).to(dtype) for shape in shapes]
        return Sample([draw(count, 72), *weights, draw(88), draw(88), draw(72)], (), draw(count, 72), 10)
    assert name == "swiglu", name  # rounded: silu(gate), its derivative, the result; gates up to 16 or so
    return Sample([draw(count, 83) * 4, draw(count, 83)], (), draw(count, 83), 3)


def sample_for(name: str, column: str, dtype: torch.dtype, **sizes: Any) -> Sample:
    """A sample with rows, or heads, of a length that this implementation takes."""
    taken = OPERATORS[name][column].size
    return sample(name, dtype, **({"size": taken, "features": taken} if taken else {}), **sizes)


def assert_equals_float64(
    name: str, column: str, given: Sample, dtype: torch.dtype, device: str, measured: Dict[str, Any]
) -> None:
    """Assert that output and gradients are those of float64, up to the roundings of the dtype."""
    found = bounds.forward_and_backward(
        given.bind(operator(name, column), device), given.inputs, given.gradient, device
    )
    truth = bounds.in_float64(given.bind(getattr(references, name)), given.inputs, given.gradient)
    if truth[0].dim() == 0:
        # One number has no noise to measure: each rounding moves it by half a spacing at most. A loss may come in
        # float32 from logits in fewer bits; in float32, and on a CPU in any dtype, the sum is rounded at every row.
        loss, true_loss = float(found.pop(0)), float(truth.pop(0))
        sums = int((given.others[0] != IGNORED).sum()) if dtype is torch.float32 or device == "cpu" else 0
        off = abs(loss - true_loss) / abs(true_loss)
        most = (given.roundings + sums) * 2.0 ** -(bounds.MANTISSA[dtype] + 1)
        assert off <= most, f"a loss of {loss}, not {true_loss}"
    bounds.assert_as_in_float64(found, truth, dtype, given.roundings, measured)


@every("attention")
@pytest.mark.parametrize("size", [40, 64, 128])
@proves(
    "causal attention with grouped heads and an odd length equals float64 forward and backward, or is the error of a "
    "known limit",
    seed="B06",
    package="torch",
)
def test_attention(column: str, dtype: torch.dtype, size: int, device: str, measured: Dict[str, Any]) -> None:
    if f"head size {size}" in OPERATORS["attention"][column].limits:
        given = sample("attention", dtype, size=size)
        assert_refused(operator("attention", column), given.inputs, given.gradient, device, measured)
        return
    assert_equals_float64("attention", column, sample("attention", dtype, size=size), dtype, device, measured)


@every("attention")
@proves("causal attention never looks ahead: other future tokens leave the past bit-equal", package="torch")
def test_attention_is_causal(column: str, dtype: torch.dtype, device: str) -> None:
    attention, now = operator("attention", column), 19
    given, new = (sample_for("attention", column, dtype) for _ in range(2))
    others = [torch.cat([old[:, :, :now], new[:, :, now:]], 2) for old, new in zip(given.inputs, new.inputs)]
    gradient = given.gradient.clone()
    gradient[:, :, now:] = 0
    before, *gradients = bounds.forward_and_backward(attention, given.inputs, gradient, device)
    after, *_ = bounds.forward_and_backward(attention, others, gradient, device)
    assert torch.equal(before[:, :, :now], after[:, :, :now])
    assert not torch.equal(before[:, :, now], after[:, :, now])
    assert all((tensor[:, :, now:] == 0).all() for tensor in gradients)
    assert all((tensor[:, :, now - 1] != 0).any() for tensor in gradients)


@every("rms_norm")
@pytest.mark.parametrize("scale", [1.0, 1e-4], ids=["ordinary", "tiny"])
@proves(
    "RMSNorm equals float64 forward and backward, eps under the root, also where the input is tiny",
    seed="B09",
    package="torch",
)
def test_rms_norm(column: str, dtype: torch.dtype, scale: float, device: str, measured: Dict[str, Any]) -> None:
    given = sample_for("rms_norm", column, dtype, scale=scale)
    assert_equals_float64("rms_norm", column, given, dtype, device, measured)


@every("add_rms_norm")
@proves("RMSNorm of a sum with its residual equals float64 forward and backward, and so does the sum", package="torch")
def test_add_rms_norm(column: str, dtype: torch.dtype, device: str, measured: Dict[str, Any]) -> None:
    given = sample_for("add_rms_norm", column, dtype)
    assert_equals_float64("add_rms_norm", column, given, dtype, device, measured)


@every("cross_entropy")
@proves("cross entropy with ignored rows equals float64 forward and backward", seed="B08", package="torch")
def test_cross_entropy(column: str, dtype: torch.dtype, device: str, measured: Dict[str, Any]) -> None:
    assert_equals_float64("cross_entropy", column, sample("cross_entropy", dtype), dtype, device, measured)


@every("linear_cross_entropy")
@proves("the cross entropy of a linear layer's output equals float64 forward and backward", package="torch")
def test_linear_cross_entropy(column: str, dtype: torch.dtype, device: str, measured: Dict[str, Any]) -> None:
    given = sample("linear_cross_entropy", dtype)
    assert_equals_float64("linear_cross_entropy", column, given, dtype, device, measured)


@every("cross_entropy")
@proves("cross entropy does not look at ignored rows: other logits there move nothing", package="torch")
def test_cross_entropy_ignores(column: str, dtype: torch.dtype, device: str) -> None:
    given = sample("cross_entropy", dtype)
    (logits,), ignored = given.inputs, given.others[0] == IGNORED
    others = torch.where(ignored[:, None], torch.randn(logits.shape).to(dtype) * 9, logits)
    assert not torch.equal(logits, others)
    call = given.bind(operator("cross_entropy", column), device)
    before, after = (bounds.forward_and_backward(call, [one], given.gradient, device) for one in (logits, others))
    assert all(torch.equal(*pair) for pair in zip(before, after))
    assert (before[1][ignored] == 0).all()


@every("swiglu")
@proves("SwiGLU equals float64 forward and backward", seed="B10", package="torch")
def test_swiglu(column: str, dtype: torch.dtype, device: str, measured: Dict[str, Any]) -> None:
    assert_equals_float64("swiglu", column, sample("swiglu", dtype), dtype, device, measured)


@every("swiglu")
@proves("SwiGLU equals float64 also where its result is near the largest number of the dtype", package="torch")
def test_large_swiglu(column: str, dtype: torch.dtype, device: str, measured: Dict[str, Any]) -> None:
    given = sample("swiglu", dtype)
    gate, up = given.inputs
    given = given._replace(inputs=[gate, up * (torch.finfo(dtype).max / 2**10)])
    assert_equals_float64("swiglu", column, given, dtype, device, measured)


@every("mlp")
@proves("SwiGLU with its three projections and their biases equals float64 forward and backward", package="torch")
def test_mlp(column: str, dtype: torch.dtype, device: str, measured: Dict[str, Any]) -> None:
    assert_equals_float64("mlp", column, sample("mlp", dtype), dtype, device, measured)


@every("rope")
@proves("RoPE equals the complex closed form: position 0, a short, a long, a shifted call", seed="B07", package="torch")
def test_rope(column: str, dtype: torch.dtype, device: str, measured: Dict[str, Any]) -> None:
    bounds.assert_rope_as_in_float64(operator("rope", column), dtype, device, measured)


@every("adamw")
@proves("fused AdamW follows the float64 algorithm over eight steps, decay decoupled", seed="B11", package="torch")
def test_adamw(column: str, device: str, measured: Dict[str, Any]) -> None:
    measured["error"] = bounds.assert_adamw_as_in_float64(operator("adamw", column), LONG, device)


@every("adamw")
@proves("fused AdamW with zero gradients only decays: p * (1 - lr * weight_decay)", seed="B11", package="torch")
def test_adamw_decays_without_gradient(column: str, device: str) -> None:
    bounds.assert_adamw_decays(operator("adamw", column), LONG, device)


# --- over all operators ---


def assert_refused(
    call: Operator, inputs: List[torch.Tensor], gradient: torch.Tensor, device: str, measured: Dict[str, Any]
) -> None:
    """Assert that a known limit ends in an error rather than in numbers."""
    errors = []
    try:
        bounds.forward_and_backward(call, inputs, gradient, device)
    except Exception as error:  # each implementation has its own
        errors.append("{}: {}".format(type(error).__name__, str(error).splitlines()[0]))
    while device == "cuda" and (left := cuda_errors()) and len(errors) < 9:  # one more per unchecked launch
        errors += left
    assert errors, "a known limit was computed: take it out of the table"
    measured["limit"] = errors[0]


@every("attention", "rms_norm", "add_rms_norm", "swiglu", "mlp", "cross_entropy", "linear_cross_entropy", once=True)
@proves("a single row, or token, comes out as in float64, or as the error of a known limit", package="torch")
def test_one_row(name: str, column: str, dtype: torch.dtype, device: str, measured: Dict[str, Any]) -> None:
    given = sample_for(name, column, dtype, count=1)
    if "one row" in OPERATORS[name][column].limits:
        assert_refused(given.bind(operator(name, column), device), given.inputs, given.gradient, device, measured)
        return
    found = bounds.forward_and_backward(
        given.bind(operator(name, column), device), given.inputs, given.gradient, device
    )
    truth = bounds.in_float64(given.bind(getattr(references, name)), given.inputs, given.gradient)
    # Of attention to a single token some gradients are zero, so what is measured against is the largest result; or
    # input, for a loss, which is the difference of two logits and no more exact than those.
    of_loss = given.inputs if truth[0].dim() == 0 else []
    largest = max([float(tensor.norm()) for tensor in truth] + [float(tensor.abs().max()) for tensor in of_loss])
    ceiling = bounds.ceiling(dtype, given.roundings, max(tensor.numel() for tensor in truth))
    measured["error"] = max(float((one.double() - true).norm()) / largest for one, true in zip(found, truth))
    assert measured["error"] <= ceiling, f"relative error {measured['error']:.3g} is above {ceiling:.3g}"


@every("attention", "rms_norm", "add_rms_norm", "swiglu", once=True)
@proves("no rows come out as no rows with no gradient, or as the error of a known limit", package="torch")
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
@proves("twenty runs on the same input give the same bits, forward and backward", package="torch")
def test_runs_are_bit_equal(name: str, column: str, dtype: torch.dtype, device: str) -> None:
    given = swept(name, column, dtype)
    call, gradient = given.bind(operator(name, column), device), torch.randn(given.gradient.shape)
    first, *others = (bounds.forward_and_backward(call, given.inputs, gradient, device) for _ in range(20))
    assert all(torch.equal(*pair) for run in others for pair in zip(first, run))


# --- what ran ---


def assert_ran(found: Set[str], pattern: str, when: str) -> str:
    """Assert that a kernel of that name ran; which one."""
    named = sorted(name for name in found if re.search(pattern, name))
    assert named, f"no kernel like {pattern} ran {when}, but " + ", ".join(sorted(found))
    return named[0]


@every("linear")
@proves("of a model each Linear but those kept is another in its place, with its weights and no more", package="torch")
def test_linear_takes_the_place(column: str, dtype: torch.dtype, device: str) -> None:
    inner = torch.nn.Sequential(torch.nn.Linear(32, 48, bias=False), torch.nn.Linear(48, 32))
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), inner).to(device, dtype)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    operator("linear", column)(model, lambda name: name == "1.1")
    plain = {name for name, layer in model.named_modules() if type(layer) is torch.nn.Linear}
    assert plain == {"1.1"}
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


@needs(cuda=True)
@every("attention", "rms_norm", "add_rms_norm", "cross_entropy", "linear_cross_entropy", "swiglu", "mlp", seen=True)
@proves("an operator runs the fused kernel of its own implementation, forward and backward", package="torch")
def test_own_kernels_ran(name: str, column: str, dtype: torch.dtype, device: str, measured: Dict[str, Any]) -> None:
    entry, given = OPERATORS[name][column], sample_for(name, column, dtype)
    call = given.bind(entry.call, device)
    bounds.forward_and_backward(call, given.inputs, given.gradient, device)  # what is compiled or tuned, is now
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
        torch._dynamo.reset()  # it compiles a function for so many cases, then no more, without a word
    rotate(x, 0).sum().backward()  # what is compiled or tuned, is now
    outputs: List[torch.Tensor] = []
    forward = gpu_kernels_run(lambda: outputs.append(rotate(x, 0)))
    backward = gpu_kernels_run(outputs[0].sum().backward)
    measured["forward"] = assert_ran(forward, entry.forward, "forward")
    measured["backward"] = assert_ran(backward, entry.backward, "backward")


@needs(cuda=True)
@every("adamw", seen=True)
@proves("AdamW runs the one fused kernel of its own implementation", seed="B11", package="torch")
def test_own_adamw_ran(column: str, device: str, measured: Dict[str, Any]) -> None:
    parameter = torch.nn.Parameter(torch.randn(5, device=device))
    parameter.grad = torch.randn(5, device=device)
    optimizer = operator("adamw", column)([parameter], **bounds.ADAMW)
    optimizer.step()
    measured["kernel"] = assert_ran(gpu_kernels_run(optimizer.step), OPERATORS["adamw"][column].forward, "in a step")
