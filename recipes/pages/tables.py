"""README's tables, from data, patches, claims and evidence."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.catalogue.load import Catalogue
from recipes.catalogue.plan import Plan
from recipes.catalogue.schema import Pin
from recipes.errors import Refusal
from recipes.measure import documents, results, runs
from recipes.measure.goals import answered
from recipes.measure.results import PICTURES, committed, read
from recipes.pages import markdown
from recipes.prove import evidence, proofs, records
from recipes.prove.claims import Room


@dataclass(frozen=True)
class Facts:
    """What the tables are made of: all plans, claims, promoted runs with their plans, and the documents' statements."""

    root: Path
    plans: list[Plan]
    room: Room
    runs: list[tuple[Plan, dict[str, Any]]]
    statements: list[documents.Answer]

    @classmethod
    def of(cls, catalogue: Catalogue) -> Facts:
        plans = proofs.plans(catalogue)
        runs = [(one, run) for one in plans for run in evidence.promoted(catalogue.root, one.target.name)]
        return cls(catalogue.root, plans, Room(catalogue.root), runs, documents.answers(catalogue.root))

    def states(self, one: Plan, run: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, int]:
        """How many of some rows of a run are in which state, as a run of what was built for it."""
        return evidence.states(evidence.built_for(one, run), self.room, run, rows)


def blocks(facts: Facts) -> dict[str, str]:
    """Every rendered block of README.md, by the name in its markers."""
    makers = {
        "targets": _targets,
        "matrix": _matrix,
        "patches": _patches,
        "documents": _documents,
        "parity": _parity,
        "runs": _runs,
    }
    return {**{name: make(facts) for name, make in makers.items()}, "bench": numbers(facts.root)}


def _parity(facts: Facts) -> str:
    """How far training in other precisions ends from bfloat16: what smoke_tests/training/parity.py reported."""
    rows = []
    for target, machine, model, place, report in documents.trainings(facts.root):
        curves = f"[{model}]({place}.jsonl), [plot]({place}.svg)"
        for arm, compared in report["arms"].items():
            if "differences" in compared:
                sides, by_seed = f"{arm} beside {compared['beside']}", documents.by_seed(compared)
                judged = documents.verdict(compared, report["margin"])
                rows.append([f"`{target}`, {machine}", curves, sides, by_seed, judged])
    header = "Where|Curves|Runs|Above, nats per token, seed by seed|Over all seeds (95 %)"
    return markdown.table(header, rows) if rows else "Nothing trained on a GPU is committed yet."


def _targets(facts: Facts) -> str:
    rows = []
    for one in facts.plans:
        target = one.target
        packages = ", ".join(pin.label + (" (patched)" if one.patches[pin.name] else "") for pin in one.pins)
        cuda = target.cuda if target.cuda == "none" else f"{target.cuda}, sm {' '.join(target.sm)}"
        hardware, image = ", ".join(target.proves_on), target.base.wheels
        base = image.image + (" (digest unresolved)" if image.digest == "unresolved" else "")
        packages += "".join(f"; {name}: {option}" for name, option in target.options.items())
        rows.append([f"`{target.name}`", base, target.python, cuda, packages, hardware, target.reason])
    return markdown.table("target|base|Python|CUDA|packages|to be proved on|for", rows)


def _matrix(facts: Facts) -> str:
    """Target and hardware by package: how many claims are proved, or the word that stands in the way."""
    rows = []
    for one in facts.plans:
        runs = [run for other, run in facts.runs if other is one]
        if not runs:
            rows += _not_run(facts.root, one)
        for run in runs:
            machine = run["hardware"]
            host = f"driver {machine['driver']}" if machine["gpus"] else machine["cpu"]
            hardware = f"{evidence.machine_name(machine)} ({host})"
            rows += [
                [f"`{one.target.name}`", hardware, pin.label, *_cell(facts, one, run, pin.name)] for pin in one.pins
            ]
    return markdown.table("target|hardware|package|state|built with", rows)


