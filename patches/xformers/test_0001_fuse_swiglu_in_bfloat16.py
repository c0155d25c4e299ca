"""Under bfloat16 the dispatcher takes the fused SwiGLU with the patch, and eager PyTorch without it (B55)."""

from dataclasses import replace
from pathlib import Path

import pytest

from patches.proof import Proof
from patches.scripts import ON_GPU

RUNS_IN = "cu11.4-torch2.0"
EMULATED = (
    "a GPU of compute capability 8.0 is claimed, and xformers' kernels are written out in torch for the CPU; below "
    "torch 2.0 only 0.0.23 is proved, beside 1.12.1 (of CUDA 10.2) with and without torch 0001"
)
BESIDE = {
    "==0.0.23": [  # the release that cu11.4-torch1.12 has; its own torch, 1.12.1+cu113, could not be fetched
        (
            "torch",
            "1.12.1",
            "torch-1.12.1-cp38-cp38-manylinux1_x86_64.whl",
            "0b44601ec56f7dd44ad8afc00846051162ef9c26a8579dda0a02194327f2d55e",
        ),
    ],
}
TORCH_PATCH = "torch/0001-keep-the-autocast-dtype-in-backward.patch"

# Prints for each pair of the weights' type and autocast's: whether the fused operator says that it serves, which one
# the dispatcher takes, how many kernels ran in forward and backward, autocast's type in the backward, and whether all
# gradients are right.
DISPATCH = """
import dataclasses, os, sys
from types import SimpleNamespace
import torch, torch._dynamo
from torch.cuda.amp import common

torch.cuda.get_device_capability = lambda device=None: (8, 0)
torch.cuda.is_bf16_supported = lambda: True
common.amp_definitely_not_available = lambda: False  # else autocast switches itself off

if not hasattr(torch, "compiler"):
    torch.compiler = SimpleNamespace(disable=lambda function: function)  # of torch 2.1; 0.0.26 uses it on import

from xformers.ops import swiglu_op
assert swiglu_op.__file__.startswith(os.getcwd()), swiglu_op.__file__
ran, backward_dtypes = [], []

def dual_gemm_silu_identity_mul(x, w1, b1, w2, b2):
    ran.append("dual_gemm")
    x1, x2 = torch.nn.functional.linear(x, w1, b1), torch.nn.functional.linear(x, w2, b2)
    return x1, x2, torch.nn.functional.silu(x1) * x2

def silu_bw_fused(x1, x2, dx4):
    ran.append("silu_bw")
    if torch.is_autocast_enabled():
        backward_dtypes.append(str(torch.get_autocast_gpu_dtype()))
    sigmoid, silu = torch.sigmoid(x1), torch.nn.functional.silu(x1)
    return torch.stack([dx4 * x2 * (sigmoid + silu * (1 - sigmoid)), dx4 * silu], dim=1), silu * x2

def gemm_fused_operand_sum(a, b, product, total):
    ran.append("gemm_sum")
    product.copy_(a @ b)
    total.copy_(a.sum(1))

swiglu_op.DualGemmSiluOp.OPERATOR = dual_gemm_silu_identity_mul
swiglu_op.GemmFusedSumOp.OPERATOR = gemm_fused_operand_sum
torch.ops.xformers.silu_bw_fused = silu_bw_fused
taken, from_arguments = [], swiglu_op.SwiGLUOpDispatch.from_arguments

def on_a_gpu(*arguments):
    taken.append(dataclasses.replace(from_arguments(*arguments), device="cuda"))
    return taken[-1]

swiglu_op.SwiGLUOpDispatch.from_arguments = staticmethod(on_a_gpu)

def relative_error(found, true):
    return max(((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, true))

shapes = [(24, 32), (48, 32), (48,), (48, 32), (48,), (16, 48), (16,)]  # x, then weight and bias three times
draw = torch.Generator().manual_seed(0)
values = [torch.randn(shape, generator=draw, dtype=torch.float64) / shape[-1] ** 0.5 for shape in shapes]
doubles = [value.clone().requires_grad_() for value in values]
x, w1, b1, w2, b2, w3, b3 = doubles
(torch.nn.functional.silu(x @ w1.T + b1) * (x @ w2.T + b2) @ w3.T + b3).square().sum().backward()
truth = [value.grad for value in doubles]

for weights, autocast in [
    (torch.float32, torch.bfloat16), (torch.bfloat16, None), (torch.float32, torch.float16), (torch.float32, None)
]:
    arguments = [value.to(weights).requires_grad_() for value in values]
    for seen in (ran, backward_dtypes, taken):
        seen.clear()
    with torch.autocast("cuda", dtype=autocast or torch.float16, enabled=autocast is not None):
        out = swiglu_op.swiglu(*arguments)
    out.square().sum().backward()
    error = relative_error([value.grad for value in arguments], truth)
    right = error < (3e-2 if weights == torch.bfloat16 else 1e-5)
    supported = swiglu_op.SwiGLUFusedOp.supports(taken[0])
    print(weights, "weights, autocast", autocast, "-> fused:", supported, "dispatched:", taken[0].op)
    print(" ", len(ran), "kernels, autocast in backward:", *backward_dtypes, "right:", right)
"""


