"""Scripts that several proofs run."""

# A release's own setup.py, up to its call of setup(): the extensions that it asks for are then in `extensions`.
# NVCC is the version that nvcc prints, FOLDER where setup.py lies, OPTIONS what it is called with.
SETUP = """
import os, sys

cuda = os.path.abspath("cuda")
os.makedirs(cuda + "/bin")
with open(cuda + "/bin/nvcc", "w") as nvcc:
    nvcc.write("#!/bin/sh\\necho Cuda compilation tools, release {0}, V{0}.100\\n".format(os.environ["NVCC"]))
os.chmod(nvcc.name, 0o755)
os.environ["CUDA_HOME"] = cuda

import setuptools, torch
torch.version.cuda = os.environ.get("TORCH_CUDA", torch.version.cuda)

extensions = []
setuptools.setup = lambda ext_modules, **_: extensions.extend(ext_modules)
os.chdir(os.environ.get("FOLDER", "."))
sys.argv = ["setup.py", *os.environ.get("OPTIONS", "").split()]
with open("setup.py") as script:
    exec(compile(script.read(), "setup.py", "exec"), {"__name__": "__main__", "__file__": "setup.py"})
"""

# After SETUP: the C++ standards that the flags of each extension name, and whether g++ takes torch's headers with that
# for C++ files.
STANDARDS = """
import subprocess, torch.utils.cpp_extension

for extension in extensions:
    arguments = extension.extra_compile_args
    named = {kind: [flag for flag in flags if flag.startswith("-std=")] for kind, flags in arguments.items()}
    print("extension", extension.name, *(flag for kind in ("cxx", "nvcc") for flag in named[kind]))
    folders = [f"-I{path}" for path in torch.utils.cpp_extension.include_paths()]
    command = ["g++", "-fsyntax-only", "-x", "c++", *named["cxx"], *folders, "-"]
    done = subprocess.run(command, input="#include <ATen/ATen.h>", capture_output=True, text=True)
    print(next((line.strip() for line in done.stderr.splitlines() if "#error" in line and "^" not in line), "taken"))
"""

# Begins a script. `OnGpu` wraps a tensor of the CPU and says that it lies on a GPU that knows bfloat16: torch's own
# dispatcher then casts for it by autocast's rules for CUDA. The CPU computes, matrix products in float32 and rounded to
# the type that they are asked in, because torch 1.x has none for it in float16. The wrapper serves inside a
# torch.autograd.Function only: outside, the autograd engine would ask the driver for a stream of that GPU.
ON_GPU = """
import ctypes, os, sys

for folder in sys.path:  # torch 1.13.0 looks for them in the folder that it is installed in
    for library in ("cublas/lib/libcublas.so.11", "cudnn/lib/libcudnn.so.8"):
        if os.path.exists(folder + "/nvidia/" + library):
            ctypes.CDLL(folder + "/nvidia/" + library)

import torch

torch.cuda.is_available = torch.cuda.is_bf16_supported = lambda: True

class OnGpu(torch.Tensor):
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, on_cpu):
        return torch.Tensor._make_wrapper_subclass(cls, on_cpu.shape, dtype=on_cpu.dtype, device="cuda")

    def __init__(self, on_cpu):
        self.on_cpu = on_cpu

    @classmethod
    def __torch_dispatch__(cls, kernel, types, arguments=(), options=None):
        arguments = [value.on_cpu if isinstance(value, cls) else value for value in arguments]
        if kernel in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            (dtype,) = {value.dtype for value in arguments}
            return cls(kernel(*(value.float() for value in arguments)).to(dtype))
        options = {name: value for name, value in (options or {}).items() if name != "device"}
        return cls(kernel(*arguments, **options))
"""

# Transformer Engine's own checkpoint(), forward and backward, on a CPU. Prints a line per way of calling it: its name,
# "forward" and "backward" as far as it came, and then what went wrong, or "equal" if output and gradients are, bit for
# bit, those of the same block without checkpoint().
CHECKPOINT = """
import contextlib, functools, os, sys
from types import ModuleType
from unittest.mock import MagicMock
import torch, torch.utils.checkpoint

if not hasattr(torch, "_disable_dynamo"):
    torch._disable_dynamo = lambda function: function
    torch.utils.checkpoint.noop_context_fn = lambda: (contextlib.nullcontext(), contextlib.nullcontext())
if not hasattr(functools, "cache"):
    functools.cache = functools.lru_cache(maxsize=None)  # what 0001 is about, and would end the pristine tree here

for name in ("transformer_engine", "transformer_engine.pytorch"):  # without their __init__, which loads the libraries
    sys.modules[name] = ModuleType(name)
    sys.modules[name].__path__ = [os.path.join(os.getcwd(), *name.split("."))]
for name in ("transformer_engine_torch", "transformer_engine_extensions",  # the second until 1.7
             "transformer_engine.common", "transformer_engine.common.recipe",
             "transformer_engine.pytorch.cpp_extensions"):
    sys.modules[name] = MagicMock()

import transformer_engine.pytorch.distributed as distributed
assert distributed.__file__.startswith(os.getcwd()), distributed.__file__
assert sys.version_info[:2] == (3, 8), sys.version
distributed.has_te_modules = lambda function: True  # its answer for any function; it imports all modules first
distributed._get_cuda_rng_state = torch.cuda.get_rng_state = lambda **_: torch.zeros(1)  # 1.5 calls torch's
distributed._set_cuda_rng_state = lambda state, **_: None

weight = torch.randn(8, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
runs = []

def block(x):
    runs.append(1)
    return torch.nn.functional.dropout(torch.tanh(x @ weight), 0.5).square()

def scaled(double, scale, other, x):
    return block(scale(x) + other)

class Tracker:
    def get_states(self):
        return {}
    def set_states(self, states):
        pass

def stages(call, expected_runs):
    x = torch.linspace(-1, 1, 32).reshape(4, 8).requires_grad_()
    weight.grad = None
    runs.clear()
    torch.manual_seed(1)
    out = call(x)
    yield "forward"
    torch.manual_seed(2)  # the recomputation must bring the forward's own random state back
    out.sum().backward()
    yield "backward"
    assert len(runs) == expected_runs, runs
    yield out.detach(), x.grad, weight.grad

zeros, group = torch.zeros(4, 8), torch.distributed.ProcessGroup(0, 1)
checkpoint = distributed.checkpoint
calls = {
    "reentrant": lambda x: checkpoint(block, x, get_rng_state_tracker=Tracker),
    "non-reentrant": lambda x: checkpoint(block, x, get_rng_state_tracker=Tracker, use_reentrant=False),
    "positional": lambda x: checkpoint(block, False, Tracker, None, x),
    "positional-with-group": lambda x: checkpoint(block, False, Tracker, group, x),
    "arguments-of-the-block": lambda x: checkpoint(scaled, False, torch.clone, zeros, x),
}
*_, plain = stages(block, 1)
assert all(tensor.abs().sum() > 0 for tensor in plain)
for name, call in calls.items():
    reached = [name]
    try:
        for stage in stages(call, 2):
            reached.append(stage)
        reached[-1] = "equal" if all(map(torch.equal, stage, plain)) else "unequal"
    except Exception as error:
        reached.append(type(error).__name__ + ": " + str(error))
    print(*reached)
"""
BY_POSITION = ("positional", "positional-with-group", "arguments-of-the-block")  # of CHECKPOINT's ways, the last
