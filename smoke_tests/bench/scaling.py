"""Several GPUs (D01 to D10, E04 to E10): float8 beside bf16, and layout beside layout, in torchtitan's trainer.

An arm is a job of its own on all GPUs of this machine, as `nox -s launch` starts it, with checkpoints off: jobs run one
after the other, not in turns. Its time is a step's, of the engine's own clock; the first steps, which compile, are left
out. Operations are counted for one GPU's share of the step, so that the ceilings of one GPU hold.
"""

from __future__ import annotations

import json
import re
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, Dict, List, NamedTuple

import torch

from smoke_tests.bench.ablated_llama import flops
from smoke_tests.bench.method import Cell, Check, shown
from smoke_tests.bench.rows import Row, ratio
from smoke_tests.operators import kernels
from smoke_tests.training.distributed import jobs
from smoke_tests.training.distributed.engine_arguments import FLOAT8, ON_ONE_HOST
from smoke_tests.training.models import MODELS

LIMIT = 300  # seconds that a job may take
LOOKED = 5  # microbatches until the kernels are noted, see training/distributed/engine.py
DEVICE: List[str] = []  # put "--cpu" here to train over gloo, and so to try this without a GPU


class Job(NamedTuple):
    """One arm: a run of recipes/runs.toml, its float8 recipe, what is recomputed ("": as the run says), seed, base.

    more: of the engine's arguments.
    """

    run: str
    float8: str = "none"
    recomputed: str = ""
    seed: int = 0
    more: str = ""
    base: str = ""


NAMES = {"none": "bf16", "tensorwise": "fp8", "tensorwise-gathered": "fp8 gathered", "rowwise": "fp8 rowwise"}


def recipes(run: str) -> Dict[str, Job]:
    """bf16, and float8 by recipe."""
    return {name: Job(run, recipe, base="" if recipe == "none" else "bf16") for recipe, name in NAMES.items()}


def recomputed(run: str) -> Dict[str, Job]:
    """By what of the activations is computed again: nothing in bf16 and in float8, all in bf16."""
    return {
        "bf16, nothing recomputed": Job(run, recomputed="none", base="bf16"),
        "fp8 gathered, nothing recomputed": Job(
            run, "tensorwise-gathered", recomputed="none", base="bf16, nothing recomputed"
        ),
        "bf16, all recomputed": Job(run, recomputed="full", base="bf16"),
    }


LAYOUTS = {
    "fsdp": Job("llama-8b-fsdp"),
    "pp2": Job("llama-8b-pp2", base="fsdp"),
    "tp2": Job("llama-8b-tp2", base="fsdp"),
    "tp2 pp2": Job("llama-8b-tp2-pp2", base="fsdp"),
    "pp2 fp8": Job("llama-8b-pp2", "tensorwise-gathered", base="pp2"),
    "fsdp fp8": Job("llama-8b-fsdp", "tensorwise-gathered", base="fsdp"),
    "pp2 resharded": Job("llama-8b-pp2", more="--parallelism.fsdp_reshard_after_forward always", base="fsdp"),
    "tp2 async": Job("llama-8b-tp2", more="--parallelism.enable_async_tensor_parallel", base="fsdp"),
    "tp2 pp2 fp8": Job("llama-8b-tp2-pp2", "tensorwise", base="tp2 pp2"),
}  # fmt: skip


def cells(releases: Dict[str, str], cuda: bool, quick: bool) -> List[Cell]:
    """The 1.8B and the 8B shape in float8, what is recomputed, and the layouts, on all GPUs of this machine."""
    gpus = torch.cuda.device_count() if cuda else 0
    if "torchtitan" not in releases or quick:
        return []
    groups = [
        ("fsdp/8B", 14, {**recipes("llama-8b"), **recomputed("llama-8b")}),
        ("layouts/8B", 4, LAYOUTS),
        ("fsdp/1.8B", 60, recipes("llama-1b8")),
    ]
    made = []
    for name, steps, arms in groups:
        arms = {arm: job for arm, job in arms.items() if (job.run, gpus) in ON_ONE_HOST}
        if arms:
            run = next(iter(arms.values())).run
            made_by = {arm: partial(watched, arm, job, gpus, steps) for arm, job in arms.items()}
            key, beside = f"scaling/{name}/{gpus}", partial(compare, arms)
            made.append(Cell(key, facts(run, gpus), dict, 90.0 * len(arms), jobs=made_by, compare=beside))
    return made


def facts(run: str, gpus: int) -> Dict[str, Any]:
    """What a step of one GPU is; the runs that are measured beside this one have the same batch."""
    arguments = ON_ONE_HOST[run, gpus].split()
    flavor, length, batch = (
        arguments[arguments.index(key) + 1]
        for key in ("--model.flavor", "--training.seq_len", "--training.global_batch_size")
    )
    shape = MODELS[f"llama-3-{flavor.lower()}"].shape._replace(length=int(length))
    tokens = int(batch) * shape.length / gpus
    return {
        "model": flavor, "length": shape.length, "batch": int(batch), "gpus": gpus, "tokens": tokens, **flops(shape)
    }  # fmt: skip