def _not_run(root: Path, one: Plan) -> list[list[str]]:
    """Of a target without any run: its packages by how far they are, and what they were built with."""
    found: dict[tuple[str, str], list[str]] = {}
    built = evidence.built(root, one.target.name)
    state = (
        "built" if built and built["stack"] == evidence.built_for(one, built).stack else "built, inputs changed since"
    )
    for pin in one.pins:
        cell = "patched" if _proofs_ran(one, pin) else "declared", ""
        if built and pin.name in built["packages"]:
            cell = state, _how(one, built["packages"][pin.name]["built_with"])
        found.setdefault(cell, []).append(pin.label)
    cells = sorted(
        found, key=lambda cell: ("built", "built, inputs changed since", "patched", "declared").index(cell[0])
    )  # down the ladder
    return [[f"`{one.target.name}`", "", ", ".join(found[cell]), *cell] for cell in cells]


def _proofs_ran(one: Plan, pin: Pin) -> bool:
    """Whether a package is patched and the proof of each of its patches ran on its very release."""
    found = [proofs.entry(proofs.written(each), pin.release) for each in one.patches[pin.name]]
    return bool(found) and all(entry and "unproven" not in entry for entry in found)


def _cell(facts: Facts, one: Plan, run: dict[str, Any], package: str) -> tuple[str, str]:
    """State and origin of a package in a run."""
    claims = [row for row in run["claims"] if row["package"] == package]
    if not claims:
        return "declared", ""
    how = _how(one, run["packages"].get(package, {}).get("built_with", {}))
    missing = sum(claim.about(one) in (None, package) for claim in evidence.missing_claims(one, facts.room, run))
    counts = facts.states(one, run, claims) | ({"not run": missing} if missing else {})
    return ", ".join(_counted(word, count, run["commit"]) for word, count in counts.items()), how


def _counted(word: str, count: int, commit: str) -> str:
    """A state and how many rows are in it; of what changed, since which commit."""
    since = f" since {commit[:7]} ([diff](../../compare/{commit}...main))" if word == evidence.CHANGED else ""
    return f"{count} {word}{since}"


def _how(one: Plan, built: Mapping[str, Any]) -> str:
    """The compilers of a package and where they ran; nothing of one that is not compiled."""
    compiled = built.get("compiler", "none") != "none"
    return f"{_otherwise(one, built)}{built['compiler']}, {built['where']}" if compiled else ""


def _otherwise(one: Plan, built: Mapping[str, Any]) -> str:
    """What a wheel was compiled with and for, where its target declares another toolkit or more architectures."""
    target, nvcc = one.target, re.search(r"release (\d+\.\d+)", built["compiler"])
    toolkit = f"CUDA {nvcc[1]} in place of {target.cuda}; " if nvcc and nvcc[1] != target.cuda else ""
    return toolkit + (f"sm {' '.join(built['sm'])} only; " if built.get("sm", target.sm) != target.sm else "")


def _patches(facts: Facts) -> str:
    rows = []
    for row in proofs.rows(facts.root, facts.plans):
        one = row.patch
        versions, link = str(one.header["X-Applies-To"]), f"[{one.package} {one.path.name[:4]}]({one.name})"
        rows.append([link, one.summary, versions, row.upstream, row.proved, ", ".join(row.targets)])
    return markdown.table("patch|what it does|versions|upstream|proved on|targets", rows)


def _documents(facts: Facts) -> str:
    """How far each document is answered: its ids by the best that there is for them."""
    answered, rows = ids_by_answer(facts), []
    denied = {seed for one in facts.statements if one.holds is False for seed in one.statement.seeds}
    for letter, (name, last) in documents.DOCUMENTS.items():
        counted = [*answered.values(), sorted(denied)]
        counts = [str(sum(seed[0] == letter for seed in found)) for found in counted]
        rows.append([f"{letter}01 to {letter}{last}: {name}", *counts])
    return markdown.table("|".join(["document", *answered, "of all: a statement does not hold"]), rows)


