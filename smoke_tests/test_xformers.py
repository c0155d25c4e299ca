"""xformers' SwiGLU in bfloat16, which a patch lets its fused operators serve, and what it has for inference only."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, ContextManager, Dict

import pytest
import torch
from xformers.ops import rmsnorm, swiglu_op, unbind

from smoke_tests.claims import needs, proves
from smoke_tests.operators import bounds, references
from smoke_tests.operators.samples import assert_refused, sample
from smoke_tests.operators.table import operator

BF16 = torch.bfloat16
# Weights as in mixed precision, and as in a model that is bfloat16 throughout.
WEIGHTS = {"autocast": torch.float32, "weights": BF16}

bfloat16_gpu = needs(sm=(8, 0))
both_ways = pytest.mark.parametrize("how", list(WEIGHTS))


def autocast(how: str) -> ContextManager[Any]:
    """The context that makes float32 weights compute in bfloat16; none for weights that are."""
    return torch.autocast("cuda", dtype=BF16) if how == "autocast" else nullcontext()


def dispatched(how: str, packed: bool, device: str) -> swiglu_op.SwiGLUOpDispatch:
    """What xformers' dispatcher is told of a SwiGLU whose gate and up projections lie side by side or not."""
    x, gate, up, down, *biases = (tensor.to(device, WEIGHTS[how]) for tensor in sample("mlp", torch.float32).inputs)
    first, second, last = biases
    if packed:
        (gate, up), (first, second) = (unbind(torch.stack(pair), 0) for pair in ((gate, up), (first, second)))
    with autocast(how):
        return swiglu_op.SwiGLUOpDispatch.from_arguments(x, gate, first, up, second, down, last)


@bfloat16_gpu
@both_ways
@proves("both operators that xformers refused for bfloat16, fused and decomposed, accept it", seed="B55")
def test_guarded_operators_accept_bfloat16(how: str, device: str) -> None:
    given = dispatched(how, False, device)
    assert given.dtype_autocast_gpu == BF16
    assert swiglu_op.SwiGLUFusedOp.supports(given)
    assert swiglu_op._SwiGLUDecomposedOp.supports(given)


@bfloat16_gpu
@both_ways
@proves(
    "under bfloat16 the dispatcher takes a fused operator, for packed weights the one in C++, never eager PyTorch",
    seed=("B10", "B54", "B55"),
)
def test_dispatcher_takes_a_fused_operator(how: str, device: str, measured: Dict[str, Any]) -> None:
    taken = {name: dispatched(how, name == "packed", device).op.NAME for name in ("packed", "separate")}
    measured.update(taken)
    assert taken == {"packed": "fused.p.cpp", "separate": "fused"}


@bfloat16_gpu
@pytest.mark.parametrize("kind", ["packed", "fused"])
@proves(
    "a fused SwiGLU of float32 weights under bfloat16 autocast computes in bfloat16 forward and backward, and equals "
    "float64",
    seed=("B10", "B55"),
)
def test_swiglu_stays_in_bfloat16(kind: str, device: str, measured: Dict[str, Any]) -> None:
    given = sample("mlp", BF16)  # numbers that bfloat16 has, so that casting the weights loses nothing
    inputs = [tensor.float() for tensor in given.inputs]
    call = operator("mlp", "xformers." + kind)

    def under_autocast(*leaves: torch.Tensor) -> torch.Tensor:
        with autocast("autocast"):
            projected: torch.Tensor = call(*leaves)
        return projected

    computed = bounds.forward_and_backward(under_autocast, inputs, given.gradient, device)
    assert computed[0].dtype == BF16
    # A gradient that was computed in float16 has bits that bfloat16 cannot hold.
    assert all(torch.equal(tensor, tensor.to(BF16).to(tensor.dtype)) for tensor in computed)
    truth = bounds.in_float64(references.mlp, given.inputs, given.gradient)
    rounded = [tensor.to(BF16) for tensor in computed]
    bounds.assert_as_in_float64(rounded, truth, BF16, given.roundings, measured)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """xformers' norm of a sum, which it leaves in x, as the table of operators has it: beside the norm the sum."""
    total = x.clone()
    return torch.cat([rmsnorm.rms_norm_add(total, residual, weight, eps), total], dim=-1)


NORMS = {"rms_norm": rmsnorm.rms_norm, "add_rms_norm": add_rms_norm}


@bfloat16_gpu
@pytest.mark.parametrize("name", list(NORMS))
@proves("its RMSNorm for inference, alone and of a sum, equals float64", seed="B46")
def test_norms_for_inference(name: str, device: str, measured: Dict[str, Any]) -> None:
    given = sample(name, BF16)
    with torch.no_grad():
        computed = given.bind(NORMS[name], device)(*[tensor.to(device) for tensor in given.inputs]).cpu()
    truth = given.bind(getattr(references, name))(*[tensor.double() for tensor in given.inputs])
    bounds.assert_as_in_float64([computed], [truth], BF16, given.roundings, measured)


@bfloat16_gpu
@proves("its RMSNorm for inference refuses to compute a gradient, rather than leave it out", seed="B46")
def test_norms_refuse_gradients(device: str, measured: Dict[str, Any]) -> None:
    given = sample("rms_norm", BF16)
    assert_refused(given.bind(rmsnorm.rms_norm, device), given.inputs, given.gradient, device, measured)
    assert "Gradients not supported" in measured["limit"]
