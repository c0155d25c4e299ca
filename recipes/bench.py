"""Numbers: measure in a target's environment, keep the rows, and show them in one page.

smoke_tests/bench/ measures, inside the environment; here its rows become report.html (with rows.csv and rows.json
beside it), evidence to be committed, and README's pictures.
"""

from __future__ import annotations

import ast
import csv
import importlib
import io
import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from recipes import environment
from recipes.cache import write_text
from recipes.model import Refusal
from recipes.plan import Plan
from recipes.process import group
from recipes.progress import console

Row = dict[str, Any]
LAUNCHES = ("eager", "graph", "compiled", "compiled graph")
PICTURES = ("block", "ablation", "crossover")  # README's


def room(root: Path, name: str) -> ModuleType:
    """A module of smoke_tests/bench/ that needs the standard library only: rows, recommend."""
    folder = str(root / "smoke_tests")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(f"bench.{name}")


def measure(plan: Plan, env: Path, only: list[str], seconds: float | None, quick: bool) -> Path:
    """Measure what is missing in build/TARGET/bench/rows.jsonl, show how far it is, and return that file."""
    out = environment.folder(plan.root, plan.target) / "bench" / "rows.jsonl"
    command = [str(environment.python_of(env)), "-m", "bench", "--out", str(out)]
    command += [text for key in only for text in ("--only", key)]
    command += (["--seconds", str(seconds)] if seconds else []) + (["--quick"] if quick else [])
    last = ""
    columns = (TextColumn("bench"), BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn())
    shown = Progress(*columns, TextColumn("{task.description}", markup=False), console=console, transient=True)
    folder = plan.root / "smoke_tests"
    with shown, group(command, folder, environment.run_variables(plan.target, env)) as process:
        task = shown.add_task("", total=None)
        assert process.stdout
        for line in process.stdout:
            last = line.rstrip() or last
            if done := re.match(r"\[(\d+)/(\d+)\] (.*), (about .* left)$", last):
                shown.update(task, completed=int(done[1]), total=int(done[2]), description=done[4])
            console.print(last, soft_wrap=True, markup=False)
        code = process.wait()
    if code == 130:
        raise KeyboardInterrupt
    if code not in (0, 4):  # 4: the time was over
        said = last.removeprefix("bench: ") if last.startswith("bench: ") else f"measuring ended with code {code}."
        raise Refusal(f"{plan.target.name}: {said}")
    return out


def read(root: Path, path: Path) -> tuple[list[Row], list[Row]]:
    """The runs that a file of rows tells of, and the last row of each cell, judged; refused without any."""
    rows = room(root, "rows")
    found = rows.read(path)
    cells = list(rows.latest(found).values())
    if not cells:
        raise Refusal(f'{path} holds no measured row: run `nox -s "bench(TARGET)"` first.')
    used = {row["shard"] for row in cells}
    return [row for row in found if row["key"] == "shard" and row["shard"] in used], cells


def promote(plan: Plan, path: Path) -> list[Path]:
    """Keep the last row of each cell in smoke_tests/evidence/bench/, with README's pictures of them."""
    from recipes import charts

    runs, cells = read(plan.root, path)
    others = sorted({run["target"] for run in runs} - {plan.target.name})
    if others:
        raise Refusal(f"{path} holds rows of {others[0]}: bring those of {plan.target.name}.")
    names = sorted({run["machine"]["name"] for run in runs})
    if len(names) > 1:
        raise Refusal(f"{path} holds rows of {' and '.join(names)}: bring those of one machine.")
    if any(row["quick"] for row in cells):
        raise Refusal(f"{path} holds rows of --quick: run without it.")
    final = committed_path(plan.root, plan.target.name, names[0])
    kept = [*runs, *cells]
    write_text(final, "".join(json.dumps(without_verdict(row)) + "\n" for row in kept))
    written = [final]
    for name in PICTURES:
        if picture := charts.picture(name, cells):
            written.append(final.with_name(f"{final.stem}-{name}.svg"))
            write_text(written[-1], picture)
    return [path.relative_to(plan.root) for path in written]


def without_verdict(row: Row) -> Row:
    """A row as it was measured: the verdict is made of it anew each time it is read."""
    if "arms" not in row:
        return row
    arms = {name: {key: value for key, value in arm.items() if key != "invalid"} for name, arm in row["arms"].items()}
    return {**row, "arms": arms}


def committed_path(root: Path, target: str, machine: str) -> Path:
    return root / "smoke_tests" / "evidence" / "bench" / f"{target}--{machine}.jsonl"