def ids_by_answer(facts: Facts) -> dict[str, list[str]]:
    """The ids by what answers them, each once: the words of README's columns."""
    claimed = {seed for claim in facts.room.claims.values() for seed in claim.seeds}
    if unknown := sorted(claimed - set(documents.IDS)):
        raise Refusal(f"smoke_tests: a claim names the seed {unknown[0]}, and the inventory is A01 to E16: correct it.")
    proved = {
        seed
        for claim in facts.room.claims.values()
        for seed in claim.seeds
        if "proved on" in states_of(facts, claim.id)
    }
    found = [one.statement for one in facts.statements if one.found]
    kinds = {
        "a claim is proved": proved,
        "measured, patched or tested": {seed for one in found if not one.beyond for seed in one.seeds},
        "claimed, not run yet": claimed,
        "not to be had here": {seed for one in found for seed in one.seeds},
        "open": set(documents.IDS),
    }
    ids: dict[str, list[str]] = {}
    for word, some in kinds.items():
        ids[word] = sorted(some.difference(*ids.values()))
    return ids


def _runs(facts: Facts) -> str:
    """The runs on several GPUs that answer a document: what each is, for how many GPUs, and its speed on how many."""
    measured, rows = results.measured_runs(facts.root), []
    for run in runs.load(facts.root).values():
        degrees = {"tensor": run.tensor, "pipeline": run.pipeline, "sharded": run.replicas}
        layout = ", ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1)
        shape = f"{run.shape}, {run.batch} sequences of {run.length:,}"
        if run.seeds:
            where = measured.get(run.name, "not measured" if run.shape in runs.MEASURED else "needs more GPUs")
            rows.append([f"`{run.name}`", ", ".join(run.seeds), shape, layout, f"{run.hosts} × {run.gpus}", where])
    header = (
        "run|answers|shape, batch|layout|hosts × GPUs described|tokens per second and GPU measured, on how many GPUs"
    )
    return markdown.table(header, rows)


def records_of(root: Path) -> str:
    """What programs of smoke_tests/ wrote, and whether they have changed since."""
    rows = []
    for one in records.every(root):
        link = f"[{one.commit[:7]}](../../../compare/{one.commit}...main)" if one.commit else "no commit that is known"
        state = f"the program has changed since {link}" if one.changed else "current"
        rows.append([f"[{one.file}](evidence/{one.file})", f"`{one.program}`", state])
    return markdown.table("record|program|state", rows)


def states_of(facts: Facts, claim: str) -> str:
    """The state of a claim in every run that has it."""
    places: dict[str, list[str]] = {}
    for one, run in facts.runs:
        rows = [row for row in run["claims"] if row["id"].split("[")[0] == claim]
        if rows:
            counts = facts.states(one, run, rows)
            counted = [word if count == len(rows) else f"{count} {word}" for word, count in counts.items()]
            place = f"{one.target.name} ({evidence.machine_name(run['hardware'])})"
            places.setdefault(" and ".join(counted), []).append(place)
    return "; ".join(f"{state} on {', '.join(found)}" for state, found in places.items()) or "not run"


def numbers(root: Path) -> str:
    """README's block: the goals and the pictures of each committed file of rows."""
    parts = []
    for path in committed(root):
        runs, cells = read(path)
        place = path.relative_to(root)
        parts.append(f"`{runs[0]['target']}` on {runs[0]['machine']['name']} ([rows]({place})):")
        missing = {row["key"] for row in cells if row.get("unfinished")}  # some arms of it
        lines = ["| Goal | At least | Found (95 %, samples) | Arm | Cell | Of all alike |", "|---|---|---|---|---|---|"]
        wanted = answered(cells)
        for goal in wanted:
            if goal["key"]:
                unfinished = ", unfinished" if goal["key"] in missing else ""
                by = f"{goal['found']} | {goal['arm']} | `{goal['key']}`{unfinished} | {goal['grid']}"
                lines.append(f"| {goal['goal']} | {goal['least']:g} | {by} |")
        parts.append("\n".join(lines))
        parts += [f"Not measured there: {goal['goal']} ({goal['arm']})." for goal in wanted if not goal["key"]]
        parts += [f"Not reached: {goal['goal']}, {goal['profile']}." for goal in wanted if goal["profile"]]
        for name in PICTURES:
            picture = place.with_name(f"{place.stem}-{name}.svg")
            if (root / picture).exists():
                parts.append(f"![{name}]({picture})")
    return "\n\n".join(parts) or 'Nothing measured on a GPU is committed yet: `nox -s "bench(TARGET)"` measures.'
