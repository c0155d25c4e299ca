"""The machine that numbers are made on: what it is, whether it is free, how warm it runs, and its ceilings."""

from __future__ import annotations

import datetime
import json
import os
import sys
from pathlib import Path
from typing import Any, Dict, List, Tuple

import torch

from smoke_tests import hardware
from smoke_tests.bench.method import Arm, Effort, Timer, interleaved
from smoke_tests.bench.rows import Limits, Row
from smoke_tests.operators.table import operator, rows

STATE = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu", "utilization.gpu", "memory.used")
# Bits of the driver's reasons for lower clocks that make a time worthless; the power limit (4) is normal in a product.
SLOWED = {0x8: "slowed by hardware", 0x20: "slowed by heat", 0x40: "slowed by heat", 0x80: "short of power"}


def told_of(gpu: int, *fields: str) -> List[str]:
    """What the driver's tool reports about one of the GPUs that CUDA may use; [] without such a tool or field."""
    rows = hardware.nvidia_smi(*fields) or []
    return rows[gpu] if gpu < len(rows) else []


def state(gpu: int = 0) -> Dict[str, float]:
    """Clocks (MHz), power (W), temperature (C), utilization (%) and memory in use (MiB) of a GPU, as far as known."""
    known = {}
    for name, text in zip(STATE, told_of(gpu, *STATE)):
        try:
            known[name] = float(text)
        except ValueError:  # "[N/A]"
            continue
    return known


def slowed(gpu: int = 0) -> List[str]:
    """Why a GPU runs slower than it should, if it does."""
    for field in ("clocks_event_reasons.active", "clocks_throttle_reasons.active"):  # before driver 535 the second
        answer = told_of(gpu, field)
        if answer and answer[0].startswith("0x"):
            bits = int(answer[0], 16)
            return sorted({text for bit, text in SLOWED.items() if bits & bit})
    return []


def busy(gpus: int) -> str:
    """One sentence if other processes use one of the first GPUs, else "". Call it before this process uses them."""
    for gpu in range(gpus):
        now = state(gpu)
        used, load = now.get("memory.used", 0), now.get("utilization.gpu", 0)
        if used > 1024 or load > 10:
            return (
                f"GPU {gpu} is busy ({used:.0f} MiB in use, {load:.0f} % load): numbers made beside other work are "
                "worth nothing; end that and run again."
            )
    return ""


def manifest(path: Path) -> Dict[str, Any]:
    """The environment's own manifest."""
    described: Dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return described


def releases(described: Dict[str, Any]) -> Dict[str, str]:
    """Package -> release, of a manifest."""
    return {name: entry["release"] for name, entry in described["packages"].items()}


def shard(described: Dict[str, Any], limits: Limits, started: datetime.datetime) -> Row:
    """The row that precedes the rows of one run: the machine, the releases, and the machine's ceilings."""
    cuda = described["cuda"] != "none"
    return {
        "key": "shard",
        "shard": f"{started:%Y%m%dT%H%M%S}-{os.getpid()}",
        "target": described["target"],
        "stack": described["stack"],
        "releases": releases(described),
        "python": sys.version.split()[0],
        "machine": hardware.probe().describe(cuda),
        "threads": 0 if cuda else torch.get_num_threads(),
        "limits": limits,
        "state": state() if cuda else {},
    }


# --- the ceilings ---


def _copy(device: str, size: int) -> Arm:
    source = torch.randint(0, 100, (size,), dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    return Arm(lambda: target.copy_(source), bytes=2.0 * size)


def _product(device: str, precision: str, size: Tuple[int, int, int]) -> Arm:
    m, k, n = size
    a, b = torch.randn(m, k, device=device), torch.randn(n, k, device=device)
    if precision == "fp8":
        multiply, scale = operator("scaled_mm", "torch"), torch.ones((), device=device)
        a, b = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
        return Arm(lambda: multiply(a, b, scale, scale, torch.bfloat16), precision, flops=2.0 * m * k * n)
    if precision == "bf16":
        a, b = a.bfloat16(), b.bfloat16()
    return Arm(lambda: torch.matmul(a, b.t()), precision, flops=2.0 * m * k * n)


def limits(timer: Timer, described: Dict[str, Any]) -> Limits:
    """Bytes/s of a copy and FLOP/s of a product in each precision: the fastest call of the best shape."""
    device = "cuda" if timer.cuda else "cpu"
    measured: Limits = {}
    sizes = (
        [(8192, 8192, 8192), (16384, 8192, 8192), (8192, 8192, 4096)]
        if timer.cuda
        else [(512, 512, 512), (1024, 1024, 1024)]
    )
    effort = Effort(12 if timer.cuda else 40, 1.0)

    def best(arm: Arm) -> float:
        return min(gpu for gpu, _ in interleaved(timer, {"": arm}, effort)[""]) / 1e3

    copy = _copy(device, (2 << 30) if timer.cuda else (64 << 20))
    measured["copy"] = copy.bytes / best(copy)
    precisions = ["bf16", "fp32"] + (["tf32"] if timer.cuda else [])
    multiplies = list(rows("scaled_mm", releases(described), timer.cuda))
    if timer.cuda and torch.cuda.get_device_capability() >= (8, 9) and multiplies:
        precisions.append("fp8")
    for precision in precisions:
        with tf32(precision == "tf32"):
            small = precision == "fp32" and timer.cuda
            arms = [_product(device, precision, size) for size in ([(4096, 4096, 4096)] if small else sizes)]
            measured[precision] = max(arm.flops / best(arm) for arm in arms)
    return measured


class tf32:
    """The context in which float32 products are, or are not, made in tf32."""

    def __init__(self, on: bool) -> None:
        self.on = on

    def __enter__(self) -> None:
        self.was = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = self.on

    def __exit__(self, *_: object) -> None:
        torch.backends.cuda.matmul.allow_tf32 = self.was
