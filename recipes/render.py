"""README's tables, the pages of docs/status/, runs and Dockerfiles, from data, patches, claims and evidence.

A block holds links from the repository's root; where it is put, they are made relative to that page.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterable, Mapping
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

    catalogue: Catalogue
    plans: list[Plan]
    room: Room
    runs: list[tuple[Plan, dict[str, Any]]]
    statements: list[seeds.Answer]

    @classmethod
    def of(cls, catalogue: Catalogue) -> Facts:
        plans = proof.plans(catalogue)
        runs = [(one, run) for one in plans for run in evidence.promoted(catalogue.root, one.target.name)]
        return cls(catalogue, plans, Room(catalogue.root), runs, seeds.answers(catalogue.root))

    @property
    def root(self) -> Path:
        return self.catalogue.root

    def states(self, one: Plan, run: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, int]:
        """How many of some rows of a run are in which state, as a run of what was built for it."""
        return evidence.states(evidence.built_for(one, run), self.room, run, rows)


def blocks(facts: Facts) -> dict[str, str]:
    """Every rendered block, by the name in its markers."""
    return {name: make(facts) for names in PAGES.values() for name, make in names.items()}


def _trainings(facts: Facts) -> str:
    """How far training in other precisions ends from bfloat16: what smoke_tests/training/parity.py reported."""
    sections = []
    for target, machine, model, place, report in seeds.trainings(facts.root):
        arms = {name: arm for name, arm in report["arms"].items() if "differences" in arm}
        rows = [
            [f"`{name}`", f"`{arm['beside']}`", seeds.by_seed(arm), seeds.verdict(arm, report["margin"])]
            for name, arm in arms.items()
        ]
        table = mutants.table("run|compared with|loss above it, nats per token, by seed|over all seeds (95 %)", rows)
        sections += [
            f"### {model}: `{target}` on {machine}",
            f"[Curves of every run]({place}.jsonl)",
            table,
            f"![Loss of {model}]({place}.svg)",
        ]
    return "\n\n".join(sections) or "No training on a GPU is committed yet."


PARTS = ("transformer-engine-", "msamp-")  # distributions that are part of another one


def _images(facts: Facts) -> str:
    """README's table: one row per target, its state on each machine in a few words."""
    rows = []
    for plan in facts.plans:
        target, torch = plan.target, plan.target.packages.get("torch", "none")
        others = dict.fromkeys(pin.name for pin in plan.pins if pin.name != "torch")
        link = f"[`{target.name}`](docs/status/targets.md#{anchor(target.name)})"
        packages = ", ".join(name for name in others if not name.startswith(PARTS))
        gpus = "none" if target.cuda == "none" else ", ".join(target.proves_on)
        rows.append([link, target.cuda, torch, packages, gpus, _state_of(facts, plan)])
    return mutants.table("target|CUDA|torch|other packages|GPUs|state", rows)


def _state_of(facts: Facts, plan: Plan) -> str:
    """How many claims are in which state on each machine; of a target that never ran, how far it came."""
    runs = [run for other, run in facts.runs if other is plan]
    if not runs:
        rungs = {row[3] for row in _not_run(facts.root, plan)} - {"declared"}
        return ", ".join([*sorted(rungs), "never run"])
    states = []
    for run in runs:
        counts = facts.states(plan, run, run["claims"])
        missing = len(evidence.missing_claims(plan, facts.room, run))
        words = [f"{count} {word}" for word, count in (counts | ({"not run": missing} if missing else {})).items()]
        states.append(f"{', '.join(words)} on {evidence.machine_name(run['hardware'])}")
    return "; ".join(states)


def anchor(heading: str) -> str:
    """The anchor of a heading, as GitHub and the site make it: "cu13.0-torch2.11" is cu130-torch211."""
    return re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading.lower()))


def _targets(facts: Facts) -> str:
    """All targets in one table."""
    rows = []
    for plan in facts.plans:
        target, image = plan.target, plan.target.base.wheels
        cuda = target.cuda if target.cuda == "none" else f"{target.cuda}, sm {' '.join(target.sm)}"
        base = image.image + (" (digest unresolved)" if image.digest == "unresolved" else "")
        rows.append([f"`{target.name}`", base, target.python, cuda, ", ".join(target.proves_on), target.reason])
    return mutants.table("target|base|Python|CUDA|to be proved on|purpose", rows)


