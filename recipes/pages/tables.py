"""The tables of README and docs/status, from data, patches, claims and evidence.

A block holds links from the repository's root; markdown.filled makes them relative to the page that it is put into.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from recipes.catalogue.bases import bases
from recipes.catalogue.load import Catalogue
from recipes.catalogue.plan import Plan
from recipes.catalogue.schema import Image, Pin
from recipes.errors import Refusal
from recipes.measure import documents, results, runs
from recipes.measure.goals import answered
from recipes.measure.results import PICTURES, committed, read
from recipes.pages import markdown
from recipes.prove import evidence, proofs, records
from recipes.prove.claims import Room
from recipes.prove.proofs import Inputs


@dataclass(frozen=True)
class Facts:
    """What the tables are made of.

    All plans and claims, the promoted runs with their plans, the documents' statements, and what decides the proofs of
    patches.
    """

    catalogue: Catalogue
    plans: list[Plan]
    room: Room
    runs: list[tuple[Plan, dict[str, Any]]]
    statements: list[documents.Answer]
    proofs: Inputs

    @classmethod
    def of(cls, catalogue: Catalogue) -> Facts:
        now = proofs.inputs(catalogue)
        runs = [(plan, run) for plan in now.plans for run in evidence.promoted(catalogue.root, plan.target.name)]
        return cls(catalogue, now.plans, Room(catalogue.root), runs, documents.answers(now), now)

    @property
    def root(self) -> Path:
        return self.catalogue.root

    @cached_property
    def plan_of(self) -> dict[str, Plan]:
        """Every plan, by the name of its target."""
        return {plan.target.name: plan for plan in self.plans}

    @cached_property
    def written(self) -> list[records.Record]:
        """The committed records of programs."""
        return records.every(self.root, self.plan_of)

    def record_of(self, file: str, shard: str = "") -> records.Record:
        """The record of a file of smoke_tests/evidence/, or of one run in a file of bench's rows."""
        return self._record_by_place[file, shard]

    @cached_property
    def _record_by_place(self) -> dict[tuple[str, str], records.Record]:
        return {(record.file, record.shard): record for record in self.written}

    def states(self, plan: Plan, run: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, int]:
        """How many of these rows of a run are in each state, for the architectures that the run was built for."""
        return evidence.counted(self._state_by_row[plan.target.name, run["log_sha256"], row["id"]] for row in rows)

    @cached_property
    def _state_by_row(self) -> dict[tuple[str, str, str], str]:
        """Target, log and claim -> the state of that row: most rows are counted in several tables."""
        return {
            (plan.target.name, run["log_sha256"], row["id"]): word
            for plan, run in self.runs
            for row, word in evidence.states(evidence.built_for(plan, run), self.room, run, run["claims"])
        }


def trainings(facts: Facts) -> str:
    """How far the loss in other precisions ends from bfloat16, as smoke_tests/training/parity.py reported it."""
    sections = []
    for target, machine, model, place, report in documents.trainings(facts.root):
        arms = {name: arm for name, arm in report["arms"].items() if "differences" in arm}
        rows = [
            [f"`{name}`", f"`{arm['beside']}`", documents.by_seed(arm), documents.verdict(arm, report["margin"])]
            for name, arm in arms.items()
        ]
        table = markdown.table("run|compared with|loss above it, nats per token, by seed|over all seeds (95 %)", rows)
        state = _state_of_record(facts.record_of(f"training/{place.name}.json"))
        sections += [
            f"### {model}: `{target}` on {machine}",
            f"[Curves of every run]({place}.jsonl); {state}.",
            *([table] if rows else []),
            *_on_held_out(report),
            f"![Loss of {model}]({place}.svg)",
        ]
    return "\n\n".join(sections) or "No training on a GPU is committed yet."


def _on_held_out(report: Mapping[str, Any]) -> list[str]:
    """The table of the losses on held-out text, if the runs of a report have any."""
    rows = []
    for name, arm in report["arms"].items():
        if end := arm.get("validation"):
            row = [f"`{name}`", f"{end['end']:.4f}", "", "", "", ""]
            if "goal" in end:
                sides = end["arm"], end["reference"]
                above = ", ".join(f"{100 * share:+.2f} %" for share in end["above"])
                tokens = " and ".join(f"{side['tokens'] / 1e6:,.1f}" for side in sides)
                row[2:] = above, f"{end['goal']:.4f}", tokens, " and ".join(f"{side['seconds']:,.0f}" for side in sides)
            rows.append(row)
    reached = "loss that both reached|million tokens to it, of the run and its reference|seconds, likewise"
    return [markdown.table(f"run|last held-out loss|above its reference, by seed|{reached}", rows)] if rows else []


