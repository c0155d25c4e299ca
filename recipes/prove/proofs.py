"""The proofs of patches: the releases that each applies to, and the committed record of its proof's last real run.

A proof is patches/PACKAGE/test_NNNN_slug.py beside the patch; its record is NNNN-slug.json. A record whose patch,
proof or harness has changed since the run, or a patch that is applied before it, is shown as changed (`changes`), like
the evidence of a claim. A patch that lacks a proof, a record or a release in it is a fault (`faults`). Both work
without fetching anything.
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
from recipes.prove.evidence import CHANGED

HARNESS = ("proof.py", "conftest.py")  # of patches/: what runs and judges every proof
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

    @property
    def applied(self) -> dict[str, str]:
        """The file of each patch, with the sha256 of its diff as placed in the release."""
        return {each.path.name: each.sha256 for each in self.patches}


@dataclass(frozen=True)
class Inputs:
    """What decides the proofs in a checkout: the releases and patches of all targets, and the code of patches/."""

    catalogue: Catalogue
    plans: list[Plan]
    code: Code

    def cases(self, proved: Patch) -> list[Case]:
        """The releases that a patch applies to."""
        return cases(self.catalogue, self.plans, proved)


@dataclass(frozen=True)
class Conditions:
    """What a proof declares in constants of its module.

    `RUNS_IN` is the target in whose environment it runs, `EMULATED` says in one sentence what is faked there, and
    `UNPROVEN` says by version why it cannot run there.
    """

    runs_in: str
    emulated: str | None
    unproven: dict[str, str]


def test_of(proved: Patch) -> Path:
    """0001-some-slug.patch is proved by test_0001_some_slug.py."""
    return proved.path.with_name(f"test_{proved.path.stem.replace('-', '_')}.py")


def record_of(proved: Patch) -> Path:
    """The file that holds the record of a patch's proof."""
    return proved.path.with_suffix(".json")


def plans(catalogue: Catalogue) -> list[Plan]:
    """The plan of every target."""
    return [plan(catalogue, name) for name in catalogue.targets]


def inputs(catalogue: Catalogue) -> Inputs:
    """What decides the proofs in this checkout now."""
    return Inputs(catalogue, plans(catalogue), code(catalogue.root))


def cases(catalogue: Catalogue, every: Iterable[Plan], proved: Patch) -> list[Case]:
    """The releases that a patch applies to: those that targets pin, then those that only its proof runs on."""
    by_source: dict[str, Case] = {}
    for plan_of_target in every:
        for pin in plan_of_target.pins:
            selected = plan_of_target.patches[pin.name]
            upto = [each for each in selected if each.package == proved.package and each.path <= proved.path]
            if upto and upto[-1].path == proved.path:
                by_source.setdefault(pin.release.identity, Case(pin.release, tuple(upto)))
    package = catalogue.packages.get(proved.package)
    upto = [each for each in patch.of_package(catalogue.root, proved.package) if each.path <= proved.path]
    for source in package.proved_on if package else []:
        if proved.covers(source.version):
            placed = tuple(each.at(source.version) for each in upto if each.covers(source.version))
            by_source.setdefault(source.identity, Case(source, placed))
    return list(by_source.values())


