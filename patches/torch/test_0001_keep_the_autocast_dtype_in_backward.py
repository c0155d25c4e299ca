"""Under bfloat16 autocast a custom_fwd function's gradients are 0, infinite or an error without the patch only."""

import pytest

from patches.proof import Proof
from patches.scripts import ON_GPU

RUNS_IN = "cu11.4-torch1.12"
EMULATED = (
    "a GPU that knows bfloat16 is faked: torch's own autocast casts for it, and the CPU computes, matrix products in "
    "float32 and rounded to the type that autocast chose"
)
BESIDE = {
    ">=1.13": [  # torch 1.13 does not import without them; 1.12 carries its own
        (
            "nvidia-cublas-cu11",
            "11.10.3.66",
            "nvidia_cublas_cu11-11.10.3.66-py3-none-manylinux1_x86_64.whl",
            "d32e4d75f94ddfb93ea0a5dda08389bcc65d8916a25cb9f37ac89edaeed3bded",
        ),
        (
            "nvidia-cudnn-cu11",
            "8.5.0.96",
            "nvidia_cudnn_cu11-8.5.0.96-2-py3-none-manylinux1_x86_64.whl",
            "402f40adfc6f418f9dae9ab402e773cfed9beae52333f6d86ae3107a1b9527e7",
        ),
    ],
}
UNPROVEN = {"1.12.1+cu113": "its file could not be fetched; it is another build of 1.12.1's source"}

# Prints for each autocast: the types of the matrix products in a custom_fwd function's forward and backward, and the
# weight's gradients over the true ones; bfloat16 and float32 hold all of these, float16 does not. Then what comes of a
# backward that adds such a product to a tensor of the forward's type.
BACKWARD = (
    ON_GPU
    + """
from torch.cuda.amp import custom_bwd, custom_fwd

assert torch.__file__.startswith(os.getcwd()), torch.__file__
assert torch.__version__.split("+")[0] == os.environ["VERSION"], torch.__version__
dtypes = []

class Linear(torch.autograd.Function):
    @staticmethod
    @custom_fwd
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        product = OnGpu(x) @ OnGpu(weight).t()
        dtypes.append(product.dtype)
        return product.on_cpu

    @staticmethod
    @custom_bwd
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        product = OnGpu(gradient).t() @ OnGpu(x)
        dtypes.append(product.dtype)
        return None, product.on_cpu

class Scatter(Linear):
    @staticmethod
    @custom_fwd
    def forward(ctx, x, weight):
        product = OnGpu(x) @ OnGpu(weight).t()
        ctx.save_for_backward(x, product.on_cpu)
        return product.on_cpu

    @staticmethod
    @custom_bwd
    def backward(ctx, gradient):
        x, product = ctx.saved_tensors
        rows = OnGpu(torch.zeros(2, 2, dtype=product.dtype))
        rows.index_add_(0, torch.tensor([0, 0]), OnGpu(gradient).t() @ OnGpu(x))
        return None, rows.on_cpu

def gradient(function, dtype, value):
    x, weight = torch.ones(1, 2), torch.ones(2, 2, requires_grad=True)
    with torch.autocast("cuda", dtype=dtype or torch.float16, enabled=dtype is not None):
        out = function.apply(x, weight)
    out.backward(torch.tensor([[value, value]], dtype=out.dtype))
    return weight.grad[0, 0].item()

for dtype, values in (torch.bfloat16, (2.0**-26, 2.0**17)), (torch.float16, (1.0,)), (None, (2.0**-26, 2.0**17)):
    dtypes.clear()
    ratios = [gradient(Linear, dtype, value) / value for value in values]
    print("autocast", dtype, "forward", dtypes[0], "backward", dtypes[1], "gradients / true ones", end="")
    print("", *ratios)
try:
    print("mixed:", gradient(Scatter, torch.bfloat16, 1.0))
except RuntimeError as error:
    print("mixed: RuntimeError:", error)
"""
)


@pytest.mark.timeout(1200)  # it downloads up to 2 GB
def test_backward_is_wrong_or_fails_without_the_patch_only(proof: Proof) -> None:
    pristine, patched = proof.run(BACKWARD, VERSION=proof.version)
    line = "autocast {0} forward {0} backward {1} gradients / true ones {2}"
    same = [
        line.format("torch.float16", "torch.float16", "1.0"),
        "autocast None forward torch.float32 backward torch.float32 gradients / true ones 1.0 1.0",
    ]
    error = "RuntimeError: index_add_(): self (BFloat16) and source (Half) must have the same scalar type"
    wrong = line.format("torch.bfloat16", "torch.float16", "0.0 inf")
    right = line.format("torch.bfloat16", "torch.bfloat16", "1.0 1.0")
    assert pristine.stdout.splitlines() == [wrong, *same, f"mixed: {error}"], pristine.stderr
    assert patched.stdout.splitlines() == [right, *same, "mixed: 2.0"], patched.stderr