PARTS = ("transformer-engine-", "msamp-")  # distributions that are parts of another package


def images(facts: Facts) -> str:
    """README's table: one row per target; for which GPUs it is built, how it is proved, and the state of its claims."""
    rows = []
    for plan in facts.plans:
        target, torch = plan.target, plan.target.packages.get("torch", "none")
        others = dict.fromkeys(pin.name for pin in plan.pins if pin.name != "torch")
        link = f"[`{target.name}`](docs/status/targets.md#{markdown.anchor(target.name)})"
        packages = ", ".join(name for name in others if not name.startswith(PARTS))
        gpus = "none" if target.cuda == "none" else ", ".join(target.proves_on)
        rows.append([link, target.cuda, torch, packages, gpus, _proved_as(facts, plan), _state_of(facts, plan)])
    return markdown.table("target|CUDA|torch|other packages|to be proved on|proved as|claims, and where they ran", rows)


def _proved_as(facts: Facts, plan: Plan) -> str:
    """The last proved step: on a bare machine, in an image (its digest), or else built or planned."""
    ways = []
    for run, counts in _counts(facts, plan):
        if counts.get("proved"):
            ways.append(_image_of(plan, run) if "image" in run else "bare")
    built = evidence.built(facts.root, plan.target.name) or any(other is plan for other, _ in facts.runs)
    return ", ".join(dict.fromkeys(ways)) or ("built" if built else "planned")


def _image_of(plan: Plan, run: Mapping[str, Any]) -> str:
    """The image that claims ran in, by the start of its digest, and whether it is on the declared base."""
    base = run.get("base", "").rpartition("@")[2]
    on = " on a substitute base" if base and base != plan.target.base.runtime.digest else ""
    return f"image `{run['image'].rpartition('@')[2][:19]}`{on}"


def _state_of(facts: Facts, plan: Plan) -> str:
    """How many claims are in which state on each machine; for a target that never ran, how far it got."""
    if not any(other is plan for other, _ in facts.runs):
        rungs = {row[3] for row in _not_run(facts, plan)} - {"declared"}
        return "; ".join([*sorted(rungs), "never run"])
    return "; ".join(f"{_in_words(run, counts)} on {evidence.where(run)}" for run, counts in _counts(facts, plan))


def _in_words(run: Mapping[str, Any], counts: Mapping[str, int]) -> str:
    """The states of a run's claims with their numbers. A failure that no longer counts does not hide in "changed"."""
    failed = sum(row["outcome"] == "refuted" for row in run["claims"]) - counts.get("refuted", 0)
    notes = {evidence.CHANGED: f" ({failed} had failed)"} if failed else {}
    return ", ".join(f"{count} {word}{notes.get(word, '')}" for word, count in counts.items())


def _counts(facts: Facts, plan: Plan) -> list[tuple[dict[str, Any], dict[str, int]]]:
    """Each run of a target, and how many of its claims are in which state, those not run included."""
    counted = []
    for run in (run for other, run in facts.runs if other is plan):
        missing = len(evidence.missing_claims(plan, facts.room, run))
        counts = facts.states(plan, run, run["claims"]) | ({"not run": missing} if missing else {})
        counted.append((run, counts))
    return counted


def targets(facts: Facts) -> str:
    """All targets in one table."""
    rows = []
    for plan in facts.plans:
        target, base = plan.target, plan.target.base
        cuda = target.cuda if target.cuda == "none" else f"{target.cuda}, sm {' '.join(target.sm)}"
        images = dict.fromkeys(map(_image, (base.wheels, base.runtime)))
        rows.append([
            f"[`{target.name}`](#{markdown.anchor(target.name)})", ", ".join(images),
            target.python, cuda, ", ".join(target.proves_on), _proved_on(facts, plan), target.reason,
        ])  # fmt: skip
    return markdown.table(
        "target|wheels compiled on, image runs on|Python|CUDA|to be proved on|proved on|purpose", rows
    )


