"""What proves the patches: the releases that each applies to, and the committed record of its proof's last real run.

A proof is patches/PACKAGE/test_NNNN_slug.py beside the patch; its record is NNNN-slug.json. The record holds for this
very patch, proof and list of releases, and no other: whatever changed after the run makes `faults` say so, also where
nothing can be fetched to run the proof again.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import Version
from rich.markup import escape
from rich.table import Table

from recipes.catalogue import patch
from recipes.catalogue.load import Catalogue
from recipes.catalogue.patch import Patch
from recipes.catalogue.plan import Plan, plan
from recipes.catalogue.schema import Source
from recipes.errors import Refusal
from recipes.files import write_json
from recipes.process import commit_of
from recipes.progress import console
from recipes.prove.definitions import Code

HARNESS = ("proof.py", "conftest.py")  # of patches/: what runs every proof, and is part of none
AGAIN = "run `nox -s tests -- patches --record` and commit what it writes"


@dataclass(frozen=True)
class Case:
    """One release that a patch applies to, with all patches for it up to that one, placed in that release."""

    source: Source
    patches: tuple[Patch, ...]

    @property
    def patch(self) -> Patch:
        return self.patches[-1]

    @property
    def label(self) -> str:
        return f"{self.patch.package} {self.source.version}"


@dataclass(frozen=True)
class Conditions:
    """What a proof says of itself, in constants of its module.

    `RUNS_IN` is the target in whose environment it runs, `EMULATED` says in one sentence what is faked there, and
    `UNPROVEN` says by version why it cannot run there.
    """

    runs_in: str
    emulated: str | None
    unproven: dict[str, str]


def test_of(one: Patch) -> Path:
    """0001-some-slug.patch is proved by test_0001_some_slug.py."""
    return one.path.with_name(f"test_{one.path.stem.replace('-', '_')}.py")


def record_of(one: Patch) -> Path:
    """Where the record of a patch's proof lies."""
    return one.path.with_suffix(".json")


def plans(catalogue: Catalogue) -> list[Plan]:
    """The plan of every target."""
    return [plan(catalogue, name) for name in catalogue.targets]


def cases(catalogue: Catalogue, every: Iterable[Plan], one: Patch) -> list[Case]:
    """The releases that a patch applies to: those that targets pin, then those that only its proof runs on."""
    found: dict[str, Case] = {}
    for chosen in every:
        for pin in chosen.pins:
            mine = [each for each in chosen.patches[pin.name] if each.package == one.package and each.path <= one.path]
            if mine and mine[-1].path == one.path:
                found.setdefault(pin.release.identity, Case(pin.release, tuple(mine)))
    package = catalogue.packages.get(one.package)
    for source in package.proved_on if package else []:
        if one.covers(source.version):
            mine = [each for each in patch.of_package(catalogue.root, one.package) if each.covers(source.version)]
            placed = tuple(each.at(source.version) for each in mine if each.path <= one.path)
            found.setdefault(source.identity, Case(source, placed))
    return list(found.values())


