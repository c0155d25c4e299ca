"""Checkpoints: a run goes on from them after any stop, in another precision or with another AdamW."""

from __future__ import annotations

import dataclasses
import io
import random
import resource
import threading
from pathlib import Path
from typing import Any, Dict, List
from unittest import mock

import pytest
import torch

from smoke_tests.claims import every, long, proves
from smoke_tests.operators import bounds, references
from smoke_tests.operators.table import operator
from smoke_tests.training import (
    checkpoint,
    kills,
    logs,
    pretrain,
    schedule,
    trainer,
)
from smoke_tests.training.checkpoint import CheckpointError
from smoke_tests.training.options import Options
from smoke_tests.training.small_runs import FP8, begun, last_of, refusal_of, small, trained
from smoke_tests.training.trainer import Run

pytestmark = pytest.mark.usefixtures("one_thread")


@proves(
    "a run resumed at any step has the losses of one that was never stopped, to the last bit, with FP8's state",
    package="torchao",
)
def test_resume(tmp_path: Path) -> None:
    whole = trained(small(FP8[0], out=str(tmp_path / "whole")))
    for done in (1, 3, 5):
        options = small(FP8[0], out=str(tmp_path / str(done)), checkpoint_every=1)
        begun(options, done)
        assert trained(dataclasses.replace(options, resume=True)) == whole[done:]


@every("adamw")
@proves("AdamW goes on from torch's state, and torch's from its own: the next steps agree with float64")
def test_adamw_takes_over(column: str, device: str, measured: Dict[str, Any]) -> None:
    for first, then in (("torch", column), (column, "torch")):
        starts = [torch.randn(24, 16), torch.randn(40)]
        # Gradients of all magnitudes, down to those at which eps matters.
        history = [
            [torch.randn_like(start) * 10 ** torch.empty_like(start).uniform_(-10, 0) for start in starts]
            for _ in range(5)
        ]
        parameters = [torch.nn.Parameter(start.to(device, copy=True)) for start in starts]
        groups = [{"params": [parameter]} for parameter in parameters]
        earlier, later = (
            operator("adamw", name)([dict(each) for each in groups], **bounds.ADAMW) for name in (first, then)
        )
        for step, gradients in enumerate(history):
            if step == 3:
                saved = io.BytesIO()
                torch.save(earlier.state_dict(), saved)
                saved.seek(0)
                moments = torch.load(saved, map_location="cpu")
                later.load_state_dict(checkpoint.adamw_state(moments, later, then, step))
            for parameter, gradient in zip(parameters, gradients):
                parameter.grad = gradient.to(device, copy=True)
            (earlier if step < 3 else later).step()
        for parameter, start, given in zip(parameters, starts, zip(*history)):
            true = references.adamw(start.double(), [each.double() for each in given], **bounds.ADAMW)
            weight = parameter.detach().cpu()
            allowed = 5 * 2.0**-24 * (2.5 * torch.maximum(start.abs(), true.abs()) + 40 * bounds.ADAMW["lr"])
            excess = float(((weight - true).abs() / allowed).max())
            measured["excess"] = max(excess, measured.get("excess", 0.0))
            assert excess <= 1, f"from {first} to {then}, {excess:.3g} times as far from float64 as rounding explains"


@proves(
    "a run goes on with another AdamW than its checkpoint's: the moments are taken over, and how many steps are done",
    package="deepspeed",
    since="0.19",
)
def test_other_adamw(tmp_path: Path) -> None:
    whole = trained(small(out=str(tmp_path / "whole"), ops="adamw=torch"))
    for first, then in (("deepspeed.cpu", "torch"), ("torch", "deepspeed.cpu")):
        options = small(out=str(tmp_path / first), ops=f"adamw={first}")
        begun(options, 3)
        resumed = trained(dataclasses.replace(options, ops=f"adamw={then}", resume=True))
        assert resumed == pytest.approx(whole[3:], abs=2e-3)  # they are farther apart if the count of steps starts over


@long
@proves(
    "a deterministic run killed while it writes a checkpoint goes on, every later loss equal to the last bit",
    package="torchao",
)
def test_kill(tmp_path: Path, measured: Dict[str, Any]) -> None:
    fields: Dict[str, Any] = {"precision": FP8[0], "steps": 8, "checkpoint_every": 2, "device": "cpu"}
    draw = random.Random(0)
    for trial in range(9):  # a write takes milliseconds and can be over when the signal comes
        killed = tmp_path / str(trial)
        death = kills.killed(killed, fields["steps"], inside=True, draw=draw)
        if death["inside a write"]:
            break
    measured["inside"] = " ".join(death["inside a write"])
    assert measured["inside"] and not death["had ended"]
    options = Options(out=str(killed), deterministic=True, resume=True, **fields)
    resumed = trained(options)  # in this process, on one thread as well
    assert resumed == trained(Options(out=str(tmp_path / "whole"), **fields))


