"""The documents' tables of several GPUs, on the tiny model: a row is a job of the engine, and a failure is a line."""

from __future__ import annotations

from pathlib import Path
from typing import List

import pytest
import torch

from smoke_tests.claims import proves
from smoke_tests.training.distributed import jobs
from smoke_tests.training.recipes import float8_fsdp2, rows, tilearn
from smoke_tests.training.small_runs import refusal_of

TINY = {
    "sharded": rows.Row("tiny", "none", "8,000"),
    "tensor 2": rows.Row("tiny-tp2", "none", ""),
    "pipeline 2": rows.Row("tiny-pp2", "none", "10,000 (1.28)"),
}


def table(*words: str) -> int:
    """The tiny table on the CPU."""
    return rows.main("tiny", "A table.", TINY, "8 GPUs", ["--cpu", *words])


@proves(
    "a document's table of several GPUs trains each row in its layout (sharded, tensor parallel, in a pipeline) and "
    "prints tokens/s, memory and the loss of its log, which falls",
    seed=("D01", "D07", "E05", "E06", "E09"),
    package="torchtitan",
)
def test_rows(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert table("--out", str(out), "--steps", "8", "--lr_scheduler.warmup_steps", "2") == 0
    printed = capfd.readouterr().out.splitlines()
    assert printed[0].split() == ["tokens/s/GPU", "times", "GiB", "loss", "8", "GPUs"]
    for number, (line, key) in enumerate(zip(printed[1:], TINY)):
        assert line.startswith(key) and line.endswith(TINY[key].document)
        numbers = line[len(max(TINY, key=len)) + 2 :].replace(",", "").split()
        curves = [jobs.losses(out / str(number), rank) for rank in (0, 1)]
        curve = next(curve for curve in curves if min(curve.values()) > 0)
        assert len(curve) == 8 and float(numbers[3]) == pytest.approx(curve[8], abs=1e-3)
        assert curve[8] < curve[1], "it does not learn"
        assert not (out / str(number) / "checkpoint").exists()


@proves(
    "a row that fails is a sentence in its line, the others go on, and the table ends with code 1", package="torchtitan"
)
def test_failure(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TINY, "tensor 2", rows.Row("tiny-tp2", "rowwise", ""))
    words = ["--rows", "tensor 2", "sharded", "--steps", "6", "--training.dataset_path"]
    assert table(*words, str(tmp_path / "nowhere"), "--out", str(tmp_path / "out")) == 1
    lines = capfd.readouterr().out.splitlines()[1:]
    assert len(lines) == 2 and all("Error: " in line for line in lines), lines


@pytest.mark.parametrize(
    ("words", "named"),
    [(["--steps", "5"], "--steps is 5"), (["--out", "."], "--out . exists"), (["--rows", "none"], "--rows")],
    ids=["steps", "out", "rows"],
)
@proves("a table of several GPUs refuses too few steps, a folder that exists and an unknown row", package="torchtitan")
def test_refusals(words: List[str], named: str) -> None:
    text = refusal_of(lambda: table(*words))
    assert text.startswith("fusebox: ") and named in text


@proves(
    "the rows of float8-fsdp2 and tilearn are runs that the engine knows, of one batch in each table; a layout that "
    "does not fit this machine's GPUs is refused in one sentence that names those it fits",
    seed=("D01", "E05", "E06", "E09", "E10"),
    package="torchtitan",
)
def test_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    for document in (float8_fsdp2.ROWS, tilearn.ROWS):
        batches = set()
        for row in document.values():
            monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
            arguments = rows.arguments_of(row, cpu=False)
            assert ("float8" in arguments) == (row.float8 != "none")
            batches.add(arguments[arguments.index("--training.global_batch_size") + 1])
            monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
            with pytest.raises(RuntimeError, match=r"is laid out for .* or 8 GPUs of one machine, and this one has 3"):
                rows.arguments_of(row, cpu=False)
        assert len(batches) == 1
