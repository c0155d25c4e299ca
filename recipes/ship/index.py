"""A static package index of all collected wheels, for any web server or a folder.

    index.html                       every package, for people
    packages/NAME.html               its wheels: torch, CUDA, Python, GPUs, and how each is proved
    simple/[NAME/]index.html         the simple API (PEP 503; PEP 592, 658, 708, 714, 740, 792)
    simple/[NAME/]index.json         the same as JSON (PEP 691, 700), for servers that negotiate
    targets/TARGET/                  requirements.txt and pylock.toml of a target's newest wheels
    files/                           the wheels, and beside each its METADATA and its signed statements
    evidence/                        the outcomes and raw logs that the pages link to
    wheels.json                      all of it as data, which the next index reads: old wheels stay

A wheel is yanked while a claim about its package is refuted. The index names no other index as the same project's
(PEP 708), so that an installer does not mix them.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import jinja2
from packaging.utils import canonicalize_name
from packaging.version import Version
from pydantic import BaseModel, ConfigDict, ValidationError

from recipes.catalogue.load import Catalogue
from recipes.catalogue.plan import Plan, plan
from recipes.catalogue.schema import FileName, Sha256
from recipes.errors import Refusal
from recipes.files import disk_named, read_json, remove, sha256_of, sync_tree, write_json, write_text
from recipes.make import audit
from recipes.prove import evidence
from recipes.prove.claims import Room
from recipes.ship import attest, locks, verify
from recipes.ship.cosign import Signer
from recipes.ship.wheels import LIST, version_of

API = "1.4"  # of the simple API, by PEP 792
PROVENANCE = ".provenance"  # after a wheel's name: its provenance object (PEP 740)
MEDIA = "application/vnd.pypi.simple.v1"  # +html, +json


class Proof(BaseModel):
    """How a wheel is proved: "proved" where all claims about its package hold for these bytes, else "built".

    `text` says so for a reader, `runs` names the files of evidence/, and `yanked` is why no one should install it.
    """

    model_config = ConfigDict(strict=True, frozen=True)

    word: Literal["proved", "built"] = "built"
    text: str = "no claim has run with it"
    runs: list[str] = []
    yanked: str | None = None

    def __str__(self) -> str:
        return f"yanked: {self.yanked}" if self.yanked else f"{self.word}: {self.text}"


class Entry(BaseModel):
    """One wheel of the index, as `nox -s wheels` described it; `target` is "" for one that belongs to no target."""

    model_config = ConfigDict(strict=True, frozen=True)

    file: FileName
    sha256: Sha256
    size: int
    package: str
    version: str
    summary: str
    requires_python: str | None
    target: str
    python: str
    cuda: str
    torch: str | None
    torch_patches: list[str]
    sm: list[str]
    tags: list[str]
    patches: list[str]
    release: str
    source: str | None
    made_from: Sha256
    option: str | None
    metadata_sha256: Sha256 | None = None
    proof: Proof = Proof()
    signed: str = "not signed"

    @property
    def order(self) -> tuple[str, Version, str]:
        return self.package, Version(self.version), self.file


def write(
    catalogue: Catalogue, into: Path, sources: Iterable[Path], url: str | None = None, trusted: Signer | None = None
) -> list[Entry]:
    """Write the index of what is in `into` already and of these folders of collected wheels; return its wheels.

    `url` is where the wheels will be, with what lies beside them, if not in the index's own files/. `trusted` has
    signed the wheels; a wheel whose statements are not its own is refused, unless it is yanked.
    """
    sources = list(sources)
    placed = _entries([into, *sources])
    if not placed:
        raise Refusal('There is no collected wheel: run `nox -s "wheels(TARGET)"` first.')
    partial, replaced = (into.with_name(f".{into.name}.{os.getpid()}{end}") for end in ("", ".old"))
    with disk_named(into):
        into.parent.mkdir(parents=True, exist_ok=True)
        for left in into.parent.glob(f".{into.name}.*"):  # left by a killed run
            remove(left)
        try:
            entries = _fill(partial, catalogue, placed, [into, *sources], url, trusted)
            sync_tree(partial)
            if into.exists():
                into.rename(replaced)
            partial.rename(into)
        finally:
            for left in into.parent.glob(f".{into.name}.*"):
                remove(left)
    return entries


def _fill(
    partial: Path,
    catalogue: Catalogue,
    placed: Mapping[str, tuple[Entry, Path]],
    sources: list[Path],
    url: str | None,
    trusted: Signer | None,
) -> list[Entry]:
    """Write a whole index into a new folder, of wheels and of what lies beside them in these sources; its wheels."""
    partial.mkdir()
    proofs = Proofs(catalogue)
    entries = []
    for entry, path in sorted(placed.values(), key=lambda pair: pair[0].order):
        metadata, proof = _take(path, entry, partial / "files"), proofs.of(entry)
        _take_statements(entry, [sources[0] / "files", *sources[1:]], partial / "files")
        signed = _signed(catalogue, partial / "files" / entry.file, trusted, proof)
        entries.append(entry.model_copy(update={"metadata_sha256": metadata, "proof": proof, "signed": signed}))
    evidence = [catalogue.root / "smoke_tests" / "evidence", sources[0] / "evidence"]
    for run in sorted({run for entry in entries for run in entry.proof.runs}):
        _take_evidence(run, evidence, partial / "evidence")
    _write_pages(partial, entries, url, proofs.current)
    targets = _newest(sources)
    base = url.rstrip("/") if url else "../../files"
    for target, (rows, beside) in targets.items():
        own = [(row.model_dump(), f"{base}/{quote(row.file) if url else row.file}") for row in rows]
        locks.write(partial / "targets" / target, target, rows[0].python, own, beside)
    last = {
        target: {"files": [row.file for row in rows], "dependencies": [each.model_dump() for each in beside]}
        for target, (rows, beside) in targets.items()
    }
    write_json(partial / LIST, {"wheels": [entry.model_dump() for entry in entries], "targets": last})
    return entries


def collected_in(root: Path) -> list[Path]:
    """The folders of collected wheels below build/."""
    return sorted(path.parent for path in root.glob(f"build/*/wheels/{LIST}"))


def read(folder: Path) -> list[Entry]:
    """The wheels that a folder's list describes; a damaged list is refused."""
    path = folder / LIST
    try:
        return [Entry.model_validate(row) for row in read_json(path)["wheels"]]
    except (KeyError, TypeError):
        raise Refusal(f"{path} is not a list of wheels: bring it again, or run `nox -s wheels`.") from None
    except ValidationError as error:
        raise Refusal(
            f"{path} is damaged ({evidence.fault_of(error)}): bring it again, or run `nox -s wheels`."
        ) from None