def _image(image: Image) -> str:
    return image.image + (" (digest unresolved)" if image.digest == "unresolved" else "")


def _proved_on(facts: Facts, plan: Plan) -> str:
    """The hardware whose committed evidence proves claims of this checkout, and how many others it does not prove."""
    places = []
    for run, counts in _counts(facts, plan):
        if counts.pop("proved", 0):
            places.append(evidence.where(run) + (f" (except {_in_words(run, counts)})" if counts else ""))
    return "; ".join(places)


def packages(facts: Facts) -> str:
    """A section per target: its packages with their patches, its limits, its Dockerfile and its outcomes."""
    sections, supported_until = [], bases(facts.root).supported_until
    for plan in facts.plans:
        target, rows = plan.target, []
        for pin in plan.pins:
            rows.append([pin.name, pin.release.version, pin.release.kind, _patches(plan, pin)])
        sections += [f"## `{target.name}`", markdown.table("package|version|comes as|patches", rows)]
        sections += [f"Limited here: {name}, {limit}." for name, limit in target.options.items()]
        driver = f"needs NVIDIA driver {target.driver} or newer" if target.driver else ""
        published = f"not published: {target.unpublished}" if target.unpublished else ""
        until = supported_until(target)
        support = f"its base gets security updates until {until}" if until != "none" else "its base gets no updates"
        notes = filter(None, (f"Locked for glibc {target.glibc} or newer", driver, published, support))
        sections.append(f"{'; '.join(notes)}.")
        if places := _compiled_on(facts, plan):
            sections.append(f"The evidence is of wheels that were compiled on {' and '.join(places)}.")
        links = [f"[Dockerfile](docker/{target.name}.Dockerfile)"] + [
            f"[outcomes on {evidence.where(run)}](smoke_tests/evidence/{run['name']}.json)"
            for other, run in facts.runs
            if other is plan
        ]
        sections.append(f"{', '.join(links)}.")
    return "\n\n".join(sections)


def _patches(plan: Plan, pin: Pin) -> str:
    """The patches of a package: the number and what it does, with a link to the reason."""
    return "; ".join(
        f"[{patch.path.name[:4]}](docs/status/patches.md#{markdown.anchor(f'{pin.name} {patch.path.name[:4]}')}) "
        f"{patch.path.stem[5:].replace('-', ' ')}"
        for patch in plan.patches[pin.name]
    )


def _compiled_on(facts: Facts, plan: Plan) -> list[str]:
    """Where the compiled packages of a target's evidence were compiled: "a bare machine, glibc 2.36"."""
    manifests = [run for other, run in facts.runs if other is plan]
    if built := evidence.built(facts.root, plan.target.name):
        manifests.append(built)
    packages = [package["built_with"] for manifest in manifests for package in manifest["packages"].values()]
    places = {built["where"] for built in packages if built.get("compiler", "none") != "none"}
    return sorted(re.sub("^bare,", "a bare machine,", place) for place in places)


HEADLINES = (  # README's numbers: a file of rows, a cell and an arm in it, and the label
    ("cu13.0-torch2.11--H200", "linear/seed/large/both", "transformer-engine.delayed graph",
     "one Linear layer of 16384 × 8192 × 8192, forward and backward: FP8 over bfloat16"),
    ("cu13.0-torch2.11--H200", "ablation/step/te-fp8", "fp8 te.delayed graph 8",
     "a training step of a 1.26B model: FP8 over bfloat16, both with fused operators"),
    ("cu13.0-torch2.11--H200", "ablation/step/te", "fused te graph 2 over naive 2",
     "the same step in bfloat16: fused operators over naive ones"),
    ("cu13.0-torch2.11--H200", "ablation/step/pretrain-bf16", "pretrain bf16 8",
     "model FLOP utilization (MFU) of `pretrain` with that model in bfloat16"),
    ("cu13.0-torch2.11-dist--H200", "scaling/fsdp/8B/4", "fp8 gathered",
     "an 8B model sharded over four GPUs: FP8 over bfloat16"),
)  # fmt: skip


