"""Runs on several processes: the same training as on one, checkpoints between them, and how a job ends."""

from __future__ import annotations

import datetime
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from smoke_tests.claims import long, needs, proves
from smoke_tests.training import checkpoint, parallel, pretrain
from smoke_tests.training.distributed import forks, jobs
from smoke_tests.training.logs import read_log
from smoke_tests.training.parallel import Ranks
from smoke_tests.training.small_runs import FP8, begun, last_of, refusal_of, small, trained
from smoke_tests.training.trainer import Run

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = "--device cpu --learning-rate 3e-3 --warmup 2 --schedule constant --checkpoint-every 0"
EVAL = "--eval-every 2 --eval-windows 6"
FLOAT32 = f"{CPU} --precision float32"


def on_cpu(folder: Path, processes: int, flags: str) -> None:
    """Do a run on that many processes."""
    forks.run(processes, [*flags.split(), "--out", str(folder)], folder.with_suffix(".log"))


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
    options = {"eval_every": 2, "eval_windows": 6, **options}
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
    forks.serve()
    truth = alone(tmp_path / "one", batch_size=8)
    ddp, fsdp2, skip, one_skip = (tmp_path / name for name in ("ddp", "fsdp2", "skip", "one_skip"))
    for folder in (skip, one_skip):  # earlier losses, far from that of the first step
        folder.mkdir()
        (folder / "log.jsonl").write_text('{"step": -1, "loss": 0.0, "norm": 1.0, "tokens": 0}\n' * 32)
    on_cpu(ddp, 2, f"--steps 4 --batch-size 2 --gradient-accumulation-steps 2 {EVAL} {FLOAT32}")
    on_cpu(fsdp2, 2, f"--steps 4 --batch-size 4 --parallel fsdp2 {EVAL} {FLOAT32}")
    again = f"--steps 6 --resume {EVAL} {FLOAT32}"
    on_cpu(ddp, 4, f"--batch-size 1 --gradient-accumulation-steps 2 --parallel fsdp2 {again}")
    on_cpu(fsdp2, 4, f"--batch-size 2 {again}")
    on_cpu(skip, 2, f"--steps 2 --batch-size 4 --skip-spikes {FLOAT32}")
    for folder, saved in ((ddp, ("4.pt", "6.dcp")), (fsdp2, ("4.dcp", "6.pt"))):
        assert [path.name for path in checkpoint.complete(folder)] == [f"step-0000000{each}" for each in saved]
        copy = tmp_path / f"{folder.name} alone"
        copy.mkdir()
        first = checkpoint.complete(folder)[0]
        (shutil.copytree if first.is_dir() else shutil.copy)(str(first), str(copy / first.name))
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
    forks.serve()
    one = alone(tmp_path / "one", precision=FP8[0], steps=4, batch_size=2, gradient_accumulation_steps=2)
    flags = f"--precision {FP8[0]} --steps 4 --batch-size 2 {CPU} {EVAL}"
    on_cpu(tmp_path / "fsdp2", 2, f"{flags} --parallel fsdp2")
    on_cpu(tmp_path / "ddp", 2, f"{flags} --guard 2 --guard-steps 1")
    for way in ("fsdp2", "ddp"):
        measured[way] = apart(tmp_path / way, one)
        assert measured[way] < 1e-3  # a sum in another order can round to the next code
    events = [json.loads(line) for line in (tmp_path / "ddp/events.jsonl").read_text().splitlines()]
    assert [event["kind"] for event in events if event["event"] == "guard"] == ["good", "good"]


def started(folder: Path, *flags: str, processes: int = 2) -> jobs.Job:
    """The command under torchrun, which starts it once more if a process fails."""
    command = jobs.torchrun(
        "pretrain",
        ["--out", str(folder), *flags],
        processes,
        ["--standalone", "--max-restarts", "1"],
        package="smoke_tests.training",
    )
    return jobs.Job(command, folder.with_suffix(".log"))


def reach(job: jobs.Job, folder: Path, step: int) -> None:
    """Wait until the run has done this step."""
    job.wait(lambda: len(read_log(folder / "log.jsonl")) > step, f"step {step}")


