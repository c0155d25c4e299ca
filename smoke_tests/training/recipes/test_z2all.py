"""Z2all's ablation on the tiny model: a row trains with what it names, and what fails is a line and not a number."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any, List

import pytest

from smoke_tests.claims import long, proves
from smoke_tests.training.logs import read_log
from smoke_tests.training.recipes import z2all
from smoke_tests.training.small_runs import refusal_of

QUICK = ["--model", "tiny", "--device", "cpu", "--precision", "float32", "--batch-size", "2"]
QUICK += ["--gradient-accumulation-steps", "2", "--steps", "6", "--warmup", "2"]


@long
@proves(
    "Z2all's ablation trains each row with the operators that the row names: the losses of all operators fused, and of "
    "one of them naive, are those of all naive to 1e-4, and a step's seconds are those of the log",
    seed=("B12", "B13", "B15", "B20", "B21", "B24"),
    package="torch",
)
def test_rows(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    rows, begun = ["naive", "use_all", "w/o rope"], subprocess.run
    started: List[str] = []

    def noting(*words: Any, **settings: Any) -> Any:
        done = begun(*words, **settings)
        started.append(done.stdout)
        return done

    monkeypatch.setattr(subprocess, "run", noting)
    assert z2all.main(["--rows", *rows, *QUICK, "--out", str(tmp_path / "out")]) == 0
    lines = capfd.readouterr().out.splitlines()[1:]
    assert [line[:18].rstrip() for line in lines] == rows
    logs = [read_log(tmp_path / "out" / str(number) / "log.jsonl") for number in range(3)]
    losses = [[step["loss"] for step in steps] for steps in logs]
    assert len(losses[0]) == 6 and losses[0][0] - losses[0][-1] > 0.1
    for line, steps, of_row in zip(lines, logs, losses):
        assert of_row == pytest.approx(losses[0], abs=1e-4)
        assert float(line[18:26]) == pytest.approx(steps[-1]["seconds"], abs=1e-3)
    # Their losses may be equal to the last bit, so each row says which operators it used; torch may warn before that.
    naive = [{name for name in ("attention", "rope", "swiglu") if f" {name} naive," in text} for text in started]
    assert naive == [{"attention", "rope", "swiglu"}, set(), {"rope"}]
    assert not list(tmp_path.glob("out/*/step-*")), "a row left its checkpoint"


@proves(
    "Z2all's ablation shows a row that fails as a sentence, goes on with the others, and ends with code 1",
    package="torch",
)
def test_failure(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--rows", "naive", "use_all", *QUICK, "--data", "nowhere.txt", "--out", str(tmp_path / "out")]
    assert z2all.main(words) == 1
    lines = capfd.readouterr().out.splitlines()[1:]
    assert len(lines) == 2 and all("fusebox: " in line and "nowhere.txt" in line for line in lines)


@pytest.mark.parametrize(
    ("words", "named"),
    [(["--steps", "5"], "--steps is 5"), (["--out", "."], "--out . exists"), (["--rows", "none"], "--rows")],
    ids=["steps", "out", "rows"],
)
@proves(
    "Z2all's ablation refuses in one sentence too few steps, a folder that exists and a row that does not",
    package="torch",
)
def test_refusals(words: List[str], named: str) -> None:
    text = refusal_of(lambda: z2all.main([*words]))
    assert text.startswith("fusebox: ") and named in text
