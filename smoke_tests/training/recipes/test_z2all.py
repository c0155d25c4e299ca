"""Z2all's ablation on the tiny model: a row trains with what it names, and what fails is a line and not a number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import List

import pytest

from smoke_tests.claims import long, proves
from smoke_tests.training.recipes import z2all
from smoke_tests.training.small_runs import refusal_of

QUICK = ["--model", "tiny", "--device", "cpu", "--precision", "float32", "--batch-size", "2"]
QUICK += ["--gradient-accumulation-steps", "2", "--steps", "6", "--warmup", "2"]


def losses(folder: Path) -> List[float]:
    return [json.loads(line)["loss"] for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()]


@long
@proves(
    "Z2all's ablation trains each row with the operators that the row names: the losses of all operators fused, and of "
    "one of them naive, are those of all naive to 1e-4, and a step's seconds are those of the log",
    seed=("B12", "B13", "B15", "B20", "B21", "B24"),
    package="torch",
)
def test_rows(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rows = ["naive", "use_all", "w/o rope"]
    assert z2all.main(["--rows", *rows, *QUICK, "--out", str(tmp_path / "out")]) == 0
    lines = capfd.readouterr().out.splitlines()[1:]
    assert [line[:18].rstrip() for line in lines] == rows
    logs = [tmp_path / "out" / str(number) for number in range(3)]
    naive = losses(logs[0])
    assert len(naive) == 6 and naive[0] - naive[-1] > 0.1
    for line, folder in zip(lines, logs):
        assert losses(folder) == pytest.approx(naive, abs=1e-4)
        last = json.loads((folder / "log.jsonl").read_text(encoding="utf-8").splitlines()[-1])
        assert float(line[18:26]) == pytest.approx(last["seconds"], abs=1e-3)
    assert losses(logs[1]) != naive, "the fused operators did not run"


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
