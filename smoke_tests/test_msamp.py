"""MS-AMP: products, gradients of weights and, at level O2, moments of the optimizer in FP8.

Importing it replaces functions of torch and of Transformer Engine. Every process collects this file, so that all claims
of a target with MS-AMP are made with it in place, as its users have it.
"""

from __future__ import annotations

import math
import shutil
import subprocess
from pathlib import Path
from typing import Any, Dict, Iterator

import msamp
import pytest
import torch
from msamp.common.dtype import Dtypes
from msamp.common.tensor import ScalingTensor
from msamp.te.modules import MSAMPLinear

from smoke_tests.claims import Elsewhere, needs, proves
from smoke_tests.operators.bounds import E4M3, E5M2, assert_rounded_like, rounding_noise
from smoke_tests.operators.kernels import assert_float8_products
from smoke_tests.operators.transformer_engine_adapter import te_autocast, te_recipe
from smoke_tests.training import checkpoint, logs, pretrain, trainer
from smoke_tests.training.comparison import ShortRun, assert_follows, same_run, spread  # noqa: F401  (same_run is a fixture)
from smoke_tests.training.options import Options, parse
from smoke_tests.training.precision import layers_of
from smoke_tests.training.short_training import Prepare, Prepared

# The type, its mantissa bits, and the largest number that it can hold.
FORMATS = {"e4m3": (Dtypes.kfloat8_e4m3, E4M3, 448.0), "e5m2": (Dtypes.kfloat8_e5m2, E5M2, 57344.0)}
FEATURES, OUTPUTS, ROWS = 144, 80, 112
# The formats to which a layer's results were rounded: both factors, and the weight's gradient once more.
NOISE = {"output": (E4M3, E4M3), "input": (E5M2, E4M3), "weight": (E5M2, E4M3, E4M3)}

float8_gpu = needs(sm=(8, 9))


@proves("mpi4py loads the MPI library that mpirun belongs to", seed="A13")
def test_mpi(measured: Dict[str, Any]) -> None:
    if shutil.which("mpirun") is None:
        raise Elsewhere("this machine has no MPI: install mpich")
    from mpi4py import MPI

    output = subprocess.run(["mpirun", "--version"], stdout=subprocess.PIPE, check=True).stdout.decode()
    measured["library"] = MPI.Get_library_version().split("\n")[0].strip("\0")
    release = ".".join(map(str, MPI.get_vendor()[1]))
    assert release in output, f"mpi4py found {release}, and mpirun says {output.splitlines()[0]}"


@float8_gpu
@pytest.mark.parametrize("name", list(FORMATS))
@proves(
    "a tensor cast to FP8 and back carries the noise of the format, its scale the largest power of two that keeps it "
    "in range, at any size; casting it once more changes nothing",
    seed="C24",
)
def test_scaling_tensor(name: str, device: str, measured: Dict[str, Any]) -> None:
    qtype, mantissa, largest = FORMATS[name]
    for size in (1.0, 2.0**12, 2.0**-12):
        x = torch.randn(96, 80) * size
        cast = x.to(device).cast(qtype)
        assert cast.value.dtype == torch.uint8
        most = float(x.abs().max())
        assert float(cast.meta.amax[0]) == most
        scale = 2.0 ** math.floor(math.log2(largest / most))
        assert (float(cast.meta.scale), float(cast.meta.scale_inv)) == (scale, 1 / scale)
        back = cast.float()
        measured["error"] = assert_rounded_like(back.cpu(), x.double(), *rounding_noise(mantissa))
        assert torch.equal(back.cast(qtype).float(), back)


def layer_of(device: str) -> torch.nn.Module:
    """A Linear of MS-AMP's [OUTPUTS, FEATURES]."""
    plain = torch.nn.Linear(FEATURES, OUTPUTS, bias=False, device=device)
    plain.weight.data.normal_()
    layer: torch.nn.Module = msamp.initialize(torch.nn.Sequential(plain))[0][0]
    return layer


def run(layer: torch.nn.Module, x: torch.Tensor, gradient: torch.Tensor) -> Dict[str, torch.Tensor]:
    """The output of a layer in bfloat16 and its gradients, by name."""
    layer.zero_grad()
    leaf = x.detach().requires_grad_()
    output = layer(leaf)
    output.backward(gradient)
    assert leaf.grad is not None
    return {"output": output.detach(), "input": leaf.grad, "weight": layer.weight.grad}


def operands(device: str) -> Any:
    """An input [ROWS, FEATURES] and a gradient [ROWS, OUTPUTS] in bfloat16."""
    return [torch.randn(ROWS, width, device=device).bfloat16() for width in (FEATURES, OUTPUTS)]


@float8_gpu
@proves(
    "a Linear's output and both gradients carry the FP8 noise of MS-AMP's formats, the weight's gradient being kept "
    "in e4m3; its three products run as FP8 kernels",
    seed="C24",
)
def test_linear(device: str, measured: Dict[str, Any]) -> None:
    layer, (x, gradient) = layer_of(device), operands(device)
    weight = layer.weight.float().double()
    results = run(layer, x, gradient)
    assert isinstance(results["weight"], ScalingTensor) and results["weight"].qtype == Dtypes.kfloat8_e4m3
    truth = {
        "output": x.double() @ weight.t(),
        "input": gradient.double() @ weight,
        "weight": gradient.double().t() @ x.double(),
    }
    for name, formats in NOISE.items():
        measured[name] = assert_rounded_like(results[name].float(), truth[name], *rounding_noise(*formats))
    plain = torch.nn.Linear(FEATURES, OUTPUTS, bias=False, device=device, dtype=torch.bfloat16)
    measured.update(assert_float8_products(lambda on: run(layer if on else plain, x, gradient), exactly=3))