def _newest(folders: Iterable[Path]) -> dict[str, tuple[list[Entry], list[locks.Dependency]]]:
    """The wheels of each target that were collected last, and what they were proved beside."""
    newest = {}
    for folder in folders:
        if not (folder / LIST).exists():
            continue
        listed, entries = read_json(folder / LIST), read(folder)
        if "targets" in listed:  # an index
            for target, its in listed["targets"].items():
                rows = [entry for entry in entries if entry.file in its["files"]]
                newest[target] = rows, [locks.Dependency.model_validate(row) for row in its["dependencies"]]
        elif entries and entries[0].target:
            beside = [locks.Dependency.model_validate(row) for row in listed.get("dependencies", [])]
            newest[entries[0].target] = entries, beside
    return newest


def _entries(folders: Iterable[Path]) -> dict[str, tuple[Entry, Path]]:
    """Every wheel by its file name, with where it is. Two of one name must be the same bytes."""
    placed: dict[str, tuple[Entry, Path]] = {}
    for folder in folders:
        if not (folder / LIST).exists():
            continue
        for entry in read(folder):
            path = next((path for path in (folder / entry.file, folder / "files" / entry.file) if path.exists()), None)
            if path is None or sha256_of(path) != entry.sha256:
                fault = "is missing" if path is None else "does not have the sha256 of its list"
                again = f'`nox -s "wheels({entry.target})"`'
                raise Refusal(f"{path or folder / entry.file} {fault}: bring it again, or run {again}.")
            other = placed.get(entry.file)
            if other and other[0].sha256 != entry.sha256:
                raise Refusal(
                    f"{entry.file} is in the index with different bytes, and a published file never changes: run "
                    f'`nox -s "wheels({entry.target})" -- --build 2`, which gives the new one another name.'
                )
            placed.setdefault(entry.file, (entry, path))
    return placed


