"""Tests that share what is slow to make run in one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.files import ROOT
from recipes.tests.groups import TOGETHER

PLANTED = """
import os, pathlib, time, pytest

@pytest.mark.parametrize("row", range(6))
def test_it(row):
    with pathlib.Path("processes").open("a") as file:
        print(os.environ["PYTEST_XDIST_WORKER"], file=file)
    time.sleep(0.1)
"""


@pytest.mark.parametrize("group", ["patches/", "recipes/tests/test_breakages.py"])
def test_a_group_runs_in_one_process(tmp_path: Path, group: str) -> None:
    """With the options of `nox -s tests`."""
    assert group in TOGETHER and all((ROOT / each).exists() for each in TOGETHER)
    planted = tmp_path / group / "test_planted.py" if group.endswith("/") else tmp_path / group
    planted.parent.mkdir(parents=True)
    planted.write_text(PLANTED)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    options = ["-p", "recipes.tests.groups", "-p", "no:cacheprovider", "-n", "2", "--dist", "loadgroup"]
    command = [sys.executable, "-m", "pytest", *options, "-c", str(tmp_path / "pytest.ini"), str(planted)]
    variables = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
    assert "6 passed" in done.stdout, done.stdout + done.stderr
    assert len({*(tmp_path / "processes").read_text().splitlines()}) == 1
