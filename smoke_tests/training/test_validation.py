"""The loss on held-out text during a run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Dict, List
from unittest import mock

import pytest
import torch

from smoke_tests.claims import proves
from smoke_tests.training import checkpoint, infer, validation
from smoke_tests.training.logs import read_log
from smoke_tests.training.small_runs import last_of, small, trained
from smoke_tests.training.text import Text
from smoke_tests.training.trainer import Run

pytestmark = pytest.mark.usefixtures("one_thread")


def validated(folder: Path, precision: str) -> List[Dict[str, Any]]:
    """The log of a run with --eval-every; its losses and its last checkpoint are those of a run without it."""
    found = []
    for name, every in (("with", 2), ("without", 0)):
        out = folder / name
        cheap: Dict[str, Any] = {"steps": 3, "length": 16, "batch_size": 8, "deterministic": True}
        options = small(precision, **cheap, eval_every=every, eval_windows=5, out=str(out))
        found.append((trained(options), checkpoint.load(last_of(out)), read_log(out / "log.jsonl")))
    (losses, content, rows), (others, other, plain) = found
    assert losses == others and not any("validation" in row for row in plain)
    assert all(torch.equal(content["model"][name], values) for name, values in other["model"].items())
    moments = (each["optimizer"]["state"] for each in (content, other))
    assert all(torch.equal(a[key], b[key]) for a, b in zip(*(state.values() for state in moments)) for key in a)
    assert torch.equal(content["random"]["torch"], other["random"]["torch"])
    events = [event for event in read_log(folder / "with" / "events.jsonl") if event["event"] == "validation"]
    assert [event["step"] for event in events] == [2, 3] and "validation" not in rows[0]
    assert [event["validation"] for event in events] == [row["validation"] for row in rows[1:]]
    return rows


def unseen_loss(folder: Path, precision: str) -> float:
    """The loss of the last checkpoint on the same windows, as infer measures it."""
    reader = infer.opened(last_of(folder / "with"), precision, "fused", "cpu")
    return math.log(infer.perplexity(reader, Text.read((), "", 256, 16, 0), 5))


@proves(
    "--eval-every logs the loss on held-out windows at its steps and after the last, and changes no bit of the run",
    package="torch",
    since="2.1",
)
def test_validation(tmp_path: Path) -> None:
    rows = validated(tmp_path, "float32")
    assert rows[-1]["validation"] == pytest.approx(unseen_loss(tmp_path, "float32"), rel=1e-5)
    assert "validation_high" not in rows[-1]


@proves(
    "in FP8, --eval-every logs the loss in FP8 and in high precision, and changes no bit of the run",
    package="torchao",
)
def test_validation_in_fp8(tmp_path: Path) -> None:
    rows = validated(tmp_path, "torchao.tensorwise")
    assert rows[-1]["validation"] == pytest.approx(unseen_loss(tmp_path, "torchao.tensorwise"), rel=1e-5)
    assert rows[-1]["validation_high"] == pytest.approx(unseen_loss(tmp_path, "float32"), rel=1e-5)
    assert rows[-1]["validation"] != rows[-1]["validation_high"]


@proves("scales that a forward pass changes are after a validation what they were before", package="torch", since="2.1")
def test_scales_stay() -> None:
    run, scale = Run(small(eval_windows=3)), torch.tensor([1.0, 2.0])
    forward = run.model.forward

    def scaling(*inputs: Any) -> Any:
        scale.mul_(3)
        return forward(*inputs)

    state = mock.patch.object(checkpoint, "fp8_state_of", lambda model: {"scale": scale})
    with state, mock.patch.object(run.model, "forward", scaling):
        numbers = validation.losses(run)
    assert scale.tolist() == [1.0, 2.0] and numbers == validation.losses(run)