def _take(path: Path, entry: Entry, into: Path) -> str:
    """Bring a wheel and its METADATA into the index; return the METADATA's sha256."""
    into.mkdir(exist_ok=True)
    try:
        (into / entry.file).hardlink_to(path)
    except OSError:  # another disk
        shutil.copyfile(path, into / entry.file)
    metadata = audit.described(path, "METADATA")
    (into / f"{entry.file}.metadata").write_bytes(metadata)
    return hashlib.sha256(metadata).hexdigest()


def _take_statements(entry: Entry, places: Iterable[Path], into: Path) -> None:
    """Bring the newest signed statements of a wheel into the index, and what PEP 740 makes of them."""
    for place in places:
        if (statements := attest.beside(place / entry.file)).exists():
            shutil.copyfile(statements, attest.beside(into / entry.file))
    if attest.beside(into / entry.file).exists() and (provenance := attest.pep740(into / entry.file)):
        write_json(into / f"{entry.file}{PROVENANCE}", provenance)


def _signed(catalogue: Catalogue, wheel: Path, trusted: Signer | None, proof: Proof) -> str:
    """What a page says about a wheel's signature: "verified" only if it was verified for this index."""
    if not attest.beside(wheel).exists():
        return "not signed"
    if trusted is None:
        return "signed, and not verified for this index"
    checks = attest.verify(catalogue, wheel, trusted, None)
    if (faults := verify.faults(checks)) and not proof.yanked:
        raise Refusal(f"{wheel.name} is refused: {faults[0].rstrip('.')}, or remove it.")
    commit = next((check.finding.partition(",")[0] for check in checks if check.name == "provenance"), "")
    claims = [check.finding for check in checks if check.name == "claims"]
    return f"refused: {faults[0]}" if faults else f"verified: {'; '.join([commit, *claims])}"


def _take_evidence(run: str, places: list[Path], into: Path) -> None:
    into.mkdir(exist_ok=True)
    place = next((place for place in places if (place / f"{run}.json").exists()), None)
    for name in (f"{run}.json", f"{run}.log"):
        if place and (place / name).exists():
            shutil.copyfile(place / name, into / name)


class Proofs:
    """What the committed evidence says of collected wheels."""

    def __init__(self, catalogue: Catalogue) -> None:
        self.catalogue = catalogue
        self.room = Room(catalogue.root)
        self.plan = cache(self._plan)

    def _plan(self, target: str) -> Plan | None:
        try:
            return plan(self.catalogue, target)
        except Refusal:  # the target is gone or can no longer be built
            return None

    def current(self, entry: Entry) -> bool:
        """Whether the wheel is of a release that its target still pins; without a target, it always is."""
        if not entry.target:
            return True
        planned = self.plan(entry.target)
        pin = next((pin for pin in planned.pins if pin.name == entry.package), None) if planned else None
        if planned is None or pin is None:
            return False
        return entry.version == version_of(planned, pin) or entry.version.startswith(f"{version_of(planned, pin)}.sm")

    def of(self, entry: Entry) -> Proof:
        """How the wheel is proved now. A wheel that is no longer current keeps the statement of the older index."""
        planned = self.plan(entry.target) if entry.target else None
        if planned is None or not self.current(entry):
            return entry.proof
        runs, texts, reasons, proved = [], [], [], False
        for run, states, same in self._runs(planned, entry):
            place = evidence.where(run)
            words = {state for _, state in states}
            counts = ", ".join(f"{sum(s == word for _, s in states)} {word}" for word in sorted(words))
            of_what = "" if same else "another build of the same source: "
            texts.append(f"{of_what}{counts} on {place}")
            reasons += [f"refuted on {place}: {_claim(row)}" for row, state in states if state == "refuted"]
            proved |= same and words == {"proved"}
            runs.append(run["name"])
        if not texts:
            return Proof()
        yanked = next(iter(dict.fromkeys(reasons)), None)
        word: Literal["proved", "built"] = "proved" if proved and not yanked else "built"
        return Proof(word=word, text="; ".join(texts), runs=runs, yanked=yanked)

    def runs(self, entry: Entry) -> list[dict[str, Any]]:
        """The evidence of the claims about a wheel's package that ran with these bytes, each outcome as it counts now.

        An outcome that no longer counts reads "unproven"; a run of which none counts is left out.
        """
        planned = self.plan(entry.target)
        counted = []
        for run, states, same in self._runs(planned, entry) if planned else ():
            if same and any(state in ("proved", "refuted", "unproven") for _, state in states):
                outcomes = [
                    {**row, "outcome": state if state in ("proved", "refuted") else "unproven"} for row, state in states
                ]
                counted.append({**run, "claims": outcomes})
        return counted

    def _runs(self, planned: Plan, entry: Entry) -> Iterator[tuple[dict[str, Any], list[tuple[Any, str]], bool]]:
        """Each run with claims about a wheel's package: (the run, its rows with their states, ran it these bytes)."""
        for run in evidence.promoted(self.catalogue.root, entry.target):
            rows = [row for row in run["claims"] if row["package"] == entry.package]
            if rows:
                ran_as = evidence.built_for(planned, run)
                states = evidence.states(ran_as, self.room, run, rows)
                yield run, states, run["packages"].get(entry.package, {}).get("sha256") == entry.made_from