def committed(root: Path) -> list[Path]:
    """The kept rows, one file per target and hardware."""
    return sorted((root / "smoke_tests" / "evidence" / "bench").glob("*.jsonl"))


def only_committed(root: Path) -> Path:
    """The one file of committed rows; refused where there are none or several."""
    found = committed(root)
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise Refusal(f"There is no single file of committed rows ({names}): name one with --rows.")
    return found[0]


def recommend(root: Path, config: str, rows: Path, tokens: int, package: str, launch: str, head: bool) -> Row:
    """What `recommend` says of a config.json, or of a model that smoke_tests/training/models.py names."""
    module = room(root, "recommend")
    _, cells = read(root, rows)
    models = shapes(root)
    try:
        if config in models:
            layers = module.layers_of_shape(*models[config])
        else:
            layers = module.layers_of(json.loads(Path(config).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise Refusal(
            f"{config} cannot be used ({error}): give a Llama-like model's config.json, or one of {', '.join(models)}."
        ) from None
    answer: Row = module.recommend(cells, layers, tokens, package, launch, head)
    return {"model": Path(config).name, "rows": rows.name, **answer}


def shapes(root: Path) -> dict[str, list[int]]:
    """The sizes of each model of smoke_tests/training/models.py, which this environment cannot import."""
    tree = ast.parse((root / "smoke_tests" / "training" / "models.py").read_text(encoding="utf-8"))
    (models,) = [
        part.value for part in tree.body if isinstance(part, ast.AnnAssign) and "MODELS" in ast.dump(part.target)
    ]
    assert isinstance(models, ast.Dict)
    found = {}
    for name, model in zip(models.keys, models.values, strict=True):
        assert isinstance(name, ast.Constant)
        assert isinstance(model, ast.Call)
        shape = model.args[0]
        assert isinstance(shape, ast.Call)
        if shape.args:
            found[str(name.value)] = [ast.literal_eval(size) for size in shape.args]
    return found


def table(cells: Iterable[Row]) -> str:
    """All numbers as CSV, one line per arm."""
    lines = []
    for row in cells:
        for name, arm in row["arms"].items():
            plain = {key: value for key, value in arm.items() if not isinstance(value, list)}
            invalid = "; ".join(arm["invalid"])
            lines.append({"key": row["key"], "arm": name, **plain, "invalid": invalid, **row.get("facts", {})})
    fields = list(dict.fromkeys(field for line in lines for field in line))
    text = io.StringIO()
    writer = csv.DictWriter(text, fields, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def report(root: Path, path: Path) -> Path:
    """Write report.html, rows.csv and rows.json beside a file of rows."""
    from recipes import charts

    runs, cells = read(root, path)
    page = path.with_name("report.html")
    write_text(page, charts.page(root, runs, cells))
    write_text(path.with_name("rows.csv"), table(cells))
    write_text(path.with_name("rows.json"), json.dumps({"runs": runs, "cells": cells}, indent=1))
    return page


def text(root: Path) -> str:
    """README's block: the pictures and the headline numbers of each committed file of rows."""
    parts = []
    for path in committed(root):
        runs, cells = read(root, path)
        place = path.relative_to(root)
        parts.append(f"`{runs[0]['target']}` on {runs[0]['machine']['name']} ([rows]({place})):")
        parts += headlines(cells)
        for name in PICTURES:
            picture = place.with_name(f"{place.stem}-{name}.svg")
            if (root / picture).exists():
                parts.append(f"![{name}]({picture})")
    return "\n\n".join(parts) or 'Nothing measured on a GPU is committed yet: `nox -s "bench(TARGET)"` measures.'


def headlines(cells: Iterable[Row]) -> list[str]:
    """The largest valid gain of each section, one line each."""
    best: dict[str, tuple[float, str]] = {}
    for row in cells:
        for name, arm in valid(row).items():
            if "ratio" in arm and arm["ratio"] > best.get(section(row), (0.0, ""))[0]:
                told = f"{arm['ratio']:.2f} ({arm['low']:.2f} to {arm['high']:.2f}) times {arm['base']}"
                best[section(row)] = (arm["ratio"], f"{section(row)}, most: {name} {told}, `{row['key']}`")
    return [f"- {line}" for _, line in best.values()]


def section(row: Mapping[str, Any]) -> str:
    return str(row["key"]).partition("/")[0]


def valid(row: Mapping[str, Any]) -> dict[str, Row]:
    """The arms of a row that were measured and break no limit."""
    return {name: arm for name, arm in row["arms"].items() if "ms" in arm and not arm["invalid"]}
