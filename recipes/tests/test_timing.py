"""What a run of the tests will take is told from what a kept run took, and slow tests start first."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from recipes.files import ROOT
from recipes.tests import timing

TABLE: dict[str, Any] = {
    "cores": 2,
    "groups": {
        "recipes/tests/test_a.py": {"tests": 10, "seconds": 20.0},
        "recipes/tests/test_a.py::test_long": {"tests": 2, "seconds": 120.0},
    },
}
QUICK, LONG = "recipes/tests/test_a.py::test_quick", "recipes/tests/test_a.py::test_long[row]"


@pytest.mark.parametrize(
    ("tests", "processes", "words"),
    [
        ([QUICK] * 5, 1, "5 tests, about 10 s, as the last kept run took on 2 cores"),
        ([QUICK, LONG, LONG, LONG, LONG], 2, "5 tests, about 2 min, as the last kept run took on 2 cores"),
        ([QUICK, "recipes/tests/test_new.py::test_it"], 1, "2 tests, about 4 s, as the last kept run took on 2 cores"),
        (["recipes/tests/test_new.py::test_it"], 1, "1 tests; no earlier run says how long they take"),
    ],
)
def test_an_estimate_follows_what_is_chosen(tests: list[str], processes: int, words: str) -> None:
    assert timing.estimate(tests, processes, TABLE) == words


def test_a_kept_run_replaces_what_is_known_of_its_tests_alone() -> None:
    other, short, long = "recipes/tests/test_b.py::test_it", QUICK, "recipes/tests/test_a.py::test_long"
    both = timing.written(TABLE, {other: {other}}, {other: 1.26})["groups"]
    assert both == {**TABLE["groups"], "recipes/tests/test_b.py": {"tests": 1, "seconds": 1.3}}
    again = timing.written(TABLE, {short: {short}}, {short: 0.5})["groups"]
    assert again == {**TABLE["groups"], "recipes/tests/test_a.py": {"tests": 1, "seconds": 0.5}}
    faster = timing.written(TABLE, {short: {short}, long: {LONG}}, {short: 0.5, long: 1.5})["groups"]
    assert faster == {"recipes/tests/test_a.py": {"tests": 2, "seconds": 2.0}}
    slower = timing.written(TABLE, {short: {short}}, {short: 2.5})["groups"]
    assert slower[short] == {"tests": 1, "seconds": 2.5}


PLANTED = """
import pytest

def test_quick():
    pass

@pytest.mark.slow
@pytest.mark.parametrize("row", [1, 2])
def test_long(row):
    pass
"""


@pytest.mark.parametrize("processes", ["0", "2"])
def test_a_run_says_what_it_takes_before_it_starts_and_begins_with_slow_tests(tmp_path: Path, processes: str) -> None:
    (tmp_path / "test_planted.py").write_text(PLANTED)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    command = [sys.executable, "-m", "pytest", "-p", "recipes.tests.timing", "-n", processes, "-vv", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    announced, _, ran = done.stdout.partition("3 tests; no earlier run says how long they take\n")
    assert ran and "PASSED" not in announced
    if processes == "0":
        assert re.findall(r"::(\w+\[?\d?)", ran) == ["test_long[1", "test_long[2", "test_quick"]