def conditions(test: Path) -> Conditions:
    """The constants of a proof's module, read and not imported."""
    constants: dict[str, Any] = {}
    for statement in ast.parse(test.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            name = statement.targets[0].id
            if name in ("RUNS_IN", "EMULATED", "UNPROVEN"):
                try:
                    constants[name] = ast.literal_eval(statement.value)
                except ValueError:
                    raise Refusal(f"{test}: {name} is not a plain value: write it as one.") from None
    if not isinstance(constants.get("RUNS_IN"), str):
        raise Refusal(f'{test} does not say where it runs: add RUNS_IN = "cpu", or another target.')
    return Conditions(constants["RUNS_IN"], constants.get("EMULATED"), constants.get("UNPROVEN", {}))


def code(root: Path) -> Code:
    """All definitions of patches/."""
    return Code(root / "patches", HARNESS)


def key(every: Code, test: Path) -> str:
    """The key of a proof: of everything that its module contains, imports and can reach, and of the harness."""
    file = test.relative_to(every.folder).as_posix()
    module = every.modules[file]
    roots = {definition.place for definition in module.definitions.values()}
    for name in module.imports:  # tests that several proofs share are imported but not mentioned
        roots |= every.resolve(file, name)[1]
    return every.key(every.floor(roots))


def written(proved: Patch) -> dict[str, Any] | None:
    """The record of a patch's proof, if there is one that can be read."""
    try:
        record = json.loads(record_of(proved).read_text(encoding="utf-8"))
        return record if isinstance(record.get("releases"), list) else None
    except (FileNotFoundError, ValueError, AttributeError):
        return None


def write(proved: Patch, releases: list[dict[str, Any]], now: Inputs | None = None) -> Path:
    """Write the record of a run that proved the patch on these releases, and which patches were applied to each."""
    root = proved.path.parents[2]
    now = now or inputs(Catalogue(root))
    applied = {case.source.identity: case.applied for case in now.cases(proved)}
    ordered = [
        release if "unproven" in release else {**release, "patches": applied[release["source"]]}
        for release in sorted(releases, key=lambda release: Version(release["version"]))
    ]
    proof = key(now.code, test_of(proved))
    commit = commit_of(root, "patches/*.py", "patches/*.patch")
    write_json(record_of(proved), {"patch": proved.sha256, "proof": proof, "commit": commit, "releases": ordered})
    return record_of(proved)


def ran(proved: Patch) -> list[dict[str, Any]]:
    """The releases that a patch's proof ran on, according to its record; none without a record."""
    releases = (written(proved) or {"releases": []})["releases"]
    return [release for release in releases if "unproven" not in release]


def entry(record: dict[str, Any] | None, source: Source) -> dict[str, Any] | None:
    """The entry of a record for a release."""
    sought = (source.version, source.identity)
    releases = record["releases"] if record else []
    return next((release for release in releases if (release["version"], release["source"]) == sought), None)


def changes(proved: Patch, now: Inputs) -> list[str]:
    """What has changed since a patch's proof ran, in a few words each; nothing for a patch without proof or record."""
    record, test = written(proved), test_of(proved)
    if record is None or not test.exists():
        return []
    as_committed = patch.read(proved.path).sha256  # `proved` may have its hunks at another release's lines
    is_other, otherwise = record.get("patch") != as_committed, _applied_otherwise(proved, record, now)
    different = {
        "the patch": is_other,
        "its lines in a release": proved.path.name in otherwise and not is_other,
        "its proof or what runs all proofs": record.get("proof") != key(now.code, test),
        "its record, which does not list the patches applied": any("patches" not in each for each in ran(proved)),
    }
    earlier = [f"an earlier patch ({name})" for name in sorted(otherwise - {proved.path.name})]
    return [part for part, is_different in different.items() if is_different] + earlier


def _applied_otherwise(proved: Patch, record: dict[str, Any], now: Inputs) -> set[str]:
    """The files of patches that a run would apply to a release of the record otherwise than it lists."""
    differing = set()
    for case in now.cases(proved):
        release = entry(record, case.source)
        if release and "patches" in release:
            differing |= {name for name, _ in release["patches"].items() ^ case.applied.items()}
    return differing


def state(proved: Patch, now: Inputs) -> str:
    """The state of a patch: "proved", "not run", or "changed" if something that decides its proof has changed since."""
    if not ran(proved):
        return "not run"
    return CHANGED if changes(proved, now) else "proved"


def faults(catalogue: Catalogue, every: list[Plan]) -> list[str]:
    """What the patches lack, one sentence each: a proof, a record, a release in the record, or an output."""
    patches = patch.every(catalogue.root)
    expected = {path for each in patches for path in (each.path, test_of(each), record_of(each))}
    stray = [
        f"{path.relative_to(catalogue.root)} belongs to no patch: delete it, or put the patch back."
        for pattern in ("*/*.json", "*/test_*.py")
        for path in sorted((catalogue.root / "patches").glob(pattern))
        if path not in expected
    ]
    return stray + [fault for each in patches for fault in _faults(each, cases(catalogue, every, each))]


def _faults(proved: Patch, proved_on: list[Case]) -> Iterator[str]:
    test, record = test_of(proved), written(proved)
    if not proved_on:
        yield f"{proved.name} applies to no release of any target or of proved_on: delete it, or correct X-Applies-To."
    if not test.exists():
        yield f"{proved.name} has no proof {test.name}: write one (patches/README.md)."
    elif record is None:
        yield f"{proved.name} has no record {record_of(proved).name} of its proof: {AGAIN}."
    else:
        yield from _other_releases(proved, proved_on, record)
        yield from _incomplete(proved, record)


def _other_releases(proved: Patch, proved_on: list[Case], record: dict[str, Any]) -> Iterator[str]:
    """Where the releases of a record are not those that the patch applies to."""
    pinned = {(case.source.version, case.source.identity) for case in proved_on}
    recorded = {(release.get("version"), release.get("source")) for release in record["releases"]}
    for version, source in sorted(pinned - recorded):
        yield f"{proved.name} was not proved on {proved.package} {version} ({source[:12]}): {AGAIN}."
    for version, source in sorted(recorded - pinned, key=str):
        yield (
            f"{proved.name} was proved on {proved.package} {version} ({str(source)[:12]}), "
            f"to which it no longer applies: {AGAIN}."
        )


def _incomplete(proved: Patch, record: dict[str, Any]) -> Iterator[str]:
    """Where a record lacks an output, or the reason why there is none."""
    test = test_of(proved)
    unproven = conditions(test).unproven
    for release in record["releases"]:
        version = release.get("version")
        if "unproven" in release and release["unproven"] != unproven.get(version):
            yield f"{proved.name}: nothing in {test.name} says why {version} is unproven: {AGAIN}."
        if "unproven" not in release and not _has_outputs(release):
            yield f"{proved.name}: the record lacks an output on {proved.package} {version}: {AGAIN}."
    if all("unproven" in release for release in record["releases"]):
        yield f"{proved.name} is proved on no release: {AGAIN}."


def _has_outputs(release: dict[str, Any]) -> bool:
    pairs = [pair for run in release.get("runs", {}).values() for pair in run]
    sides = [pair.get(side) or {} for pair in pairs for side in ("pristine", "patched")]
    return bool(sides) and all(side.get("output") and isinstance(side.get("code"), int) for side in sides)


@dataclass(frozen=True)
class Row:
    """A row about a patch in docs/status/patches.md and `nox -s patches`, as text."""

    patch: Patch
    targets: tuple[str, ...]
    state: str

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
    def proved_on(self) -> str:
        return proved_on(self.patch)


def rows(now: Inputs) -> list[Row]:
    """All patches, each with the targets that apply it and the state of its proof."""
    rows = []
    for each in patch.every(now.catalogue.root):
        targets = tuple(plan.target.name for plan in now.plans if each in plan.patches.get(each.package, []))
        rows.append(Row(each, targets, state(each, now)))
    return rows


def show(catalogue: Catalogue) -> None:
    """Print all patches: range, Python, what each needs, targets, upstream, state, and what each was proved on."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("patch", no_wrap=True)
    for column in ("what it does", "versions", "Python", "needs", "targets", "upstream", "state", "proved on"):
        table.add_column(column, overflow="fold")
    for row in rows(inputs(catalogue)):
        cells = [
            f"{row.patch.package} {row.patch.path.name[:4]}",
            row.patch.summary,
            row.versions,
            row.marker,
            row.needs,
            ", ".join(row.targets),
            row.upstream,
            row.state,
            row.proved_on,
        ]
        table.add_row(*map(escape, cells))
    console.print(table)


def proved_on(proved: Patch) -> str:
    """The releases and interpreters that a patch's proof ran on, what it emulated, and where it could not run."""
    record = written(proved)
    if record is None:
        return "nowhere yet"
    releases = ran(proved)
    versions = [release["version"] for release in releases]
    count = f"{len(versions)} releases, {versions[0]} to {versions[-1]}" if len(versions) > 3 else ", ".join(versions)
    interpreters = ", ".join(sorted({release["interpreter"] for release in releases}))
    emulated = sorted({f"emulated: {release['emulated']}" for release in releases if release["emulated"]})
    unproven = [
        f"unproven on {release['version']}: {release['unproven']}"
        for release in record["releases"]
        if "unproven" in release
    ]
    return "; ".join([f"{count} ({interpreters})", *(emulated or ["real"]), *unproven])
