"""A custom_fwd function's backward runs in its forward's autocast dtype with the patch, and in float16 without it."""

import pytest

from patches.proof import Proof

RUNS_IN = "cu11.4-torch1.12"
EMULATED = "a GPU that knows bfloat16 is faked; the dtypes are read, and nothing is computed in them"
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

DTYPES = """
import ctypes, os, sys

for folder in sys.path:  # torch 1.13.0 looks for them in the folder that it is installed in
    for library in ("cublas/lib/libcublas.so.11", "cudnn/lib/libcudnn.so.8"):
        if os.path.exists(folder + "/nvidia/" + library):
            ctypes.CDLL(folder + "/nvidia/" + library)

import torch
from torch.cuda.amp import custom_bwd, custom_fwd

assert torch.__file__.startswith(os.getcwd()), torch.__file__
assert torch.__version__.split("+")[0] == os.environ["VERSION"], torch.__version__
torch.cuda.is_available = torch.cuda.is_bf16_supported = lambda: True

class Identity(torch.autograd.Function):
    @staticmethod
    @custom_fwd
    def forward(ctx, x):
        print("forward", torch.get_autocast_gpu_dtype(), torch.is_autocast_enabled())
        return x.clone()

    @staticmethod
    @custom_bwd
    def backward(ctx, gradient):
        print("backward", torch.get_autocast_gpu_dtype(), torch.is_autocast_enabled())
        return gradient

for dtype in (torch.bfloat16, torch.float16):
    x = torch.ones(2, requires_grad=True)
    with torch.autocast("cuda", dtype=dtype):
        y = Identity.apply(x)
    y.sum().backward()
Identity.apply(x).sum().backward()
"""

FLOAT16 = ["forward torch.float16 True", "backward torch.float16 True"]
WITHOUT_AUTOCAST = ["forward torch.float16 False", "backward torch.float16 False"]


@pytest.mark.timeout(1200)  # it downloads up to 2 GB
def test_backward_has_another_dtype_without_the_patch_only(proof: Proof) -> None:
    pristine, patched = proof.run(DTYPES, VERSION=proof.version)
    same = [*FLOAT16, *WITHOUT_AUTOCAST]
    wrong = ["forward torch.bfloat16 True", "backward torch.float16 True"]
    right = ["forward torch.bfloat16 True", "backward torch.bfloat16 True"]
    assert pristine.stdout.splitlines() == [*wrong, *same], pristine.stderr
    assert patched.stdout.splitlines() == [*right, *same], patched.stderr
