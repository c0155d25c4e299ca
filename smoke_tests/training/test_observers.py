"""Who watches a run from outside: TensorBoard, Weights & Biases and the profiler."""

from __future__ import annotations

import contextlib
import json
import sys
import types
from pathlib import Path
from typing import Any, Dict, Iterator, List
from unittest import mock

import pytest
import torch

from smoke_tests.claims import proves
from smoke_tests.training import logs, pretrain, trainer
from smoke_tests.training.small_runs import refusal_of, small, trained

pytestmark = pytest.mark.usefixtures("one_thread")


class Recorded:
    """Stands in for TensorBoard's writer and for a run of Weights & Biases, and keeps what it is given."""

    def __init__(self, **asked: Any) -> None:
        self.asked, self.closed = asked, False
        self.rows: List[Any] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.rows.append((step, name, value))

    def log(self, row: Dict[str, float], step: int) -> None:
        self.rows += [(step, name, value) for name, value in row.items()]

    def close(self) -> None:
        self.closed = True

    finish = close


@contextlib.contextmanager
def packages(made: List[Recorded]) -> Iterator[None]:
    """The context in which both packages are there, as far as a run uses them."""

    def begin(folder: str = "", **asked: Any) -> Recorded:
        made.append(Recorded(folder=folder, **asked))
        return made[-1]

    board, bias = types.ModuleType("torch.utils.tensorboard"), types.ModuleType("wandb")
    board.SummaryWriter, bias.init = begin, begin  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:  # patch.dict would also forget what torch imports meanwhile
        patch.setitem(sys.modules, "torch.utils.tensorboard", board)
        patch.setitem(sys.modules, "wandb", bias)
        yield


@proves(
    "TensorBoard and Weights & Biases get each number of the log by step, and a resumed run goes on in the same plots; "
    "a missing package is refused by its flag, and one that fails costs the run nothing",
    package="torch",
    since="2.1",
)
def test_observers(tmp_path: Path) -> None:
    made: List[Recorded] = []
    options = small(out=str(tmp_path / "run"), steps=2, schedule="constant", tensorboard=True, wandb="project")
    with packages(made):
        trained(options)
        options.steps, options.resume = 3, True
        trained(options)
    board, bias, board_again, bias_again = made
    rows = logs.read_log(tmp_path / "run" / "log.jsonl")
    flat = [(row["step"], name, value) for row in rows for name, value in row.items() if name != "step"]
    for first, second in ((board, board_again), (bias, bias_again)):
        assert first.rows + second.rows == flat and first.closed and second.closed
    assert (board.asked["folder"], board_again.asked["purge_step"]) == (str(tmp_path / "run" / "tensorboard"), 2)
    assert bias.asked["project"] == "project" and bias.asked["id"] == bias_again.asked["id"]
    lines: List[str] = []
    with packages(made), mock.patch.object(Recorded, "add_scalar", side_effect=OSError("gone")):
        trained(small(out=str(tmp_path / "gone"), steps=3, tensorboard=True), lines.append)
    assert sum("gone" in line for line in lines) == 1
    for flag, module in (("--tensorboard", "torch.utils.tensorboard"), ("--wandb", "wandb")):
        words = [flag] if flag == "--tensorboard" else [flag, "project"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, module, None)
            refusal = refusal_of(lambda words=words: pretrain.main([*words, "--out", str(tmp_path / "none")]))  # type: ignore[misc]
        assert flag in refusal and "lacks" in refusal


@proves("--profile writes a trace of the step that it names and of no other", package="torch", since="2.1")
def test_profile(tmp_path: Path) -> None:
    own, traced = trainer.Run.update, []

    def update(run: trainer.Run, step: int) -> Dict[str, float]:
        traced.append(torch.autograd._profiler_enabled())
        return own(run, step)

    with mock.patch.object(trainer.Run, "update", update):
        trained(small(out=str(tmp_path), steps=3, profile=2))
    assert traced == [False, True, False]
    (path,) = tmp_path.glob("trace-*.json")
    names = {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}
    assert path.name == "trace-2.json" and {"aten::mm", "aten::embedding"} <= names
    assert "--profile 4" in refusal_of(lambda: pretrain.start(small(out=str(tmp_path / "none"), steps=3, profile=4)))


@proves(
    "the log has the tokens of the run so far, and with the step's seconds its tokens per second; no MFU without a GPU",
    package="torch",
    since="2.1",
)
def test_rates(tmp_path: Path) -> None:
    options = small(out=str(tmp_path), steps=3, batch_size=3, gradient_accumulation_steps=2, length=32)
    trained(options)
    for row in logs.read_log(tmp_path / "log.jsonl"):
        assert row["tokens"] == (row["step"] + 1) * 3 * 2 * 32
        assert row["tokens_per_second"] * row["seconds"] == pytest.approx(3 * 2 * 32)
        assert "mfu" not in row
    run, _ = pretrain.start(small(out=str(tmp_path / "gpu")))
    progress = logs.Progress(run, print, terminal=False)
    run.release()
    progress.peak = 2e12
    rates = progress.rates(0, 0.5)
    assert rates["mfu"] == pytest.approx(rates["tokens_per_second"] * progress.operations / 2e12)
