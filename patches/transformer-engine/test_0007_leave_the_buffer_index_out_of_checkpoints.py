"""A layer under delayed scaling, its resumption in the same process and in a new one, on larger input and gradient."""

from patches.proof import Proof

RUNS_IN = "cpu"
EMULATED = (
    "the compiled extension and the GPU are stand-ins: the layer has no product and notes the largest magnitudes where "
    "the kernels do, its tensors lie in main memory, and the scales follow by the release's own update in torch"
)

# Prints the scale of input and gradient before and after they grew 16 times, and whether the layer is in the buffers:
# of a layer that goes on, of one that loads its state beside it, and of one that does so after the state's reset.
SCALES = """
import os, sys
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock
import torch
from torch.overrides import TorchFunctionMode

os.environ["NVTE_UNFUSED_FP8_UPDATE"] = "1"  # the update after the reduction in torch, without the extension's kernel
os.environ["NVTE_TORCH_COMPILE"] = "0"

packages = "common", "pytorch", "pytorch.module"
for name in ("transformer_engine", *("transformer_engine." + name for name in packages)):
    sys.modules[name] = ModuleType(name)  # without their __init__, which load the libraries
    sys.modules[name].__path__ = [os.path.join(os.getcwd(), *name.split("."))]
extension = MagicMock()
extension.FP8TensorMeta = SimpleNamespace
sys.modules["transformer_engine_extensions"] = extension
sys.modules["transformer_engine.pytorch.cpp_extensions"] = MagicMock()

import transformer_engine.pytorch.fp8 as fp8
import transformer_engine.pytorch.module.base as base
assert base.__file__.startswith(os.getcwd()), base.__file__

class InMainMemory(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function == torch.Tensor.is_cuda.__get__:
            return True
        there = {"device": "cpu"} if (kwargs or {}).get("device") == "cuda" else {}
        return function(*args, **{**(kwargs or {}), **there})

load = torch.load
torch.load = lambda file, map_location: load(file, map_location="cpu")
torch.cuda.is_available = lambda: True
torch.cuda.is_current_stream_capturing = lambda: False
torch.cuda.nvtx.range = MagicMock()
fp8.get_device_compute_capability = lambda: (9, 0)

class Layer(base.TransformerEngineBaseModule):
    def get_fp8_weights_scratchpad(self, is_first_microbatch):
        raise NotImplementedError
    def forward(self, x, gradient):
        with self.prepare_forward(x, None):
            for key, tensor in ("scaling_fwd", x), ("scaling_bwd", gradient):
                self.fp8_meta[key].amax_history[0][0] = tensor.abs().max()

def scales(layer, factor):
    for _ in range(3):
        with fp8.fp8_autocast(enabled=True):
            layer(factor * x, factor * x)
        fp8.FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)  # as the first layer's backward does
    return [float(layer.fp8_meta[key].scale[0]) for key in ("scaling_fwd", "scaling_bwd")]

def entered(layer):
    buffers = [scale for scales in fp8.FP8GlobalStateManager.global_scale_buffer.values() for scale in scales]
    return all(any(layer.fp8_meta[key].scale is scale for scale in buffers) for key in ("scaling_fwd", "scaling_bwd"))

def show(name, before, layer):
    after = scales(layer, 16)
    print(name, *before, "then", *after, "in the buffers:", "yes" if entered(layer) else "no")

with InMainMemory():
    x = torch.linspace(-1, 1, 32)
    layer, beside, anew = Layer(), Layer(), Layer()
    before = scales(layer, 1)
    state = layer.state_dict()
    beside.load_state_dict(state)
    show("resumed beside", before, beside)
    show("went on", before, layer)
    fp8.FP8GlobalStateManager.reset()
    anew.load_state_dict(state)
    show("resumed anew", before, anew)
"""


def test_resumed_scales_stay_without_the_patch_only(proof: Proof) -> None:
    pristine, patched = proof.run(SCALES)
    stay = "448.0 57344.0 then 448.0 57344.0 in the buffers: no"
    move = "448.0 57344.0 then 28.0 3584.0 in the buffers: yes"
    assert pristine.stdout.splitlines() == [f"resumed beside {stay}", f"went on {move}", f"resumed anew {stay}"]
    assert patched.stdout.splitlines() == [f"{name} {move}" for name in ("resumed beside", "went on", "resumed anew")]