@pytest.fixture
def in_transformer_engine(device: str) -> Iterator[torch.nn.Module]:
    """Transformer Engine's Linear [OUTPUTS, FEATURES] with a weight of MS-AMP; its change of the class is undone."""
    plain = MSAMPLinear(FEATURES, OUTPUTS, bias=False, params_dtype=torch.bfloat16).to(device)
    plain.weight.data.normal_()
    yield msamp.initialize(torch.nn.Sequential(plain), use_te=True)[0][0]
    del MSAMPLinear.is_msamp_module


@float8_gpu
@proves(
    "Transformer Engine's own Linear takes a weight that MS-AMP keeps, and output and gradient of the input carry the "
    "FP8 noise of its formats",
    seed="A15",
)
def test_in_transformer_engine(in_transformer_engine: torch.nn.Module, device: str, measured: Dict[str, Any]) -> None:
    layer, (x, gradient) = in_transformer_engine, operands(device)
    assert isinstance(layer.weight, ScalingTensor)
    weight = layer.weight.float().double()
    with te_autocast(te_recipe("delayed")):
        results = run(layer, x, gradient)
    truth = {"output": x.double() @ weight.t(), "input": gradient.double() @ weight}
    for name, true in truth.items():
        measured[name] = assert_rounded_like(results[name].float(), true, *rounding_noise(*NOISE[name]))


def at_level(level: str) -> Prepare:
    """The arguments of `train` for MS-AMP."""

    def prepare(model: torch.nn.Module, settings: Dict[str, Any]) -> Prepared:
        model.head.use_fp32_linear = True  # MS-AMP's own name for a layer that stays
        optimizer = torch.optim.AdamW(model.parameters(), **settings)
        return (*msamp.initialize(model, optimizer, level), msamp.clip_grad_norm_)

    return prepare


@float8_gpu
@pytest.mark.parametrize("level", msamp.opt_levels)
@proves(
    "a 2-layer Llama under MS-AMP learns real text, its loss falling by 2.5 nats per byte or more and staying within a "
    "fifth of what two seeds are apart of the run in bfloat16, without being the same",
    seed=("C03", "C24"),
)
def test_llama_learns(level: str, same_run: ShortRun, measured: Dict[str, Any]) -> None:  # noqa: F811
    losses = same_run.losses("torch", prepare=at_level(level))
    measured["loss"], measured["seeds"] = losses[-1], spread(same_run)
    measured["gap"] = assert_follows(losses, same_run)


def options_of(precision: str, out: Path, *more: str) -> Options:
    """The options of the command: 30 steps of two layers of TinyLlama."""
    flags = ["--model", "tinyllama-120m", "--layers", "2", "--length", "512", "--warmup", "5", "--steps", "30"]
    return parse([*flags, "--precision", precision, "--out", str(out), *more])


@float8_gpu
@pytest.mark.parametrize("level", msamp.opt_levels)
@proves(
    "two layers of TinyLlama pre-train under MS-AMP from the command itself, their loss falling by 3 nats per token or "
    "more, and in a step that goes on from their checkpoint each layer has three products in FP8 kernels",
    seed="C05",
)
def test_pretrain(level: str, device: str, tmp_path: Path, measured: Dict[str, Any]) -> None:
    precision = f"ms-amp.{level}"
    assert trainer.train(pretrain.start(options_of(precision, tmp_path))[0]) == 0
    losses = [row["loss"] for row in logs.read_log(tmp_path / "log.jsonl")]
    measured["first"], measured["last"] = losses[0], losses[-1]
    assert losses[0] - losses[-1] > 3
    resumed, _ = pretrain.start(options_of(precision, tmp_path, "--resume"))
    control = trainer.Run(options_of("bf16", tmp_path))
    exactly = 3 * len(layers_of(resumed.model))
    update = lambda on: (resumed if on else control).update(30)  # noqa: E731
    measured.update(assert_float8_products(update, mixed=True, exactly=exactly))


@float8_gpu
@pytest.mark.parametrize("level", msamp.opt_levels)
@proves(
    "a checkpoint holds what MS-AMP keeps in FP8 and float16, weights, moments and scales, to the last bit: the first "
    "step from it has the loss of the run that was never stopped, the second one within 0.001 nats of it",
    seed="C05",
)
def test_checkpoint(level: str, device: str, tmp_path: Path, measured: Dict[str, Any]) -> None:
    precision = f"ms-amp.{level}"
    run, _ = pretrain.start(options_of(precision, tmp_path))
    for step in range(3):
        run.update(step)
    saved = checkpoint.load(run.save())
    run.release()
    # Of each layer's input, weight and both gradients the largest value, and of all but the weight three numbers more.
    assert len(saved["fp8"]) == 13 * len(layers_of(run.model))
    losses = [run.update(step)["loss"] for step in (3, 4)]  # here, since all models share the steps of MS-AMP's scales
    again, _ = pretrain.start(options_of(precision, tmp_path, "--resume"))
    again.options.out = str(tmp_path / "again")
    Path(again.options.out).mkdir()
    held = checkpoint.load(again.save())
    for part in (lambda content: content["model"], lambda content: content["fp8"], moments_in):
        torch.testing.assert_close(part(held), part(saved), rtol=0, atol=0)
    assert again.step == 3
    assert again.update(3)["loss"] == losses[0]
    measured["apart"] = abs(again.update(4)["loss"] - losses[1])  # it has the moments, and attention's random order
    assert measured["apart"] < 1e-3


def moments_in(content: Dict[str, Any]) -> Dict[Any, Any]:
    """The optimizer's state in a checkpoint, by the number of its parameter."""
    state: Dict[Any, Any] = content["optimizer"]["state"]
    return state
