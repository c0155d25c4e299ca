"""Under bfloat16 the dispatcher takes the fused SwiGLU with the patch, and eager PyTorch without it (B55)."""

from patches.proof import Proof

RUNS_IN = "cu11.4-torch2.0"
EMULATED = "a GPU of compute capability 8.0 is claimed, and xformers' kernels are written out in torch for the CPU"

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


def test_bfloat16_is_eager_without_the_patch_only(proof: Proof) -> None:
    pristine, patched = proof.run(DISPATCH)
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
