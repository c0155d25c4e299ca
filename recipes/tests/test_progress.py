"""A run is never silent: a line per step, with its seconds, also where there is no terminal."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.progress import Steps, say, size


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (191794682, "183 MiB"), (5 * 2**30, "5 GiB")]
)
def test_size(count: int, text: str) -> None:
    assert size(count) == text


def test_a_step_ends_in_one_line_with_its_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    with Steps() as steps, steps.step("fetch", "torch [2.13]") as step:
        step.note = "183 MiB"
    assert re.fullmatch(r"fetch   torch \[2\.13\]  183 MiB  0\.0 s\n", capsys.readouterr().out)


def test_a_line_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """rich reads :guard: as a picture."""
    say("guard.py:Guard: [bold] 75 rows")
    assert capsys.readouterr().out == "guard.py:Guard: [bold] 75 rows\n"


def test_a_failed_step_says_nothing_of_success(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="no"), Steps() as steps, steps.step("build", "torch"):
        raise ValueError("no")
    assert capsys.readouterr().out == ""


def test_a_log_gets_a_line_every_ten_seconds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(0, 1000, 4))
    monkeypatch.setattr("recipes.progress.time.monotonic", lambda: float(next(clock)))
    with Steps() as steps, steps.step("build", "torch") as step:
        for line in range(6):
            step.show(f"compiling {line}")
    lines = capsys.readouterr().out.splitlines()
    assert [line.rpartition(" ")[2] for line in lines[:-1]] == ["2", "5"]


@pytest.mark.parametrize("how", ["| cat", ">&-"], ids=["ASCII", "closed"])
def test_any_stdout_will_do(how: str) -> None:
    """One that cannot write a letter, and one that is closed."""
    code = "import sys; from recipes.progress import Steps; Steps().say('fetch', 'f\\xfcr'); sys.stdout.flush()"
    done = subprocess.run(
        ["bash", "-c", f'set -o pipefail; "$0" -c "$1" {how}', sys.executable, code],
        cwd=Path(__file__).parents[2], env={"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == ([] if how == ">&-" else ["fetch", r"f\xfcr"])
