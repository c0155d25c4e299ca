"""Random input for each operator, and the check that a known limit raises an error."""

from __future__ import annotations

import math
from typing import Any, Callable, Dict, List, NamedTuple, Sequence, Tuple

import torch

from smoke_tests.operators import bounds
from smoke_tests.operators.kernels import cuda_errors
from smoke_tests.operators.table import OPERATORS, operator

IGNORED = -100
EPS = 1e-5
Operator = Callable[..., torch.Tensor]


class Sample(NamedTuple):
    """The input of an operator: tensors with gradients, further arguments, and the gradient of its output.

    roundings: how many roundings to the dtype a correct implementation makes on the way to its worst result.
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
    name: str,
    dtype: torch.dtype,
    count: int = 37,
    size: int = 40,
    scale: float = 1.0,
    features: int = 73,
    width: int = 83,
) -> Sample:
    """Random input for an operator: `count` rows (or tokens), odd sizes.

    size: of a head; scale: of x; features: the length of its rows; width: of SwiGLU's rows, and the vocabulary.
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
        logits = (torch.randn(count, width) * 4).to(dtype)
        return Sample([logits], (labels_for(count, width), IGNORED), torch.ones(()), 3)
    if name == "linear_cross_entropy":
        # Logits near 1, so that rounding them moves the probabilities by at most one rounding of theirs. Rounded: the
        # logits, log-probabilities, probabilities, result; a weight gradient summed in parts, once per part.
        weight = (torch.randn(width, features) / math.sqrt(features)).to(dtype)
        return Sample([x[0], weight], (labels_for(count, width), IGNORED), torch.ones(()), 8)
    if name == "mlp":
        return mlp_sample(dtype, count)
    assert name == "swiglu", name  # rounded: silu(gate), its derivative, the result; gates up to 16 or so
    return Sample([draw(count, width) * 4, draw(count, width)], (), draw(count, width), 3)


def mlp_sample(dtype: torch.dtype, count: int, features: int = 72, width: int = 88) -> Sample:
    """Random input for an MLP: `count` rows of `features`, and `width` between its projections.

    Tensor cores take the default sizes. Rounded on the way to the gradient of x: both projections, silu; the gradients
    of the product, silu, both projections, of x from each, and their sum.
    """

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape).to(dtype)

    shapes = ((width, features), (width, features), (features, width))
    weights = [(torch.randn(*shape) / math.sqrt(shape[1])).to(dtype) for shape in shapes]
    inputs = [draw(count, features), *weights, draw(width), draw(width), draw(features)]
    return Sample(inputs, (), draw(count, features), 10)


def sample_for(name: str, column: str, dtype: torch.dtype, **sizes: Any) -> Sample:
    """A sample whose rows or heads have a length that this implementation supports, whatever `sizes` says."""
    taken = OPERATORS[name][column].size
    return sample(name, dtype, **{**sizes, **({"size": taken, "features": taken} if taken else {})})


def quantized(values: torch.Tensor, dtype: torch.dtype, per_row: bool) -> Tuple[torch.Tensor, torch.Tensor]:
    """float8 codes [n, f] of values [n, f], and the scale ([] or [n, 1], float32) that turns them back."""
    largest = values.abs().amax(dim=1, keepdim=True) if per_row else values.abs().max()
    scale = (largest / torch.finfo(dtype).max).float()
    return (values / scale).to(dtype), scale


def scaled_mm_arguments(per_row: bool, size: float = 1.0) -> Tuple[torch.Tensor, ...]:
    """Operands a [165, 272] and b [144, 272] in float64, their float8 codes, and the scales for the product.

    A GPU's product needs 272 and 144 to be multiples of 16. size: how many times larger a is, or per row its last one.
    """
    a, b = torch.randn(165, 272, dtype=torch.float64) * 3, torch.randn(144, 272, dtype=torch.float64) / 7
    a[-1 if per_row else 0 :] *= size
    (codes_a, scale_a), (codes_b, scale_b) = (quantized(tensor, torch.float8_e4m3fn, per_row) for tensor in (a, b))
    return a, b, codes_a, codes_b, scale_a, scale_b.t() if per_row else scale_b


def scaled_mm(arguments: Sequence[torch.Tensor], dtype: torch.dtype, device: str) -> torch.Tensor:
    """The product of codes with scales, computed on a device."""
    product: torch.Tensor = operator("scaled_mm", "torch")(*[tensor.to(device) for tensor in arguments], dtype)
    return product.cpu()


def assert_refused(
    call: Operator, inputs: List[torch.Tensor], gradient: torch.Tensor, device: str, measured: Dict[str, Any]
) -> None:
    """Assert that a known limit raises an error instead of giving numbers."""
    errors = []
    try:
        bounds.forward_and_backward(call, inputs, gradient, device)
    except Exception as error:  # each implementation has its own error
        errors.append("{}: {}".format(type(error).__name__, str(error).splitlines()[0]))
    while device == "cuda" and (left := cuda_errors()) and len(errors) < 9:  # another for each unchecked launch
        errors += left
    assert errors, "a known limit was computed: take it out of the table"
    measured["limit"] = errors[0]