def headlines(facts: Facts) -> str:
    """README's numbers: five of the goals of `bench`, on the newest stack, and when each was measured."""
    answers: dict[tuple[str, str, str], tuple[str, str]] = {}
    for stem in dict.fromkeys(stem for stem, *_ in HEADLINES):
        path = results.committed_path(facts.root, *stem.split("--"))
        cells = read(path)[1] if path.exists() else []
        when = _when(facts, path, cells)
        for goal in answered(cells) if cells else []:
            if goal["key"]:
                answer = goal["found"], when[goal["key"]]
                answers.setdefault((stem, goal["key"], goal["arm"]), answer)  # time before memory
    rows = []
    for stem, cell, arm, label in HEADLINES:
        number, measured = answers.get((stem, cell, arm), ("not measured", ""))
        if match := re.match(r"\**([\d.]+) \(([\d.]+ to [\d.]+), (\d+)\)", number):
            number = f"{match[1]} ({match[2]})"
        rows.append([label, number, measured])
    return markdown.table("measured on H200|number (interval of 95 %)|when", rows)


def _day(shard: str) -> str:
    """The day of a run of `bench`, whose name starts with the time in UTC: 20261121T230301-4784."""
    return f"{shard[:4]}-{shard[4:6]}-{shard[6:8]}"


def _when(facts: Facts, path: Path, cells: list[dict[str, Any]]) -> dict[str, str]:
    """When each cell of a file of bench's rows was measured, by its key, and what has changed since."""
    file = f"bench/{path.name}"
    return {row["key"]: _measured(_day(row["shard"]), facts.record_of(file, row["shard"])) for row in cells}


def _measured(day: str, record: records.Record) -> str:
    """When a number was measured, and at which commit or what has changed since."""
    return f"{day}{'; ' if record.commit and record.changed else ', '}{_state_of_record(record)}"


def _state_of_record(record: records.Record) -> str:
    """At which commit a program ran, or what has changed since: the program, the pinned inputs, or the record."""
    if not record.commit:
        return "at an unknown commit"
    return f"{record.changed} changed{since(record.commit)}" if record.changed else f"at {record.commit[:7]}"


def matrix(facts: Facts) -> str:
    """Target and hardware by package: how many claims are in which state, and what the package was compiled with."""
    rows, notes = [], dict[str, int]()
    for plan in facts.plans:
        runs = [run for other, run in facts.runs if other is plan]
        if not runs:
            rows += _not_run(facts, plan)
        for run in runs:
            machine = run["hardware"]
            host = f"driver {machine['driver']}" if machine["gpus"] else machine["cpu"]
            hardware = f"{evidence.machine_name(machine)} ({host}{', in an image' if 'image' in run else ''})"
            rows += [
                [f"`{plan.target.name}`", hardware, pin.label, *_cell(facts, plan, run, pin.name)] for pin in plan.pins
            ]
    for row in rows:
        if row[4]:
            row[4] = f"({notes.setdefault(row[4], len(notes) + 1)})"
    table = markdown.table("target|hardware|package|state|built with", rows)
    return "\n\n".join([table, "Built with:", *(f"({number}) {built}" for built, number in notes.items())])


LADDER = ("built", "built, inputs changed since", "patched", "patched, proofs changed since", "declared")


def logs(facts: Facts) -> str:
    """The outcomes and the raw log of each committed run of claims, with the number of runs in the log."""
    rows = []
    for plan, run in facts.runs:
        place, several = f"smoke_tests/evidence/{run['name']}", run.get("runs_in_log", 1)
        log = f"[log]({place}.log)" + (f" of {several} runs" if several > 1 else "")
        rows.append(
            [f"`{plan.target.name}`", evidence.where(run), run["started"][:10], f"[outcomes]({place}.json)", log]
        )
    return markdown.table("target|hardware|day|outcomes|raw log", rows)


def _not_run(facts: Facts, plan: Plan) -> list[list[str]]:
    """The rows of a target without any run: its packages by how far they got, and what they were built with."""
    labels: dict[tuple[str, str], list[str]] = {}
    built = evidence.built(facts.root, plan.target.name)
    is_current = built and built["stack"] == evidence.built_for(plan, built).stack
    state = "built" if is_current else "built, inputs changed since"
    for pin in plan.pins:
        cell = _patched(facts.proofs, plan, pin), ""
        if built and pin.name in built["packages"]:
            cell = state, _how(plan, pin.name, built["packages"])
        labels.setdefault(cell, []).append(pin.label)
    cells = sorted(labels, key=lambda cell: LADDER.index(cell[0]))
    return [[f"`{plan.target.name}`", "", ", ".join(labels[cell]), *cell] for cell in cells]