@proves(
    "a full disk is named, the last good checkpoint stays, and the run ends with its failure",
    package="torch",
    since="2.1",
)
def test_full_disk(tmp_path: Path) -> None:
    options = small(out=str(tmp_path))
    run, _ = pretrain.start(options)
    run.update(0)
    saved = run.save()
    before = saved.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limits[1]))
    try:
        run.update(1)
        with pytest.raises(CheckpointError, match=r"step 2 .*File too large.*step-00000001.pt is still"):
            run.save()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == [saved.name]
    assert saved.read_bytes() == before
    saved.write_bytes(before[: len(before) // 2])
    with pytest.raises(CheckpointError, match="is not a whole checkpoint"):
        checkpoint.load(saved)
    run.release()


@proves(
    "a checkpoint that is cut short names the older one and how to go on from it, which then works",
    package="torch",
    since="2.1",
)
def test_cut_short(tmp_path: Path) -> None:
    options = small(out=str(tmp_path), steps=4)
    trained(options)
    last = last_of(tmp_path)
    last.write_bytes(last.read_bytes()[:5000])
    options.resume = True
    with pytest.raises(CheckpointError, match=r"step-00000004.pt is not a whole .*; delete it .* step-00000002.pt$"):
        pretrain.start(options)
    last.unlink()
    assert len(trained(options)) == 4


@proves("the last checkpoints are kept, and beside them each of the N-th steps", package="torch", since="2.1")
def test_keep_every(tmp_path: Path) -> None:
    trained(small(out=str(tmp_path), steps=8, checkpoint_every=1, keep=2, keep_every=3))
    assert sorted(int(path.stem[5:]) for path in tmp_path.glob("step-*.pt")) == [3, 6, 7, 8]


@proves(
    "a thread writes a checkpoint of its own step while later steps are done; it appears whole, and a run goes on from "
    "it to the last bit; one that cannot be written ends the run with its failure",
    package="torch",
    since="2.1",
)
def test_async_checkpoint(tmp_path: Path) -> None:
    whole = trained(small(out=str(tmp_path / "whole"), checkpoint_every=2, keep=9))
    options = small(out=str(tmp_path / "async"), checkpoint_every=2, keep=9, async_checkpoint=True, log_every=1)
    later, own = threading.Event(), checkpoint.save
    seen: List[str] = []

    def slow(*given: Any) -> Path:
        assert later.wait(60)
        return own(*given)

    def say(line: str) -> None:
        if line.startswith("step 4/"):  # before the second checkpoint waits for the first
            seen.extend(path.name for path in Path(options.out).glob("*.pt"))
            later.set()

    with mock.patch.object(checkpoint, "save", slow):
        assert trained(options, say) == whole
    assert seen == []
    for name in ("step-00000002.pt", "step-00000006.pt"):
        first, second = (checkpoint.load(tmp_path / way / name) for way in ("whole", "async"))
        assert all(torch.equal(first["model"][key], each) for key, each in second["model"].items())
        for state, other in zip(*(content["optimizer"]["state"].values() for content in (first, second))):
            assert all(torch.equal(state[key], other[key]) for key in state)
    for path in Path(options.out).glob("step-*.pt"):
        if path.name != "step-00000002.pt":
            path.unlink()
    assert trained(dataclasses.replace(options, resume=True)) == whole
    lines: List[str] = []
    failing = mock.Mock(side_effect=CheckpointError("the disk is gone"))
    run, _ = pretrain.start(dataclasses.replace(options, out=str(tmp_path / "failing"), steps=100))
    with mock.patch.object(checkpoint, "save", failing):
        assert trainer.train(run, lines.append) == 1
    assert run.step < 6 and lines[-1] == "fusebox: the disk is gone"
    assert not list((tmp_path / "failing").glob("step-*"))


@proves(
    "an FP8 run goes on in bfloat16 and back from its checkpoint, no weight changed",
    package="torchao",
)
def test_other_precision(tmp_path: Path) -> None:
    options = small(FP8[1], out=str(tmp_path), steps=2, schedule="constant")
    trained(options)
    first = Run(options)
    first.load(checkpoint.newest(tmp_path))  # type: ignore[arg-type]
    for precision in ("bf16", FP8[1]):
        options = dataclasses.replace(options, precision=precision, resume=True, steps=options.steps + 2)
        run, _ = pretrain.start(options)
        if precision == "bf16":
            for name, weight in checkpoint.weights_of(first.model).items():
                assert torch.equal(weight, checkpoint.weights_of(run.model)[name])
        assert trainer.train(run, lambda line: None) == 0
    assert [row["step"] for row in logs.read_log(tmp_path / "log.jsonl")] == list(range(6))


@proves(
    "a resume whose flags would have given the steps that are done other learning rates is refused, and names the flag "
    "that keeps them",
    package="torch",
    since="2.1",
)
def test_schedule_is_kept(tmp_path: Path) -> None:
    options = small(out=str(tmp_path), steps=4)
    trained(options)
    longer = dataclasses.replace(options, steps=8, resume=True)
    assert "add --decay-steps 4" in refusal_of(lambda: pretrain.start(longer))
    longer.decay_steps = 4
    trained(longer)
    rates = [row["lr"] for row in logs.read_log(tmp_path / "log.jsonl")]
    assert rates == [schedule.rate_at(min(step, 4), options) for step in range(8)]
    # wsd continues at its highest rate until its decay begins.
    options = small(out=str(tmp_path / "wsd"), steps=10, decay_ratio=0.5, schedule="wsd")
    begun(options, 5)
    run, _ = pretrain.start(dataclasses.replace(options, steps=20, resume=True))
    run.release()
    assert "--decay-steps 10" in refusal_of(lambda: pretrain.start(dataclasses.replace(options, steps=6, resume=True)))


@proves("the generators go on from their saved state as if nothing was between", package="torch", since="2.1")
def test_random_state() -> None:
    random.gauss(0, 1)  # of the pair that it draws, one is left
    saved = checkpoint.random_state()
    drawn = [[random.gauss(0, 1), random.random(), float(torch.rand(()))] for _ in range(3)]
    checkpoint.restore_random_state(saved)
    assert drawn == [[random.gauss(0, 1), random.random(), float(torch.rand(()))] for _ in range(3)]
