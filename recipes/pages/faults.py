"""The block of docs/status/mutants.md: which planted faults were caught, and by which claims."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping
from pathlib import Path

from recipes.catalogue.plan import Plan
from recipes.pages.markdown import table
from recipes.prove.mutants import COUNTED, Keys, Row, changed, committed, has_other_packages


def text(root: Path, plans: Mapping[str, Plan]) -> str:
    """The text about every run; `plans` are those of all targets, by name."""
    keys = Keys(root)
    sections = [_sections(keys, outcomes, plans.get(outcomes["target"])) for outcomes in committed(root)]
    return "\n\n".join("\n\n".join(parts) for parts in sections) or "None yet."


def _sections(keys: Keys, outcomes: Row, plan: Plan | None) -> Iterator[str]:
    rows, clean = outcomes["mutants"], outcomes["clean"]
    counts = collections.Counter(row["outcome"] for row in rows)
    caught = collections.Counter(row["origin"] for row in rows if row["outcome"] == "caught")
    yield f"### `{outcomes['target']}` on {outcomes['hardware']['name']} ({outcomes['hardware']['cpu']})"
    planted_at = outcomes.get("commit") or "no commit"
    stale = collections.Counter(row.get("commit") or planted_at for row in changed(keys, outcomes, plan))
    decided = "a pinned input of the target" if has_other_packages(outcomes, plan) else "code that decided the outcome"
    for commit, number in sorted(stale.items()):
        since = f"{commit[:7]} ([diff](../../compare/{commit}...main))"
        yield f"For {number} of these {len(rows)} mutants, {decided} has changed since {since}."
    taken = collections.Counter(row["commit"] for row in rows if row.get("commit"))
    for commit, number in sorted(taken.items()):
        machine = outcomes["earlier"][commit]["cpu"]
        yield f"{number} of these {len(rows)} mutants were planted at {commit[:7]} ({machine})."
    yield (
        f"{sum(counts[word] for word in COUNTED)} mutants count: {counts['caught']} caught ({caught['rule']} of them "
        f"made by the rule, {caught['compiled']} compiled into upstream's code), {counts['survived']} survived, "
        f"{counts['crashed']} ended in a crash and not in an assertion. "
        f"{counts['too loud']} more are too loud to count, and {counts['left out']} change nothing that runs here."
    )
    if missing := keys.not_planted(outcomes):
        yield f"Faults of upstream's compiled code that were not planted: {'; '.join(missing)}."
    if outcomes["failing"]:
        yield f"These claims fail without any mutant and so catch none: {', '.join(outcomes['failing'])}."
    earlier = f" at {clean['commit'][:7]}" if clean.get("commit") else ""
    yield (
        f"On correct code{earlier}, {clean['seeds']} seeds, one after another in {clean['processes']} "
        f"{'process' if clean['processes'] == 1 else 'processes'}: claims ran {clean['claims']} times, with "
        f"{len(clean['alarms'])} false alarms."
    )
    yield table("survivor|implementation|why", _survivors(rows))
    yield table("planted|in|kind|caught by", _chosen(rows))
    yield table("changed by the rule|in|outcome", _ruled(rows))


def _survivors(rows: list[Row]) -> Iterator[list[str]]:
    for row in rows:
        if row["outcome"] == "survived":
            yield [_quoted(row), _place(row), row["why"] or "**not known**"]


def _chosen(rows: list[Row]) -> Iterator[list[str]]:
    """One row per fault and operator, with the implementations in which it was caught."""
    caught: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        if row["origin"] != "rule" and row["outcome"] == "caught":
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
    return f"`{row['name']}`" if row["origin"] == "rule" else row["name"]


def _place(row: Row) -> str:
    return f"{row['operator']} `{row['column']}`".strip()