def compare(jobs_of: Dict[str, Job], arms: Dict[str, Row]) -> None:
    """Put beside each arm how it compares with its base, if both were measured.

    The first step's loss is checked where both draw the same weights and batch: in one layout, from one seed.
    """
    for name, arm in arms.items():
        base = jobs_of[name].base
        other = arms.get(base, {"error": ""})
        if "error" in arm or "error" in other:
            continue
        arm.update(zip(("ratio", "low", "high"), ratio(other["samples_ms"], arm["samples_ms"])), base=base)
        arm["comparable"] = all(arm[key] == other[key] for key in ("run", "recomputed", "more"))
        if (arm["run"], arm["seed"]) == (other["run"], other["seed"]):
            gap = abs(arm["loss"][0] / other["loss"][0] - 1)
            arm["checks"] = [list(Check(gap, 1e-6, 1e-2) if arm["precision"] == "fp8" else Check(gap, 0.0, 1e-4))]


def watched(name: str, job: Job, gpus: int, steps: int) -> Row:
    """Train, and say what came of it."""
    with tempfile.TemporaryDirectory() as folder:
        row = trained(job, gpus, steps, Path(folder))
    numbers = f"{row['ms']:.4g} ms, {row['tokens_per_second']:.5g} tokens/s/GPU, {row['peak_mib'] / 1024:.1f} GiB"
    print(f"  {name}: {numbers}, loss {row['loss'][-1]:.4f}, {row['seconds']:.0f} s", flush=True)
    return row


def trained(job: Job, gpus: int, steps: int, folder: Path) -> Row:
    """Train that many steps; the numbers of those after the first, which compile, or after the kernels were noted."""
    arguments = [*ON_ONE_HOST[job.run, gpus].split(), *FLOAT8[job.float8].split(), *job.more.split()]
    arguments += ["--activation_checkpoint.mode", job.recomputed] if job.recomputed else []
    arguments += ["--debug.seed", str(job.seed)]
    arguments += ["--job.dump_folder", str(folder), "--training.steps", str(steps), "--checkpoint.no-enable", "--look"]
    with jobs.Job(jobs.torchrun("engine.py", [*DEVICE, *arguments], gpus), folder / "log", alone=True) as started:
        code = started.ended(LIMIT)
        if code != 0:
            raise RuntimeError(jobs.error_in(started.printed()) or f"the job ended with code {code}")
    ranks = [jobs.noted(folder, rank) for rank in range(gpus)]
    losses = jobs.of_the_loss(ranks)
    first = LOOKED if steps > 2 * LOOKED else 1
    step = facts(job.run, gpus)
    samples = [row["seconds"] * 1e3 for row in ranks[0][first:]]
    ms, work = statistics.median(samples), step["causal, products only"] * step["tokens"]
    looked = folder / "kernels.json"
    ran = json.loads(looked.read_text()) if looked.exists() else {}
    return {
        "precision": "bf16" if job.float8 == "none" else "fp8",
        "run": job.run,
        "float8": job.float8,
        "recomputed": job.recomputed,
        "seed": job.seed,
        "more": job.more,
        "ms": ms,
        "gpu_ms": ms,
        "samples_ms": [shown(sample) for sample in samples],
        "flops": work,
        "flops_per_second": work / ms * 1e3,
        "tokens_per_second": step["tokens"] / ms * 1e3,
        "state_mib": 0,
        "peak_mib": round(1024 * max(row["active_gib"] for ranked in ranks for row in ranked)),
        "loss": [row["loss"] for row in losses],
        "grad_norm": [row["grad_norm"] for row in losses],
        "kernels_ms": spent(ran),
        "fp8_kernels": sorted(name[:80] for name in kernels.products(ran) if kernels.FLOAT8.search(name)),
        "checks": [],
        "seconds": sum(row["seconds"] for row in ranks[0]),
    }


KINDS = {
    "all-gather": r"nccl\w*AllGather",
    "reduce-scatter": r"nccl\w*ReduceScatter",
    "all-reduce": r"nccl\w*AllReduce",
    "send and receive": r"nccl\w*SendRecv",
    "attention": kernels.ATTENTION.pattern,
    "products": kernels.PRODUCT.pattern,
}


def spent(ran: Dict[str, List[float]]) -> Dict[str, float]:
    """ms of rank 0's microbatch by kind of kernel; those of communication and of computing overlap."""
    sums: Dict[str, float] = {}
    for name, (_, ms) in ran.items():
        kind = next((kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)), "other")
        sums[kind] = sums.get(kind, 0.0) + ms
    return {kind: shown(ms) for kind, ms in sorted(sums.items())}