def _claim(row: Mapping[str, Any]) -> str:
    """The sentence of a row, and with which parameters it ran."""
    _, bracket, parameters = row["id"].partition("[")
    return f"{row['claim']} ({parameters.rstrip(']')})" if bracket else str(row["claim"])


def _write_pages(into: Path, entries: list[Entry], url: str | None, current: Any) -> None:
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=True,
    )
    simple, package, front = (
        templates.get_template(f"{name}.html.template") for name in ("simple", "package", "packages")
    )
    packages: dict[str, list[Entry]] = {}
    for entry in entries:
        packages.setdefault(canonicalize_name(entry.package), []).append(entry)
    write_text(into / "index.html", front.render(packages=packages))
    projects = [{"name": name} for name in packages]
    meta = {"api-version": API}
    write_text(into / "simple" / "index.html", simple.render(api=API, name=None, links=projects, status=None))
    write_json(into / "simple" / "index.json", {"meta": meta, "projects": projects})
    base = url.rstrip("/") if url else "../../files"
    for name, wheels in packages.items():
        status = "active" if any(map(current, wheels)) else "archived"
        links = [_link(entry, base, (into / "files" / f"{entry.file}{PROVENANCE}").exists()) for entry in wheels]
        page = simple.render(api=API, name=name, links=links, status=status)
        write_text(into / "simple" / name / "index.html", page)
        write_json(
            into / "simple" / name / "index.json",
            {
                "meta": meta | {"tracks": []},
                "name": name,
                "project-status": {"status": status},
                "alternate-locations": [],
                "versions": list(dict.fromkeys(entry.version for entry in wheels)),
                "files": links,
            },
        )
        text = package.render(
            name=name, wheels=wheels, status=status, files="../files" if url is None else base, statements=attest.SUFFIX
        )
        write_text(into / "packages" / f"{name}.html", text)


def _link(entry: Entry, base: str, attested: bool) -> dict[str, Any]:
    """A file as the simple API describes it; fields without a known value are omitted.

    The place of a provenance object has to be a whole URL of HTTPS (PEP 740).
    """
    metadata = {"sha256": entry.metadata_sha256}
    described = {
        "filename": entry.file,
        "url": f"{base}/{quote(entry.file)}",
        "hashes": {"sha256": entry.sha256},
        "requires-python": entry.requires_python,
        "core-metadata": metadata,
        "dist-info-metadata": metadata,
        "yanked": entry.proof.yanked or False,
        "size": entry.size,
        "provenance": f"{base}/{quote(entry.file)}{PROVENANCE}" if attested and base.startswith("https:") else None,
    }
    return {key: value for key, value in described.items() if value is not None}