@long
@proves(
    "SIGUSR1 to one of torchrun's two processes has both save, rank 0 in a thread, while no other run gets their "
    "folder; when one is killed, the other names it in one sentence, and torchrun starts both again, which go on from "
    "that checkpoint; SIGTERM to torchrun ends both after the same step with a checkpoint",
    package="torch",
    since="2.13",  # not tried with an older one
)
def test_torchrun_ends(tmp_path: Path, measured: Dict[str, Any]) -> None:
    folder = tmp_path / "run"
    begun(small(steps=100_000, batch_size=4, schedule="constant", checkpoint_every=0, out=str(folder)), 1)
    flags = f"--resume {FLOAT32} --batch-size 2 --steps 100000 --async-checkpoint --log-every 100000"
    with started(folder, *flags.split()) as job:
        reach(job, folder, 3)
        assert "is in use by process" in refusal_of(lambda: pretrain.start(small(out=str(folder))))
        (other,) = job.processes("RANK=1")
        os.kill(other, signal.SIGUSR1)
        job.wait(lambda: "checkpoint ends" in events_of(folder), "checkpoint")
        saved = checkpoint.step_of(last_of(folder))
        os.kill(other, signal.SIGKILL)
        killed = time.monotonic()
        job.wait(lambda: f"from step {saved}" in job.printed(), "second start")
        measured["seconds until both go on"] = time.monotonic() - killed
        reach(job, folder, saved + 2)
        job.process.send_signal(signal.SIGTERM)
        job.ended(60)
        printed = job.printed()
    assert printed.count("stopped after step") == 1, printed[-3000:]  # rank 0 alone prints
    sentences = [line for line in printed.splitlines() if line.startswith("fusebox: ")]
    assert len(sentences) == 1 and "rank 0 of 2" in sentences[0] and " lost rank 1 on host " in sentences[0], sentences
    rows = read_log(folder / "log.jsonl")
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert last_of(folder).name == f"step-{len(rows) + 1:08}.pt"
    assert events_of(folder) == ["checkpoint begins", "checkpoint ends"] * 2


def events_of(folder: Path) -> List[str]:
    """The names of a run's events."""
    return [event["event"] for event in read_log(folder / "events.jsonl")]


@proves(
    "a process that waits for another in vain ends after a stated time with one sentence, which names itself and the "
    "other, or what it could not reach, and says what to do",
    package="torch",
    since="2.13",  # not tried with an older one
)
def test_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(parallel, "PATIENCE", datetime.timedelta(seconds=1))
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    variables = {"RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 3, "LOCAL_WORLD_SIZE": 3, "MASTER_ADDR": "localhost"}
    variables.update(TORCHELASTIC_RUN_ID="test", TORCHELASTIC_USE_AGENT_STORE=True, TORCHELASTIC_RESTART_COUNT=1)
    for each in (0, 2):  # they were there when torchrun started the job the first time
        store.set(f"start 0/host/{each}", "earlier")

    def end_of(call: Callable[[], Any]) -> str:
        with pytest.raises(SystemExit):
            call()
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("fusebox: ")]
        assert len(lines) == 1 and f"rank 1 of 3 on host {socket.gethostname()} " in lines[0]
        return lines[0]

    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    with socket.socket() as closed:
        closed.bind(("localhost", 0))  # nobody listens there, and nobody else can
        for port, words in ((store.port, "waited 1 s for rank 0, 2: see"), (closed.getsockname()[1], "does not reach")):
            monkeypatch.setenv("MASTER_PORT", str(port))
            assert words in end_of(lambda: pretrain.main(["--device", "cpu", "--out", str(tmp_path / "run")]))
    here = f"rank 1 of 3 on host {socket.gethostname()}"
    sentence = end_of(lambda: parallel.connect("gloo", store, 1, 3, here))
    assert "could not connect to the other ranks within 1 s" in sentence and "GLOO_SOCKET_IFNAME" in sentence
    assert not (tmp_path / "run").exists()


@proves(
    "what DDP or FSDP2 cannot do is refused in one sentence that names both flags, and so are ranks that were started "
    "with different flags",
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
    with mock.patch.object(Ranks, "gathered", lambda ranks, value: [value, {**value, "--seed": 1}]):
        assert "--seed differs" in refusal_of(lambda: parallel.refuse_unlike({"--batch-size": 2, "--seed": 0}, ddp))
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
