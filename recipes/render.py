"""The READMEs' tables, the two pages of recipes/, runs and Dockerfiles, from data, patches, claims and evidence."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes import bench, evidence, image, mutants, proof, runs, seeds
from recipes.cache import write_text
from recipes.evidence import Room
from recipes.limits import Reason
from recipes.model import Catalogue, Pin, Refusal, read_text
from recipes.plan import Grid, Plan, grid
from recipes.progress import say


@dataclass(frozen=True)
class Facts:
    """What the tables are made of: all plans, claims, promoted runs with their plans, and the documents' statements."""

    root: Path
    plans: list[Plan]
    room: Room
    runs: list[tuple[Plan, dict[str, Any]]]
    statements: list[seeds.Answer]

    @classmethod
    def of(cls, catalogue: Catalogue) -> Facts:
        plans = proof.plans(catalogue)
        runs = [(one, run) for one in plans for run in evidence.promoted(catalogue.root, one.target.name)]
        return cls(catalogue.root, plans, Room(catalogue.root), runs, seeds.answers(catalogue.root))

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
    return {**{name: make(facts) for name, make in makers.items()}, "bench": bench.text(facts.root)}


def _parity(facts: Facts) -> str:
    """How far training in other precisions ends from bfloat16: what smoke_tests/training/parity.py reported."""
    rows = []
    for target, machine, model, place, report in seeds.trainings(facts.root):
        curves = f"[{model}]({place}.jsonl), [plot]({place}.svg)"
        for arm, compared in report["arms"].items():
            if "differences" in compared:
                sides, by_seed = f"{arm} beside {compared['beside']}", seeds.by_seed(compared)
                judged = seeds.verdict(compared, report["margin"])
                rows.append([f"`{target}`, {machine}", curves, sides, by_seed, judged])
    header = "Where|Curves|Runs|Above, nats per token, seed by seed|Over all seeds (95 %)"
    return mutants.table(header, rows) if rows else "Nothing trained on a GPU is committed yet."


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
    return mutants.table("target|base|Python|CUDA|packages|to be proved on|for", rows)


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
    return mutants.table("target|hardware|package|state|built with", rows)


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
    found = [proof.entry(proof.written(each), pin.release) for each in one.patches[pin.name]]
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
    for row in proof.rows(facts.root, facts.plans):
        one = row.patch
        versions, link = str(one.header["X-Applies-To"]), f"[{one.package} {one.path.name[:4]}]({one.name})"
        rows.append([link, one.summary, versions, row.upstream, row.proved, ", ".join(row.targets)])
    return mutants.table("patch|what it does|versions|upstream|proved on|targets", rows)


def _documents(facts: Facts) -> str:
    """How far each document is answered: its ids by the best that there is for them."""
    answered, rows = _answered(facts), []
    denied = {seed for one in facts.statements if one.holds is False for seed in one.statement.seeds}
    for letter, (name, last) in seeds.DOCUMENTS.items():
        counted = [*answered.values(), sorted(denied)]
        counts = [str(sum(seed[0] == letter for seed in found)) for found in counted]
        rows.append([f"{letter}01 to {letter}{last}: {name}", *counts])
    return mutants.table("|".join(["document", *answered, "of all: a statement does not hold"]), rows)


def _answered(facts: Facts) -> dict[str, list[str]]:
    """The ids by what answers them, each once: the words of README's columns."""
    claimed = {seed for claim in facts.room.claims.values() for seed in claim.seeds}
    if unknown := sorted(claimed - set(seeds.IDS)):
        raise Refusal(f"smoke_tests: a claim names the seed {unknown[0]}, and the inventory is A01 to E16: correct it.")
    proved = {
        seed for claim in facts.room.claims.values() for seed in claim.seeds if "proved on" in _states(facts, claim.id)
    }
    found = [one.statement for one in facts.statements if one.found]
    kinds = {
        "a claim is proved": proved,
        "measured, patched or tested": {seed for one in found if not one.beyond for seed in one.seeds},
        "claimed, not run yet": claimed,
        "not to be had here": {seed for one in found for seed in one.seeds},
        "open": set(seeds.IDS),
    }
    ids: dict[str, list[str]] = {}
    for word, some in kinds.items():
        ids[word] = sorted(some.difference(*ids.values()))
    return ids


