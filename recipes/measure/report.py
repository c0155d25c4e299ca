"""Rows of numbers for people: the page report.html, and the rows and pictures to be committed."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import jinja2

from recipes.catalogue.plan import Plan
from recipes.errors import Refusal
from recipes.files import write_text
from recipes.measure.bench import folder_of
from recipes.measure.charts import picture
from recipes.measure.goals import answered
from recipes.measure.results import (
    COUNTS,
    FEWEST,
    PICTURES,
    Row,
    committed_path,
    mfu,
    of,
    read,
    room,
    share,
    valid,
    without_run,
    without_verdict,
)


def promote(plan: Plan, path: Path) -> list[Path]:
    """Keep the last row of each cell in smoke_tests/evidence/bench/, with the pictures of docs/status/numbers.md.

    Committed cells stay unless they were measured again or a release has changed; packages may have been added.
    """
    runs, cells = read_of(plan, path)
    names = sorted({run["machine"]["name"] for run in runs})
    if len(names) > 1:
        raise Refusal(f"{path} holds rows of {' and '.join(names)}: bring those of one machine.")
    cells = [row for row in cells if not row["quick"]]
    if not cells:
        raise Refusal(f"{path} holds rows of --quick only: run without it.")
    final = committed_path(plan.root, plan.target.name, names[0])
    releases = cells[-1]["run"]["releases"]
    before = read(final)[1] if final.exists() else []
    merged = {row["key"]: row for row in [*before, *cells] if row["run"]["releases"].items() <= releases.items()}
    cells = list(merged.values())
    heads = {row["run"]["shard"]: row["run"] for row in cells}
    written = [*heads.values(), *cells]
    write_text(final, "".join(json.dumps(without_verdict(row)) + "\n" for row in written))
    written = [final]
    for name in PICTURES:
        place = final.with_name(f"{final.stem}-{name}.svg")
        if drawn := picture(name, cells):
            write_text(place, drawn)
            written.append(place)
        else:
            place.unlink(missing_ok=True)
    return [path.relative_to(plan.root) for path in written]


def read_of(plan: Plan, path: Path) -> tuple[list[Row], list[Row]]:
    """The result of `read`; rows of another target are refused."""
    runs, cells = read(path)
    if others := sorted({run["target"] for run in runs} - {plan.target.name}):
        raise Refusal(f"{path} holds rows of {others[0]}: bring those of {plan.target.name}.")
    return runs, cells


def csv_of(cells: Iterable[Row]) -> str:
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


def report(plan: Plan, path: Path) -> Path:
    """Write report.html, rows.csv and rows.json of a file of rows to build/TARGET/bench/, wherever that file is."""
    runs, cells = read_of(plan, path)
    final = folder_of(plan) / "report.html"
    known = {row["key"] for row in cells}
    failed = {row["key"]: row["error"] for row in room("rows").read(path) if "error" in row and row["key"] not in known}
    write_text(final, page(plan.root, runs, cells, failed))
    write_text(final.with_name("rows.csv"), csv_of(cells))
    content = {"runs": runs, "cells": [without_run(row) for row in cells]}
    write_text(final.with_name("rows.json"), json.dumps(content, indent=1))
    return final


# --- the page ---

SECTIONS = {
    "scaling": ("Several GPUs", "scaling"),
    "linear": ("One Linear layer", "crossover"),
    "block": ("One Transformer block", "block"),
    "ablation": ("The 1.26B model, operator by operator", "ablation"),
    "models": ("Whole models", "models"),
    "operators": ("Operators", "roof"),
}


def page(root: Path, runs: list[Row], cells: list[Row], failed: dict[str, str]) -> str:
    """The whole page: pictures, tables whose numbers link to their rows, the method, and every row.

    failed: why a cell has no row, by its key.
    """
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    template = environment.from_string(
        (root / "recipes" / "measure" / "report.html.template").read_text(encoding="utf-8")
    )
    order = list(SECTIONS)
    cells.sort(key=lambda row: order.index(row["key"].partition("/")[0]))
    return template.render(
        runs=runs,
        goals=answered(cells),
        sections=[
            _section(name, title, shown, cells) for name, (title, shown) in SECTIONS.items() if of(cells, name + "/")
        ],
        rows=[(row["key"], json.dumps(without_run(row))) for row in cells],
        quick=sum(row["quick"] for row in cells),
        failed=failed,
        gaps=room("rows").GAPS,
        numbers={run["shard"]: json.dumps(run, indent=1) for run in runs},
        invalid=[(row["key"], name, arm) for row in cells for name, arm in row["arms"].items() if arm["invalid"]],
    )


def _section(name: str, title: str, shown: str, cells: list[Row]) -> Row:
    chosen = of(cells, name + "/")
    return {"name": name, "title": title, "picture": picture(shown, chosen), "lines": list(lines(chosen))}


def lines(cells: Iterable[Row]) -> Iterator[Row]:
    """A table's lines: one per arm, with what a reader compares."""
    for row in cells:
        fastest = min((arm["ms"] for arm in valid(row).values()), default=0.0)
        for name, arm in row["arms"].items():
            line = {"key": row["key"], "arm": name, "note": "", "best": False}
            if "error" in arm:
                yield {**line, "ms": "", "ratio": "", "rate": "", "memory": "", "note": "failed: " + arm["error"]}
                continue
            reached = share(arm, row)
            rate = mfu(arm, row, *COUNTS) if "nanogpt" in row["facts"] else "" if reached is None else f"{reached:.0%}"
            ratio = f"{arm['ratio']:.2f}" if "ratio" in arm else ""
            if ratio and len(arm["samples_ms"]) >= FEWEST:
                ratio += f" ({arm['low']:.2f} to {arm['high']:.2f})"
            ratio += f" of {arm['base']}" if ratio else ""
            note = "; ".join(arm["invalid"]) and "invalid: " + "; ".join(arm["invalid"])
            note += " launch-bound" if arm.get("launch_bound") else ""
            memory = f"{(arm['state_mib'] + arm['peak_mib']) / 1024:.2f}" if "peak_mib" in arm else ""
            best = not arm["invalid"] and arm["ms"] == fastest and len(row["arms"]) > 1
            times = f"{arm['ms']:.4g}" + (f" (host {arm['host_ms']:.3g})" if "host_ms" in arm else "")
            yield {**line, "ms": times, "ratio": ratio, "rate": rate, "memory": memory, "note": note, "best": best}