# The same below torch 2.0, with torch's own autocast for the matrix products, and with what xformers' C++ does about
# types: which kernels autocast casts for, which check, and which read what they are given as another type. Prints for
# each pair of types the operator taken, and whether its gradients are right.
BELOW_TORCH_2 = (
    ON_GPU
    + """
import dataclasses

assert torch.__version__.split("+")[0] == "1.12.1" and torch.__file__.startswith(os.environ["TORCH"]), torch.__file__
torch.cuda.get_device_capability = lambda device=None: (8, 0)

from xformers.ops import swiglu_op
assert swiglu_op.__file__.startswith(os.getcwd()), swiglu_op.__file__

def on_gpu(product):
    def inside_functions(*arguments):
        if torch.is_grad_enabled():
            return product(*arguments)
        return product(*(OnGpu(value) if isinstance(value, torch.Tensor) else value for value in arguments)).on_cpu
    return inside_functions

torch.Tensor.__matmul__ = on_gpu(torch.Tensor.__matmul__)
torch.nn.functional.linear = on_gpu(torch.nn.functional.linear)

def addmm(total, a, b, out, **_):  # the CPU has none in float16
    return out.copy_(total.float() + a.float() @ b.float())

torch.addmm = addmm

def cast(*arguments):
    if not torch.is_autocast_enabled():
        return arguments
    return [tensor.to(torch.get_autocast_gpu_dtype()) for tensor in arguments]

def dual_gemm_silu_identity_mul(*arguments):
    x, w1, b1, w2, b2 = cast(*arguments)
    x1, x2 = torch.nn.functional.linear(x, w1, b1), torch.nn.functional.linear(x, w2, b2)
    return x1, x2, (torch.nn.functional.silu(x1.float()) * x2.float()).to(x2.dtype)

def silu_bw_fused(x1, x2, dx4):
    dtype = x2.dtype
    x1, x2, dx4 = (tensor.view(dtype).float() for tensor in (x1, x2, dx4))  # it reads all three as x2's type, unasked
    sigmoid, silu = torch.sigmoid(x1), torch.nn.functional.silu(x1)
    gradients = torch.stack([dx4 * x2 * (sigmoid + silu * (1 - sigmoid)), dx4 * silu], dim=1)
    return gradients.to(dtype), (silu * x2).to(dtype)

def gemm_fused_operand_sum(a, b, product, total):
    a, b = cast(a, b)
    for name, tensor in ("b", b), ("out_mm", product), ("out_sum", total):
        if tensor.dtype != a.dtype:
            short = {torch.float16: "Half", torch.bfloat16: "BFloat16"}[a.dtype]
            text = "Expected {}.scalar_type() == at::ScalarType::{} to be true, but got false."
            raise RuntimeError(text.format(name, short))
    product.copy_(a.float() @ b.float())
    total.copy_(a.float().sum(1))

swiglu_op.DualGemmSiluOp.OPERATOR = dual_gemm_silu_identity_mul
swiglu_op.GemmFusedSumOp.OPERATOR = gemm_fused_operand_sum
torch.ops.xformers.silu_bw_fused = silu_bw_fused
taken, from_arguments = [], swiglu_op.SwiGLUOpDispatch.from_arguments

def on_a_gpu(*arguments):
    taken.append(dataclasses.replace(from_arguments(*arguments), device="cuda").op)
    return dataclasses.replace(from_arguments(*arguments), device="cuda")

swiglu_op.SwiGLUOpDispatch.from_arguments = staticmethod(on_a_gpu)

shapes = [(24, 32), (48, 32), (48,), (48, 32), (48,), (16, 48), (16,)]  # x, then weight and bias three times
draw = torch.Generator().manual_seed(0)
drawn = [torch.randn(shape, generator=draw, dtype=torch.float64) / shape[-1] ** 0.5 for shape in shapes]

def gradients(values, autocast=None):
    leaves = [value.clone().requires_grad_() for value in values]
    if values[0].dtype == torch.float64:
        x, w1, b1, w2, b2, w3, b3 = leaves
        out = (torch.nn.functional.silu(x @ w1.T + b1) * (x @ w2.T + b2)) @ w3.T + b3
    else:
        with torch.autocast("cuda", dtype=autocast or torch.float16, enabled=autocast is not None):
            out = swiglu_op.swiglu(*leaves)
    out.square().sum().backward()
    return [leaf.grad.double() for leaf in leaves]

truth = gradients(drawn)
for weights, autocast in (torch.float32, torch.bfloat16), (torch.bfloat16, None), (torch.float32, torch.float16):
    try:
        computed = gradients([value.to(weights) for value in drawn], autocast)
        outcome = "right" if all((a - b).norm() < 3e-2 * b.norm() for a, b in zip(computed, truth)) else "wrong"
    except RuntimeError as error:
        outcome = "RuntimeError: " + str(error)
    print(weights, "weights, autocast", autocast, "->", taken[-1], outcome)
"""
)