def _packages(facts: Facts) -> str:
    """A section per target: its packages with their patches, and how the target limits some of them."""
    sections = []
    for plan in facts.plans:
        target, rows = plan.target, []
        for pin in plan.pins:
            patches = [f"[{patch.path.name[:4]}]({patch.name})" for patch in plan.patches[pin.name]]
            rows.append([pin.name, pin.release.version, pin.release.kind, ", ".join(patches)])
        sections += [f"## `{target.name}`", mutants.table("package|version|comes as|patches", rows)]
        sections += [f"Limited here: {name}, {limit}." for name, limit in target.options.items()]
        driver = f"NVIDIA driver {target.driver} or newer" if target.driver else ""
        published = f"not published: {target.unpublished}" if target.unpublished else ""
        notes = filter(None, (f"glibc {target.glibc} or newer", driver, published))
        sections.append(f"Needs {'; '.join(notes)}.")
    return "\n\n".join(sections)


HEADLINES = (  # README's numbers: a file of rows, a cell of it, an arm, and what to call that
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


def _numbers(facts: Facts) -> str:
    """README's numbers: five of the goals of `bench`, on the newest stack."""
    rows = []
    for stem, cell, arm, label in HEADLINES:
        path = bench.committed_path(facts.root, *stem.split("--"))
        shown = bench.goals(bench.read(path)[1]) if path.exists() else []
        number = next((goal["found"] for goal in shown if (goal["key"], goal["arm"]) == (cell, arm)), "not measured")
        if match := re.match(r"\**([\d.]+) \(([\d.]+ to [\d.]+), (\d+)\)", number):
            number = f"{match[1]} ({match[2]})"
        rows.append([label, number])
    return mutants.table("measured on H200|number (interval of 95 %)", rows)


def _matrix(facts: Facts) -> str:
    """Target and hardware by package: how many claims are in which state, and what the package was compiled with."""
    rows, notes = [], dict[str, int]()
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
    for row in rows:
        if row[4]:
            row[4] = f"({notes.setdefault(row[4], len(notes) + 1)})"
    table = mutants.table("target|hardware|package|state|built with", rows)
    return "\n\n".join([table, "Built with:", *(f"({number}) {built}" for built, number in notes.items())])


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
        patch, targets = row.patch, ", ".join(f"`{name}`" for name in row.targets)
        link = f"[{patch.package} {patch.path.name[:4]}]({patch.name})"
        rows.append([link, patch.summary, str(patch.header["X-Applies-To"]), row.upstream, targets])
    return mutants.table("patch|what it does|versions|upstream|targets", rows)


def _proofs(facts: Facts) -> str:
    """On what each patch was proved."""
    lines = []
    for row in proof.rows(facts.root, facts.plans):
        record, patch = proof.record_of(row.patch).relative_to(facts.root).as_posix(), row.patch
        lines.append(f"- [{patch.package} {patch.path.name[:4]}]({record}): {row.proved}")
    return "\n".join(lines)


def _documents(facts: Facts) -> str:
    """How far each document is answered: its ids by the best that there is for them."""
    answered, rows = _answered(facts), []
    denied = {seed for one in facts.statements if one.holds is False for seed in one.statement.seeds}
    for letter, (name, last) in seeds.DOCUMENTS.items():
        counted = [*answered.values(), sorted(denied)]
        counts = [str(sum(seed[0] == letter for seed in found)) for found in counted]
        rows.append([f"{letter}01 to {letter}{last}: {name}", *counts])
    return mutants.table("|".join(["document", *answered, "does not hold"]), rows)


def _answered(facts: Facts) -> dict[str, list[str]]:
    """The ids by what answers them, each once: the words of the page's columns."""
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


def _claims_of_ids(facts: Facts) -> str:
    """The claims that answer the documents, by id."""
    claims = sorted(((seed, claim) for claim in facts.room.claims.values() for seed in claim.seeds), key=lambda x: x[0])
    rows = [[seed, claim.sentence, _states(facts, claim.id)] for seed, claim in claims]
    return mutants.table("id|claim|state", rows)


def _statements(facts: Facts) -> str:
    """What else the documents say, and what answers it."""
    rows = [
        [", ".join(answer.statement.seeds), answer.statement.says, answer.found or "not measured", answer.where]
        for answer in facts.statements
    ]
    return mutants.table("id|the document says|measured or tested here|where", rows)


def _described(facts: Facts) -> str:
    """The runs on several GPUs that the documents describe."""
    listed = [f"- `{run.name}`: {', '.join(run.seeds)}" for run in runs.load(facts.root).values() if run.seeds]
    return "\n".join(listed)


def _open(facts: Facts) -> str:
    return f"Neither claimed nor measured yet: {', '.join(_ranges(_answered(facts)['open']))}."


def _runs(facts: Facts) -> str:
    """The runs on several GPUs: what each is, for how many GPUs it is described, and how fast it ran on how many."""
    measured, rows = bench.measured_runs(facts.root), []
    for run in runs.load(facts.root).values():
        degrees = {"tensor": run.tensor, "pipeline": run.pipeline, "sharded": run.replicas}
        layout = ", ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1)
        shape = f"{run.shape}, {run.batch} sequences of {run.length:,}"
        if run.seeds:
            where = measured.get(run.name, "not measured" if run.shape in runs.MEASURED else "needs more GPUs")
            rows.append([f"`{run.name}`", shape, layout, f"{run.hosts} × {run.gpus}", where])
    return mutants.table("run|shape, batch|layout|hosts × GPUs|tokens per second and GPU, where measured", rows)


def _records(facts: Facts) -> str:
    """What programs of smoke_tests/ wrote, and whether they have changed since."""
    rows = []
    for record in evidence.records(facts.root):
        commit = record.commit
        link = f"[{commit[:7]}](../../compare/{commit}...main)" if commit else "an unknown commit"
        state = f"the program has changed since {link}" if record.changed else "current"
        rows.append([f"[{record.file}](smoke_tests/evidence/{record.file})", f"`{record.program}`", state])
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


def _compatibility(facts: Facts) -> str:
    """Every release of every package against every target, and the numbered reasons that refused cells cite."""
    matrix = grid(facts.catalogue)
    rows, reasons = grid_rows(matrix)
    names = "|".join(f"`{name}`" for name in matrix.targets)
    listed = "\n".join(f"{number}. {reason}" for number, reason in enumerate(reasons, 1))
    return f"{mutants.table(f'package|{names}', rows)}\n\n{listed}"


Block = Callable[[Facts], str]
# Every page with rendered blocks, and what makes each block.
PAGES: dict[str, dict[str, Block]] = {
    "README.md": {"images": _images, "numbers": _numbers},
    "docs/status/targets.md": {"targets": _targets, "packages": _packages},
    "docs/status/claims.md": {"matrix": _matrix, "records": _records},
    "docs/status/patches.md": {"patches": _patches, "proofs": _proofs},
    "docs/status/compatibility.md": {"compatibility": _compatibility},
    "docs/status/numbers.md": {"bench": lambda facts: bench.text(facts.root)},
    "docs/status/several-gpus.md": {"runs": _runs},
    "docs/status/training.md": {"parity": _trainings},
    "docs/status/mutants.md": {"mutants": lambda facts: mutants.text(facts.root)},
    "docs/status/documents.md": {
        "documents": _documents,
        "answers": _claims_of_ids,
        "statements": _statements,
        "described": _described,
        "open": _open,
    },
}


def page(root: Path, name: str, blocks: Mapping[str, str]) -> tuple[Path, str]:
    """A page and the text it should have: its own words, and each block between its markers."""
    path = root / name
    text = read_text(path)
    for marker, block in blocks.items():
        marked = re.search(rf"<!-- {marker}: [^\n]*-->\n(.*?)<!-- /{marker} -->", text, re.DOTALL)
        if not marked:
            raise Refusal(f"{path} lacks the markers <!-- {marker}: ... --> and <!-- /{marker} -->: put them back.")
        text = f"{text[: marked.start(1)]}{_placed(block, name)}\n{text[marked.end(1) :]}"
    return path, text


def _placed(block: str, name: str) -> str:
    """A block with its links, which are from the repository's root, made relative to the page of that name."""
    root = "/blob/main"  # as GitHub serves files, beside which it has /compare

    def renewed(link: re.Match[str]) -> str:
        target = posixpath.join(root, link[1])
        return f"]({posixpath.relpath(target, posixpath.join(root, posixpath.dirname(name)))}"

    return re.sub(r"\]\((?!https?://|#)([^)#\s]+)", renewed, block)


def told(root: Path) -> tuple[Path, str]:
    """The runs as the claims are told them, and the text that file should have."""
    return root / "smoke_tests" / "training" / "runs.py", runs.module(root)


def every(catalogue: Catalogue) -> list[tuple[Path, str]]:
    """Every rendered file and the text it should have."""
    root, facts = catalogue.root, Facts.of(catalogue)
    dockerfiles = [(root / "docker" / f"{one.target.name}.Dockerfile", image.dockerfile(one)) for one in facts.plans]
    texts = blocks(facts)
    pages = [page(root, name, {marker: texts[marker] for marker in markers}) for name, markers in PAGES.items()]
    return [*pages, told(root), *dockerfiles]


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