def _patched(now: Inputs, plan: Plan, pin: Pin) -> str:
    """Whether the proof of each patch of a package ran on exactly this release, and whether it has changed since."""
    patches = plan.patches[pin.name]
    entries = [proofs.entry(proofs.written(each), pin.release) for each in patches]
    if not entries or not all(entry and "unproven" not in entry for entry in entries):
        return "declared"
    return "patched, proofs changed since" if any(proofs.changes(each, now) for each in patches) else "patched"


def _cell(facts: Facts, plan: Plan, run: dict[str, Any], package: str) -> tuple[str, str]:
    """The state of a package in a run, and what it was built with."""
    claims = [row for row in run["claims"] if row["package"] == package]
    if not claims:
        return "declared", ""
    how = _how(plan, package, run["packages"])
    missing = sum(claim.about(plan) in (None, package) for claim in evidence.missing_claims(plan, facts.room, run))
    counts = facts.states(plan, run, claims) | ({"not run": missing} if missing else {})
    return ", ".join(_counted(word, count, run["commit"]) for word, count in counts.items()), how


def _counted(word: str, count: int, commit: str) -> str:
    """A state with its number of rows; for "changed", also since which commit."""
    return f"{count} {word}{since(commit) if word == evidence.CHANGED else ''}"


def since(commit: str) -> str:
    """ "since" a commit, and a link to what has changed."""
    return f" since {commit[:7]} ([diff](../../compare/{commit}...main))"


def _how(plan: Plan, package: str, packages: Mapping[str, Any]) -> str:
    """The compilers of a package and where they ran; nothing if it is not compiled."""
    built = packages.get(package, {}).get("built_with", {})
    if built.get("compiler", "none") == "none":
        return ""
    return f"{_otherwise(plan, package, built)}{built['compiler']}, {built['where']}"


def _otherwise(plan: Plan, package: str, built: Mapping[str, Any]) -> str:
    """What a wheel was compiled with and for, if its target declares another toolkit or more architectures."""
    target, nvcc = plan.target, re.search(r"release (\d+\.\d+)", built["compiler"])
    toolkit = f"CUDA {nvcc[1]} in place of {target.cuda}; " if nvcc and nvcc[1] != target.cuda else ""
    possible = next(pin.architectures(target) for pin in plan.pins if pin.name == package)
    return toolkit + (f"sm {' '.join(built['sm'])} only; " if built.get("sm", possible) != possible else "")


def answered_documents(facts: Facts) -> str:
    """How far each document is answered: its ids by their best answer."""
    answered, rows = ids_by_answer(facts), []
    denied = {seed for answer in facts.statements if answer.holds is False for seed in answer.statement.seeds}
    for letter, (name, last) in documents.DOCUMENTS.items():
        counted = [*answered.values(), sorted(denied)]
        counts = [str(sum(seed[0] == letter for seed in ids)) for ids in counted]
        rows.append([f"{letter}01 to {letter}{last}: {name}", *counts])
    return markdown.table("|".join(["document", *answered, "does not hold"]), rows)


def ids_by_answer(facts: Facts) -> dict[str, list[str]]:
    """Column of the page -> the ids that it counts; each id is in the first column that applies."""
    claimed = {seed for claim in facts.room.claims.values() for seed in claim.seeds}
    if unknown := sorted(claimed - set(documents.IDS)):
        raise Refusal(f"smoke_tests: a claim names the seed {unknown[0]}, which is not one of A01 to E16: correct it.")
    proved = {
        seed
        for claim in facts.room.claims.values()
        for seed in claim.seeds
        if "proved on" in states_of(facts, claim.id)
    }
    statements = [answer.statement for answer in facts.statements if answer.result]
    kinds = {
        "a claim is proved": proved,
        "measured, patched or tested": {seed for each in statements if not each.beyond for seed in each.seeds},
        "claimed, not run yet": claimed,
        "not available here": {seed for each in statements for seed in each.seeds},
        "open": set(documents.IDS),
    }
    ids: dict[str, list[str]] = {}
    for word, some in kinds.items():
        ids[word] = sorted(some.difference(*ids.values()))
    return ids


