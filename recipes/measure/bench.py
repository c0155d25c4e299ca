"""Measure in a target's environment with smoke_tests/bench/, and show the progress."""

from __future__ import annotations

import re
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from recipes.catalogue.plan import Plan
from recipes.errors import Refusal
from recipes.make import environment
from recipes.process import group
from recipes.progress import console, say
from recipes.prove.smoke import watched


def measure(plan: Plan, env: Path, only: list[str], seconds: float | None, quick: bool) -> Path:
    """Measure what build/TARGET/bench/rows.jsonl lacks, show the progress, and return that file."""
    out, command = _command(plan, env, only, quick)
    command += ["--seconds", str(seconds)] if seconds is not None else []
    last = ""
    columns = (TextColumn("bench"), BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn())
    shown = Progress(*columns, TextColumn("{task.description}", markup=False), console=console, transient=True)
    with shown, group(command, plan.root, environment.run_variables(plan.target, env)) as process:
        task = shown.add_task("", total=None)
        assert process.stdout
        for line in process.stdout:
            last = line.rstrip() or last
            if done := re.match(r"\[(\d+)/(\d+)\] (.*), (about .* left)$", last):
                shown.update(task, completed=int(done[1]), total=int(done[2]), description=done[4])
            say(last)
        code = process.wait()
    if code == 130:
        raise KeyboardInterrupt
    if code not in (0, 4):  # 4: time ran out
        raise _refused(plan, last, code)
    return out


def listed(plan: Plan, env: Path, only: list[str], quick: bool) -> int:
    """Show the cells that this machine can measure, and which of them are measured."""
    _, command = _command(plan, env, only, quick)
    code, output = watched([*command, "--list"], plan.root, environment.run_variables(plan.target, env))
    if code:
        raise _refused(plan, (output.splitlines() or [""])[-1], code)
    return 0


def _command(plan: Plan, env: Path, only: list[str], quick: bool) -> tuple[Path, list[str]]:
    """The file of rows, and what measures into it."""
    out = folder_of(plan) / "rows.jsonl"
    command = [str(environment.python_of(env)), "-m", "smoke_tests.bench", "--out", str(out)]
    return out, [*command, *(text for key in only for text in ("--only", key)), *(["--quick"] if quick else [])]


def _refused(plan: Plan, last: str, code: int) -> Refusal:
    reason = last.removeprefix("bench: ") if last.startswith("bench: ") else f"measuring ended with code {code}."
    return Refusal(f"{plan.target.name}: {reason}")


def folder_of(plan: Plan) -> Path:
    """The folder of a target's rows and report in this checkout."""
    return environment.folder(plan.root, plan.target) / "bench"
