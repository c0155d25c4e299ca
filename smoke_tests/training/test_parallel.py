"""Runs on several processes: the same training as on one, checkpoints between them, and how a job ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List

import pytest
import torch

from smoke_tests.claims import long, needs, proves
from smoke_tests.training import checkpoint, parallel, pretrain
from smoke_tests.training.distributed import jobs
from smoke_tests.training.logs import read_log
from smoke_tests.training.parallel import Ranks
from smoke_tests.training.small_runs import FP8, last_of, refusal_of, small, trained
from smoke_tests.training.trainer import Run

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = "--device cpu --learning-rate 3e-3 --warmup 2 --schedule constant --checkpoint-every 0"
EVAL = "--eval-every 2 --eval-windows 4"
FLOAT32 = f"{CPU} --precision float32 --out"


def on_cpu(*runs: str) -> None:
    """Do runs one after the other, each a number of processes and flags of pretrain."""
    words = " / ".join(runs).split()
    command = [sys.executable, "-m", "smoke_tests.training.distributed.forks", *words]
    ended = subprocess.run(command, cwd=str(jobs.CHECKOUT), capture_output=True, text=True, timeout=400)
    assert ended.returncode == 0, ended.stdout[-1000:] + ended.stderr[-3000:]


def apart(folder: Path, truth: List[Dict[str, Any]]) -> float:
    """How far losses (nats per token), also on held-out text, and gradient norms (relative) are from others at most."""
    rows = read_log(folder / "log.jsonl")
    assert [row["step"] for row in rows] == [row["step"] for row in truth]
    distances = [abs(row["norm"] / other["norm"] - 1) for row, other in zip(rows, truth)]
    for row, other in zip(rows, truth):
        assert row.keys() == other.keys() and row["tokens"] == other["tokens"]
        names = {"loss", "validation", "validation_high"} & row.keys()
        distances += [abs(row[name] - other[name]) for name in names]
    return float(max(distances))


def alone(folder: Path, **options: Any) -> List[Dict[str, Any]]:
    """The lines of the log of a run by this process."""
    options = {"eval_every": 2, "eval_windows": 4, **options}
    trained(small(schedule="constant", checkpoint_every=0, out=str(folder), **options))
    return read_log(folder / "log.jsonl")


@long
@proves(
    "with the same windows a step, 2 and 4 processes have the losses, also on held-out text, and gradient norms of one "
    "process to a hundred-thousandth, with DDP and FSDP2; what 2 saved, 4 continue in the other way and one process in "
    "its own; and 2 skip the step with a spike that one process skips",
    package="torch",
    since="2.13",  # not tried with an older one
)
def test_number_of_processes(tmp_path: Path, measured: Dict[str, Any]) -> None:
    ddp, fsdp2, skip, one_skip = (tmp_path / name for name in ("ddp", "fsdp2", "skip", "one_skip"))
    for folder in (skip, one_skip):  # losses before the first step, from which it then jumps
        folder.mkdir()
        (folder / "log.jsonl").write_text('{"step": -1, "loss": 0.0, "norm": 1.0, "tokens": 0}\n' * 32)
    on_cpu(
        f"2 --steps 4 --batch-size 2 --gradient-accumulation-steps 2 {EVAL} {FLOAT32} {ddp}",
        f"2 --steps 4 --batch-size 4 --parallel fsdp2 {EVAL} {FLOAT32} {fsdp2}",
        f"4 --steps 6 --batch-size 1 --gradient-accumulation-steps 2 --parallel fsdp2 --resume {EVAL} {FLOAT32} {ddp}",
        f"4 --steps 6 --batch-size 2 --resume {EVAL} {FLOAT32} {fsdp2}",
        f"2 --steps 2 --batch-size 4 --parallel fsdp2 --skip-spikes {FLOAT32} {skip}",
    )
    for folder, saved in ((ddp, ("4.pt", "6.dcp")), (fsdp2, ("4.dcp", "6.pt"))):
        assert [path.name for path in checkpoint.complete(folder)] == [f"step-0000000{each}" for each in saved]
        copy = tmp_path / f"{folder.name} alone"
        copy.mkdir()
        first = checkpoint.complete(folder)[0]
        (shutil.copytree if first.is_dir() else shutil.copy)(str(first), str(copy / first.name))
    truth = alone(tmp_path / "one", batch_size=8)
    for folder in (ddp, fsdp2):
        measured[folder.name] = apart(folder, truth)
        alone(tmp_path / f"{folder.name} alone", batch_size=8, resume=True)
        measured[f"{folder.name} alone"] = apart(tmp_path / f"{folder.name} alone", truth[4:])
    # Sums of 8 x 64 terms in another order, in each of six steps; a window at another place changes hundredths.
    skipped = alone(one_skip, batch_size=8, steps=2, skip_spikes=True, eval_every=0)
    assert [row["step"] for row in skipped if "skipped" in row] == [0]
    measured["skip"] = apart(skip, skipped)
    assert max(measured.values()) < 1e-5
    refused = small(batch_size=4, steps=7, schedule="constant", checkpoint_every=0, resume=True, out=str(ddp))
    assert "took 8 windows, and now takes 4" in refusal_of(lambda: pretrain.start(refused))


@long
@proves(
    "two processes train in FP8 as one does that takes their windows in turn, and have its losses on held-out text in "
    "FP8 and in high precision, with FSDP2, and with DDP under the guard, which finds every period good on both",
    package="torchao",
    since="0.18",  # not tried with an older one
)
def test_fp8_on_processes(tmp_path: Path, measured: Dict[str, Any]) -> None:
    flags = f"2 --precision {FP8[0]} --steps 4 --batch-size 4 {CPU} {EVAL} --out"
    on_cpu(f"{flags} {tmp_path}/fsdp2 --parallel fsdp2", f"{flags} {tmp_path}/ddp --guard 2 --guard-steps 1")
    one = alone(tmp_path / "one", precision=FP8[0], steps=4, batch_size=4, gradient_accumulation_steps=2)
    for way in ("fsdp2", "ddp"):
        measured[way] = apart(tmp_path / way, one)
        assert measured[way] < 1e-3  # a sum in another order can round to the next code
    events = [json.loads(line) for line in (tmp_path / "ddp/events.jsonl").read_text().splitlines()]
    assert [event["kind"] for event in events if event["event"] == "guard"] == ["good", "good"]


def started(folder: Path, *flags: str, processes: int = 2) -> jobs.Job:
    """The command under torchrun."""
    given = ["--out", str(folder), *flags]
    return jobs.Job(
        jobs.torchrun("pretrain", given, processes, package="smoke_tests.training"), folder.with_suffix(".log")
    )


def reach(job: jobs.Job, folder: Path, step: int) -> None:
    """Wait until the run has done this step."""
    wait(job, lambda: len(read_log(folder / "log.jsonl")) > step)


def wait(job: jobs.Job, until: Callable[[], bool]) -> None:
    """Wait for what the job does."""
    end = time.monotonic() + 120
    while not until():
        assert job.process.poll() is None and time.monotonic() < end, job.printed()[-3000:]
        time.sleep(0.05)


@long
@proves(
    "SIGUSR1 to one of torchrun's two processes has both save, rank 0 in a thread, while no other run gets their "
    "folder; SIGTERM to torchrun ends both after the same step with a checkpoint; both go on from it, and when one is "
    "killed, the other names it in one sentence and torchrun ends with an error",
    package="torch",
    since="2.13",  # not tried with an older one
)
def test_torchrun_ends(tmp_path: Path, measured: Dict[str, Any]) -> None:
    folder = tmp_path / "run"
    flags = "--device cpu --precision float32 --batch-size 2 --steps 100000 --schedule constant --checkpoint-every 0"
    flags += " --async-checkpoint"
    with started(folder, *flags.split()) as job:
        reach(job, folder, 3)
        assert "is in use by process" in refusal_of(lambda: pretrain.start(small(out=str(folder))))
        (other,) = job.processes("RANK=1")
        os.kill(other, signal.SIGUSR1)
        wait(job, lambda: checkpoint.newest(folder) is not None)
        job.process.send_signal(signal.SIGTERM)
        job.ended(60)
        assert job.printed().count("stopped after step") == 1, job.printed()[-3000:]  # rank 0 alone prints
    rows = read_log(folder / "log.jsonl")
    assert len(checkpoint.complete(folder)) == 2 and last_of(folder).name == f"step-{len(rows):08}.pt"
    events = [event["event"] for event in read_log(folder / "events.jsonl")]
    assert events == ["checkpoint begins", "checkpoint ends"] * 2
    with started(folder, *flags.split(), "--resume") as job:
        reach(job, folder, len(rows) + 2)
        (other,) = job.processes("RANK=1")
        os.kill(other, signal.SIGKILL)
        killed = time.monotonic()
        assert job.ended(60) != 0
        measured["seconds to the end"] = time.monotonic() - killed
        sentences = [line for line in job.printed().splitlines() if line.startswith("fusebox: ")]
        assert len(sentences) == 1 and "rank 0 of 2" in sentences[0] and " lost rank 1 on host " in sentences[0]
    assert [row["step"] for row in read_log(folder / "log.jsonl")][: len(rows) + 2] == list(range(len(rows) + 2))


@proves(
    "what DDP or FSDP2 cannot do is refused in one sentence that names both flags",
    package="torch",
    since="2.6",
)
def test_refusals_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    ddp, fsdp2 = Ranks("ddp", 0, 2), Ranks("fsdp2", 0, 2)
    for ranks, options in (
        (ddp, {"graphs": True}),
        (ddp, {"precision": "ms-amp.O1"}),
        (fsdp2, {"graphs": True}),
        (fsdp2, {"guard": 10}),
        (fsdp2, {"async_checkpoint": True}),
        (fsdp2, {"te_modules": True}),
        (fsdp2, {"weights": "bfloat16"}),
        (fsdp2, {"precision": "fp8"}),
        (fsdp2, {"ops": "rope=torch,adamw=apex"}),
    ):
        name = next(iter(options)).replace("_", "-")
        sentence = refusal_of(lambda: parallel.refuse(small(**options), ranks))  # noqa: B023
        assert f"--{name}" in sentence and f"--parallel {ranks.way}" in sentence
    parallel.refuse(small(guard=10, te_modules=True, weights="bfloat16", ops="adamw=torch"), ddp)
    parallel.refuse(small(ops="adamw=torch"), fsdp2)
    assert "torchrun" in refusal_of(lambda: Run(small(parallel="ddp")))
    monkeypatch.setattr(torch, "__version__", "2.5.1")
    assert "torch 2.6" in refusal_of(lambda: parallel.refuse(small(), fsdp2))


@needs(sm=(8, 9))
@long
@proves(
    "one process that torchrun started trains six steps in torchao's FP8 over NCCL, with DDP and with FSDP2, to losses "
    "within 0.1 nats and gradient norms within 10% of those of a process that it did not start",
    package="torchao",
    since="0.18",
)
def test_torchrun_on_a_gpu(tmp_path: Path, device: str, measured: Dict[str, Any]) -> None:
    words = "--model tiny --batch-size 4 --steps 6 --device cuda --precision torchao.tensorwise"
    flags = words.split()
    one = tmp_path / "one"
    subprocess.run(
        [sys.executable, "-m", "smoke_tests.training.pretrain", *flags, "--out", str(one)],
        cwd=str(jobs.CHECKOUT),
        check=True,
    )
    for way in ("ddp", "fsdp2"):
        with started(tmp_path / way, *flags, "--parallel", way, processes=1) as job:
            assert job.ended(300) == 0, job.printed()[-3000:]
        measured[way] = apart(tmp_path / way, read_log(one / "log.jsonl"))
        assert measured[way] < 0.1  # fsdp2 casts a weight to bfloat16 before FP8
