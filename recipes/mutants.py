"""How strong the claims are: faults are planted in a target's environment, and what became of each is kept.

smoke_tests/mutants.py does the work, inside the environment. Its outcomes are committed beside the evidence and shown
in smoke_tests/README.md. They hold the hash of each file that they were made with, so that a change of one of those is
seen; nothing is planted again because of it.
"""

from __future__ import annotations

import collections
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from recipes import environment, evidence
from recipes.cache import sha256_of, write_json
from recipes.model import Refusal
from recipes.plan import Plan

Row = dict[str, Any]
COUNTED = ("caught", "survived", "crashed")


def run(plan: Plan, env: Path, seeds: int) -> int:
    """Plant every fault in the environment and keep the outcomes; 1 if correct code raised a false alarm."""
    out = environment.folder(plan.root, plan.target) / "mutants.json"
    command = [str(environment.python_of(env)), str(plan.root / "smoke_tests" / "mutants.py"), "--out", str(out)]
    command += ["--seeds", str(seeds)]
    code, _ = evidence.watched(command, plan.root, environment.clean_variables(env))
    if code > 1:
        raise Refusal(
            f"{plan.target.name}: planting ended with code {code}: read what it printed and run again, it goes on."
        )
    keep(plan, out)
    out.unlink()
    return code


def keep(plan: Plan, path: Path) -> None:
    """Commit-to-be the outcomes of a whole run, wherever it was, with the tests that this checkout has."""
    text = path.read_text(encoding="utf-8") if path.is_file() else "{}"
    outcomes = json.loads(evidence.without_paths(plan, text))
    if "clean" not in outcomes or outcomes["target"] != plan.target.name or changed(plan.root, outcomes):
        raise Refusal(
            f"{path} is no whole run of {plan.target.name} with the tests of this checkout: run smoke_tests/mutants.py "
            "there, to its end and with seeds."
        )
    name = f"{outcomes['target']}--{outcomes['hardware']['name']}.json"
    write_json(plan.root / "smoke_tests" / "evidence" / "mutants" / name, outcomes)


def committed(root: Path) -> list[Row]:
    """The kept outcomes, one per target and hardware."""
    paths = sorted((root / "smoke_tests" / "evidence" / "mutants").glob("*.json"))
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def changed(root: Path, outcomes: Row) -> list[str]:
    """The files of smoke_tests/ that the outcomes were made with and that are others now."""
    paths = {name: root / "smoke_tests" / name for name in outcomes["files"]}
    return [name for name, path in paths.items() if not path.exists() or sha256_of(path) != outcomes["files"][name]]


def text(root: Path) -> str:
    """What smoke_tests/README.md says of every run."""
    return "\n\n".join("\n\n".join(_sections(root, outcomes)) for outcomes in committed(root)) or "None yet."


def _sections(root: Path, outcomes: Row) -> Iterator[str]:
    rows, clean = outcomes["mutants"], outcomes["clean"]
    counts = collections.Counter(row["outcome"] for row in rows)
    by_rule = sum(row["outcome"] == "caught" and row["origin"] == "rule" for row in rows)
    yield f"### `{outcomes['target']}` on {outcomes['hardware']['name']} ({outcomes['hardware']['cpu']})"
    if stale := changed(root, outcomes):
        yield f"Stale: {', '.join(f'`{name}`' for name in stale)} changed since."
    yield (
        f"{sum(counts[word] for word in COUNTED)} mutants count: {counts['caught']} caught ({by_rule} of them made by "
        f"the rule), {counts['survived']} survived, {counts['crashed']} ended in a crash and not in an assertion. "
        f"{counts['too loud']} more are too loud to count, and {counts['left out']} change nothing that runs here."
    )
    if outcomes["failing"]:
        yield f"These claims fail without any mutant and so catch none: {', '.join(outcomes['failing'])}."
    yield (
        f"On correct code, {clean['seeds']} seeds in one process: {clean['claims']} times a claim ran, "
        f"{len(clean['alarms'])} false alarms."
    )
    yield _table("survivor|implementation|why", _survivors(rows))
    yield _table("planted|in|kind|caught by", _chosen(rows))
    yield _table("changed by the rule|in|outcome", _ruled(rows))


def _survivors(rows: list[Row]) -> Iterator[list[str]]:
    for row in rows:
        if row["outcome"] == "survived":
            yield [_quoted(row), _place(row), row["why"] or "**not known**"]


def _chosen(rows: list[Row]) -> Iterator[list[str]]:
    """One row per fault and operator, with the implementations in which it was caught."""
    caught: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        if row["origin"] == "chosen" and row["outcome"] == "caught":
            key = (row["name"], row["operator"], row["kind"], _test(row))
            caught.setdefault(key, []).append(f"`{row['column']}`")
    for (name, operator, kind, claim), columns in caught.items():
        yield [name, f"{operator} {' '.join(columns)}".strip(), kind, f"`{claim}`"]


def _ruled(rows: list[Row]) -> Iterator[list[str]]:
    for row in rows:
        if row["origin"] == "rule" and row["outcome"] in ("caught", "crashed"):
            yield [_quoted(row), _place(row), f"{row['outcome']}: `{_test(row)}`"]


def _test(row: Row) -> str:
    """The test that caught a mutant, without its parameters."""
    return str(row["by"]).partition("::")[2].partition("[")[0]


def _quoted(row: Row) -> str:
    return row["name"] if row["origin"] == "chosen" else f"`{row['name']}`"


def _place(row: Row) -> str:
    return f"{row['operator']} `{row['column']}`".strip()


def _table(header: str, rows: Iterable[list[str]]) -> str:
    lines = [header.split("|"), ["---"] * (header.count("|") + 1), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