def ledger(facts: Facts) -> tuple[Path, str]:
    """recipes/seeds.md and the text it should have: claims and statements of every id, and the ids without any."""
    claims = [(seed, claim) for claim in facts.room.claims.values() for seed in claim.seeds]
    claimed = [
        [seed, claim.sentence, _states(facts, claim.id)] for seed, claim in sorted(claims, key=lambda one: one[0])
    ]
    others = [
        [", ".join(one.statement.seeds), one.statement.says, one.found or "not measured", one.where]
        for one in facts.statements
    ]
    text = _LEDGER.format(
        documents="\n".join(f"- {letter}: {name}" for letter, (name, _) in seeds.DOCUMENTS.items()),
        claims=mutants.table("id|claim|state", claimed),
        statements=mutants.table("id|the document says|found here|in", others),
        open=", ".join(_ranges(_answered(facts)["open"])),
    )
    return facts.root / "recipes" / "seeds.md", text


_LEDGER = """\
# What the documents say, and what answers it

Rendered by `nox -s render` from the claims of smoke_tests/, their evidence, and seeds.toml. The documents are:

{documents}

## Claims

{claims}

## What else they say

Beside what was found: by `bench` (how many times as fast), by a patch's proof, by trainings beside each other, or by a
test of the tool. The documents' numbers are of other GPUs and older releases. A cell is a row of
[the measurements](../smoke_tests/evidence/bench), with its interval of 95 %; a bound within that is not told apart.
Where the host sets the time, to launch kernels took longer than to run them.

{statements}

## Open

Neither claimed nor measured yet: {open}.
"""


def _runs(facts: Facts) -> str:
    """The runs on several GPUs that answer a document: what each is, for how many GPUs, and its speed on how many."""
    measured, rows = bench.measured_runs(facts.root), []
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
    return mutants.table(header, rows)


def _records(root: Path) -> str:
    """What programs of smoke_tests/ wrote, and whether they have changed since."""
    rows = []
    for one in evidence.records(root):
        link = f"[{one.commit[:7]}](../../../compare/{one.commit}...main)" if one.commit else "no commit that is known"
        state = f"the program has changed since {link}" if one.changed else "current"
        rows.append([f"[{one.file}](evidence/{one.file})", f"`{one.program}`", state])
    return mutants.table("record|program|state", rows)


def _states(facts: Facts, claim: str) -> str:
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


def _ranges(ids: list[str]) -> list[str]:
    """A01-A08, A11."""
    found: list[list[str]] = []
    for one in ids:
        if found and one == f"{found[-1][1][0]}{int(found[-1][1][1:]) + 1:02}":
            found[-1][1] = one
        else:
            found.append([one, one])
    return [first if first == last else f"{first}-{last}" for first, last in found]


_HEAD = """\
# What fits together

Rendered by `nox -s render` from targets.toml, packages/ and limits.toml; `nox -s compat` prints it. Every release of
every package against every target (column): **in** the target, *fits* (declared, and no limit is broken), *no* with
the numbers of the reasons below, or *?* where nobody declared it.

"""
_WORDS = {"allowed": "fits", "unknown": "?", "refused": "no"}