def described_speeds(facts: Facts) -> str:
    """The runs on several GPUs: what each is, how many GPUs it is meant for, and the speeds measured so far."""
    measured, rows = _speeds(facts), []
    for run in runs.load(facts.root).values():
        degrees = {"tensor": run.tensor, "pipeline": run.pipeline, "sharded": run.replicas}
        layout = ", ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1)
        shape = f"{run.shape}, {run.batch} sequences of {run.length:,}"
        if run.seeds:
            where = "; ".join(measured[run.name]) or (
                "not measured" if run.shape in runs.MEASURED else "needs more GPUs"
            )
            rows.append([f"`{run.name}`", shape, layout, f"{run.hosts} × {run.gpus}", where])
    return markdown.table("run|shape, batch|layout|hosts × GPUs|tokens per second and GPU, where measured", rows)


def _speeds(facts: Facts) -> dict[str, list[str]]:
    """The speeds of each run on several GPUs that was measured, by its name, and when."""
    speeds = collections.defaultdict[str, list[str]](list)
    for path in committed(facts.root):
        cells = read(path)[1]
        when = _when(facts, path, cells)
        for cell, name, speed in results.measured_runs(cells):
            speeds[name].append(f"{speed} ({when[cell]})")
    return speeds


def records_table(facts: Facts) -> str:
    """The files that programs of smoke_tests/ wrote, and whether a file or its program has changed since."""
    rows = []
    for record, share in records.counted(facts.written):
        commit = record.commit
        link = f"[{commit[:7]}](../../compare/{commit}...main)" if commit else "an unknown commit"
        state = f"the {record.changed} has changed since {link}" if record.changed else "current"
        state += f" ({share})" if share else ""
        rows.append([f"[{record.file}](smoke_tests/evidence/{record.file})", f"`{record.program}`", state])
    return markdown.table("record|program|state", rows)


def states_of(facts: Facts, claim: str) -> str:
    """The state of a claim in every run that contains it."""
    places: dict[str, list[str]] = {}
    for plan, run in facts.runs:
        rows = [row for row in run["claims"] if row["id"].split("[")[0] == claim]
        if rows:
            counts = facts.states(plan, run, rows)
            counted = [word if count == len(rows) else f"{count} {word}" for word, count in counts.items()]
            place = f"{plan.target.name} ({evidence.where(run)})"
            places.setdefault(" and ".join(counted), []).append(place)
    return "; ".join(f"{state} on {', '.join(names)}" for state, names in places.items()) or "not run"


def goals_reached(facts: Facts) -> str:
    """The goals and the pictures of each committed file of rows."""
    root, parts = facts.root, []
    for path in committed(root):
        runs, cells = read(path)
        place = path.relative_to(root)
        parts.append(f"## `{runs[0]['target']}` on {runs[0]['machine']['name']}\n\n[All rows]({place})")
        missing = {row["key"] for row in cells if row.get("unfinished")}  # unfinished in some of its arms
        header = "| Goal | At least | Measured (95 %, samples) | Arm | Cell | Of all alike | When |"
        lines = [header, "|---|---|---|---|---|---|---|"]
        goals, when = answered(cells), _when(facts, path, cells)
        for goal in goals:
            if goal["key"]:
                unfinished = ", unfinished" if goal["key"] in missing else ""
                by = f"{goal['found']} | {goal['arm']} | `{goal['key']}`{unfinished} | {goal['grid']}"
                lines.append(f"| {goal['goal']} | {goal['least']:g} | {by} | {when[goal['key']]} |")
        parts.append("\n".join(lines))
        parts += [f"Not measured: {goal['goal']} ({goal['arm']})." for goal in goals if not goal["key"]]
        parts += [
            f"Not reached: {goal['goal']}. Longest kernels, in ms, {goal['profile']}."
            for goal in goals
            if goal["profile"]
        ]
        for name in PICTURES:
            picture = place.with_name(f"{place.stem}-{name}.svg")
            if (root / picture).exists():
                parts.append(f"![{name}]({picture})")
    return "\n\n".join(parts) or 'Nothing measured on a GPU is committed yet: `nox -s "bench(TARGET)"` measures.'