def taken(weights: str, autocast: str, backward: str = "") -> list[str]:
    """What the script prints where the fused operator is taken; `eager` is where it is not."""
    return [
        f"torch.{weights} weights, autocast {autocast} -> fused: True dispatched: SwiGLUOp:fused",
        f"  5 kernels, autocast in backward: {backward}right: True",
    ]


def eager(weights: str, autocast: str) -> list[str]:
    return [
        f"torch.{weights} weights, autocast {autocast} -> fused: False dispatched: SwiGLUOp:eager",
        "  0 kernels, autocast in backward: right: True",
    ]


@pytest.mark.timeout(1200)  # it downloads and unpacks 1.5 GB of torch
def test_bfloat16_is_eager_without_the_patch_only(proof: Proof, tmp_path: Path) -> None:
    pristine, patched = replace(proof, path=()).run(DISPATCH)  # beside the environment's torch 2.0.1
    unchanged = [*taken("float32", "torch.float16", "torch.float16 "), *eager("float32", "None")]
    assert pristine.stdout.splitlines() == [
        *eager("float32", "torch.bfloat16"),
        *eager("bfloat16", "None"),
        *unchanged,
    ], pristine.stderr
    assert patched.stdout.splitlines() == [
        *taken("float32", "torch.bfloat16", "torch.bfloat16 "),
        *taken("bfloat16", "None"),
        *unchanged,
    ], patched.stderr
    if proof.version == "0.0.23":
        below_torch_2_it_needs_the_patch_of_torch(proof, tmp_path)


def below_torch_2_it_needs_the_patch_of_torch(proof: Proof, tmp_path: Path) -> None:
    """Without torch 0001 the backward of the fused operator fails, which the check guards against."""
    line = "torch.{} weights, autocast {} -> SwiGLUOp:{} {}"
    eager = [
        line.format("float32", "torch.bfloat16", "eager", "right"),
        line.format("bfloat16", None, "eager", "right"),
    ]
    fused = [
        line.format("float32", "torch.bfloat16", "fused", "right"),
        line.format("bfloat16", None, "fused", "right"),
    ]
    unchanged = line.format("float32", "torch.float16", "fused", "right")
    error = "RuntimeError: Expected out_mm.scalar_type() == at::ScalarType::Half to be true, but got false."

    pristine, patched = proof.run(BELOW_TORCH_2, TORCH=str(proof.path[0]))
    assert pristine.stdout.splitlines() == [*eager, unchanged], pristine.stderr
    failed = line.format("float32", "torch.bfloat16", "fused", error)
    assert patched.stdout.splitlines() == [failed, fused[1], unchanged], patched.stderr

    mended = proof.with_patch_beside(TORCH_PATCH, "1.12.1", tmp_path / "mended")
    pristine, patched = mended.run(BELOW_TORCH_2, TORCH=str(mended.path[0]))
    assert pristine.stdout.splitlines() == [*eager, unchanged], pristine.stderr
    assert patched.stdout.splitlines() == [*fused, unchanged], patched.stderr