def grid_rows(matrix: Grid) -> tuple[list[list[str]], list[str]]:
    """The cells of the compatibility matrix, row by row, and the numbered reasons that refused cells cite."""
    numbers: dict[str, int] = {}
    rows = []
    for (package, version), verdicts in matrix.rows.items():
        row = [f"{package} {version}"]
        for target, verdict in verdicts.items():
            cell = "**in**" if (target, package, version) in matrix.holds else _WORDS[verdict.word]
            if verdict.word == "refused":
                cited = [numbers.setdefault(_rule(reason), len(numbers) + 1) for reason in verdict.reasons]
                cell += f" {', '.join(map(str, sorted(set(cited))))}"
            row.append(cell)
        rows.append(row)
    return rows, list(numbers)


def _rule(reason: Reason) -> str:
    """A reason without what it met in one target."""
    return f"{reason.here.partition(', and the target has ')[0]}: {reason.rule}"


def compatibility(catalogue: Catalogue) -> tuple[Path, str]:
    """recipes/compatibility.md and the text it should have."""
    matrix = grid(catalogue)
    rows, reasons = grid_rows(matrix)
    names = "|".join(f"`{name}`" for name in matrix.targets)
    listed = "\n".join(f"{number}. {reason}" for number, reason in enumerate(reasons, 1))
    table = mutants.table(f"package|{names}", rows)
    return catalogue.root / "recipes" / "compatibility.md", f"{_HEAD}{table}\n\n{listed}\n"


def readme(path: Path, blocks: Mapping[str, str]) -> tuple[Path, str]:
    """A README and the text it should have: its own words, and each block between its markers."""
    text = read_text(path)
    for name, block in blocks.items():
        marked = re.search(rf"<!-- {name}: [^\n]*-->\n(.*?)<!-- /{name} -->", text, re.DOTALL)
        if not marked:
            raise Refusal(f"{path} lacks the markers <!-- {name}: ... --> and <!-- /{name} -->: put them back.")
        text = f"{text[: marked.start(1)]}{block}\n{text[marked.end(1) :]}"
    return path, text


def told(root: Path) -> tuple[Path, str]:
    """The runs as the claims are told them, and the text that file should have."""
    return root / "smoke_tests" / "training" / "engine_arguments.py", runs.module(root)


def every(catalogue: Catalogue) -> list[tuple[Path, str]]:
    """Every rendered file and the text it should have."""
    root, facts = catalogue.root, Facts.of(catalogue)
    dockerfiles = [(root / "docker" / f"{one.target.name}.Dockerfile", image.dockerfile(one)) for one in facts.plans]
    readmes = [
        readme(root / "README.md", blocks(facts)),
        readme(root / "smoke_tests" / "README.md", {"mutants": mutants.text(root), "records": _records(root)}),
    ]
    return [*readmes, compatibility(catalogue), ledger(facts), told(root), *dockerfiles]


def write(catalogue: Catalogue) -> int:
    """Write every rendered file that is not current and return 0; a Dockerfile that is of no target is removed."""
    _write(
        [told(catalogue.root)]
    )  # before the others are made: claims reach it, and they say which of those have changed
    texts = dict(every(catalogue))
    for path in catalogue.root.glob("docker/*.Dockerfile"):
        if path not in texts:
            path.unlink()
            say(f"removed {path.name}")
    _write(texts.items())
    return 0


def _write(texts: Iterable[tuple[Path, str]]) -> None:
    for path, text in texts:
        if not _is_current(path, text):
            write_text(path, text)
            say(f"rendered {path.name}")


def _is_current(path: Path, text: str) -> bool:
    return path.exists() and path.read_text(encoding="utf-8") == text


def check(catalogue: Catalogue) -> int:
    """0 if every rendered file is current; else refused with the command that makes it so."""
    texts = dict(every(catalogue))
    if stray := next((path for path in catalogue.root.glob("docker/*.Dockerfile") if path not in texts), None):
        raise Refusal(f"{stray.name} is of no target: run `nox -s render` and commit it.")
    for path, text in texts.items():
        if not _is_current(path, text):
            raise Refusal(f"{path.name} is not what the data and the evidence say: run `nox -s render` and commit it.")
    return 0