def conditions(test: Path) -> Conditions:
    """The constants of a proof's module, read and not imported."""
    found: dict[str, Any] = {}
    for statement in ast.parse(test.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            name = statement.targets[0].id
            if name in ("RUNS_IN", "EMULATED", "UNPROVEN"):
                try:
                    found[name] = ast.literal_eval(statement.value)
                except ValueError:
                    raise Refusal(f"{test}: {name} is not a plain value: write it as one.") from None
    if not isinstance(found.get("RUNS_IN"), str):
        raise Refusal(f'{test} does not say where it runs: add RUNS_IN = "cpu", or another target.')
    return Conditions(found["RUNS_IN"], found.get("EMULATED"), found.get("UNPROVEN", {}))


def code(root: Path) -> Code:
    """All definitions of patches/."""
    return Code(root / "patches")


def key(every: Code, test: Path) -> str:
    """The key of a proof: of all that its module holds, imports and can reach, but for what runs every proof."""
    file = test.relative_to(every.folder).as_posix()
    module = every.modules[file]
    roots = {definition.place for definition in module.definitions.values()}
    for name in module.imports:  # tests that several proofs share are imported and not mentioned
        roots |= every.resolve(file, name)[1]
    return every.key(place for place in every.floor(roots) if place[0] not in HARNESS)


def written(one: Patch) -> dict[str, Any] | None:
    """The record of a patch's proof, if there is one that can be read."""
    try:
        record = json.loads(record_of(one).read_text(encoding="utf-8"))
        return record if isinstance(record.get("releases"), list) else None
    except (FileNotFoundError, ValueError, AttributeError):
        return None


def write(one: Patch, releases: list[dict[str, Any]]) -> Path:
    """Write the record of a run that proved the patch on these releases."""
    ordered = sorted(releases, key=lambda each: Version(each["version"]))
    proof = key(code(one.path.parents[2]), test_of(one))
    commit = commit_of(one.path.parents[2], "patches/*.py", "patches/*.patch")
    write_json(record_of(one), {"patch": one.sha256, "proof": proof, "commit": commit, "releases": ordered})
    return record_of(one)


def ran(one: Patch) -> list[dict[str, Any]]:
    """The releases that a patch's proof ran on, as its record has them; none without a record."""
    return [each for each in (written(one) or {"releases": []})["releases"] if "unproven" not in each]


def entry(record: dict[str, Any] | None, source: Source) -> dict[str, Any] | None:
    """What a record says of a release."""
    known = record["releases"] if record else []
    return next((one for one in known if (one["version"], one["source"]) == (source.version, source.identity)), None)


def faults(catalogue: Catalogue, every: list[Plan]) -> list[str]:
    """Everything that makes a patch unproved, as one sentence each; none if all records hold."""
    patches = patch.every(catalogue.root)
    expected = {path for one in patches for path in (one.path, test_of(one), record_of(one))}
    found = [
        f"{path.relative_to(catalogue.root)} belongs to no patch: delete it, or put the patch back."
        for pattern in ("*/*.json", "*/test_*.py")
        for path in sorted((catalogue.root / "patches").glob(pattern))
        if path not in expected
    ]
    now = code(catalogue.root)
    return found + [fault for one in patches for fault in _faults(one, cases(catalogue, every, one), now)]


def _faults(one: Patch, proved_on: list[Case], now: Code) -> Iterator[str]:
    test, record = test_of(one), written(one)
    if not proved_on:
        yield f"{one.name} applies to no release of any target or of proved_on: delete it, or correct X-Applies-To."
    if not test.exists():
        yield f"{one.name} has no proof {test.name}: write one (patches/README.md)."
    elif record is None:
        yield f"{one.name} has no record {record_of(one).name} of its proof: {AGAIN}."
    else:
        yield from _outdated(one, proved_on, now, record)


def _outdated(one: Patch, proved_on: list[Case], now: Code, record: dict[str, Any]) -> Iterator[str]:
    test = test_of(one)
    if record.get("patch") != one.sha256:
        yield f"{one.name} changed after its proof ran: {AGAIN}."
    if record.get("proof") != key(now, test):
        yield f"{test.name}, the proof of {one.name}, changed after it ran: {AGAIN}."
    wanted = {(case.source.version, case.source.identity) for case in proved_on}
    known = {(each.get("version"), each.get("source")) for each in record["releases"]}
    for version, source in sorted(wanted - known):
        yield f"{one.name} was not proved on {one.package} {version} ({source[:12]}): {AGAIN}."
    for version, source in sorted(known - wanted, key=str):
        yield f"{one.name} was proved on {one.package} {version} ({str(source)[:12]}), which is no more: {AGAIN}."
    said = conditions(test)
    for each in record["releases"]:
        if "unproven" in each and each["unproven"] != said.unproven.get(each.get("version")):
            yield f"{one.name}: nothing in {test.name} says why {each.get('version')} is unproven: {AGAIN}."
        if "unproven" not in each and not _has_outputs(each):
            yield f"{one.name}: the record lacks an output on {one.package} {each.get('version')}: {AGAIN}."
    if all("unproven" in each for each in record["releases"]):
        yield f"{one.name} is proved on no release: {AGAIN}."


def _has_outputs(each: dict[str, Any]) -> bool:
    pairs = [pair for run in each.get("runs", {}).values() for pair in run]
    sides = [pair.get(side) or {} for pair in pairs for side in ("pristine", "patched")]
    return bool(sides) and all(side.get("output") and isinstance(side.get("code"), int) for side in sides)


@dataclass(frozen=True)
class Row:
    """One patch in docs/status/patches.md and in `nox -s patches`, in words."""

    patch: Patch
    targets: tuple[str, ...]

    @property
    def versions(self) -> str:
        return str(self.patch.applies_to.specifier)

    @property
    def marker(self) -> str:
        return str(self.patch.applies_to.marker or "")

    @property
    def needs(self) -> str:
        return " ".join(str(self.patch.header["X-Needs"] or "").split())

    @property
    def upstream(self) -> str:
        applied, forwarded = self.patch.header["Applied-Upstream"], self.patch.header["Forwarded"]
        return str(applied or f"not upstream (forwarded: {forwarded})")

    @property
    def proved(self) -> str:
        return told(self.patch)


def rows(root: Path, every: list[Plan]) -> list[Row]:
    """All patches, each with the targets that apply it."""
    return [
        Row(one, tuple(each.target.name for each in every if one in each.patches.get(one.package, [])))
        for one in patch.every(root)
    ]


def show(catalogue: Catalogue) -> None:
    """Print all patches: range, Python, what each needs, targets, upstream, proof."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("patch", no_wrap=True)
    for column in ("what it does", "versions", "Python", "needs", "targets", "upstream", "proved on"):
        table.add_column(column, overflow="fold")
    for row in rows(catalogue.root, plans(catalogue)):
        cells = [
            f"{row.patch.package} {row.patch.path.name[:4]}",
            row.patch.summary,
            row.versions,
            row.marker,
            row.needs,
            ", ".join(row.targets),
            row.upstream,
            row.proved,
        ]
        table.add_row(*map(escape, cells))
    console.print(table)


def told(one: Patch) -> str:
    """On what a patch's proof ran, how, and where it could not."""
    record = written(one)
    if record is None:
        return "nowhere yet"
    proved = ran(one)
    versions = [each["version"] for each in proved]
    count = f"{len(versions)} releases, {versions[0]} to {versions[-1]}" if len(versions) > 3 else ", ".join(versions)
    where = ", ".join(sorted({each["interpreter"] for each in proved}))
    how = sorted({f"emulated: {each['emulated']}" for each in proved if each["emulated"]}) or ["real"]
    without = [
        f"unproven on {each['version']}: {each['unproven']}" for each in record["releases"] if "unproven" in each
    ]
    return "; ".join([f"{count} ({where})", *how, *without])
