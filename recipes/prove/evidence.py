"""The evidence: committed outcomes, what was tested, and which outcomes still hold.

A claim's key is that of the definitions of smoke_tests/ that it ran (definitions.py); the stack key is the hash of the
pinned inputs. A row whose keys differ from the checkout's is shown as changed, not as proved.
"""

from __future__ import annotations

import collections
import importlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from recipes.catalogue.plan import Plan, for_architectures
from recipes.errors import Refusal
from recipes.files import read_json, sha256_of
from recipes.prove.claims import Claim, Room, of_row, table_of

Row = dict[str, Any]
CHANGED = "changed"  # the state of a row whose code or inputs have changed since it ran


def imported(name: str) -> ModuleType:
    """A module of this checkout's smoke_tests/ that needs the standard library only."""
    return importlib.import_module(f"smoke_tests.{name}")


class Brought(BaseModel):
    """The fields that a file from elsewhere must have because they are read here; other fields are kept."""

    model_config = ConfigDict(extra="allow", strict=True)


class Machine(Brought):
    name: Annotated[str, Field(pattern=r"^\w[\w .+-]*$")]  # it becomes part of a file name
    cpu: str


class Hardware(Machine):
    arch: str
    gpus: list[Any]


class Outcome(Brought):
    id: str
    claim: str
    package: str
    outcome: Literal["proved", "refuted", "unproven"]
    seed: list[str]
    seconds: float
    reason: str
    measured: dict[str, Any]


class Outcomes(Brought):
    target: str
    stack: str
    files: dict[str, str]
    hardware: Hardware
    python: Annotated[str, Field(pattern=r"^\d+\.\d+")]
    ran: dict[str, list[str]] | None = None
    claims: list[Outcome]


class Package(Brought):
    built_with: dict[str, Any]


class Built(Brought):
    packages: dict[str, Package]
    target: str
    stack: str


class Runtime(Brought):
    name: str
    version: str


class Carried(Brought):
    """What `prove_carried.py` says about the image whose claims it ran."""

    image: Annotated[str, Field(pattern=r"^[^@\s]+@sha256:[0-9a-f]{64}$")]
    labels: dict[str, str]
    runtime: Runtime
    user: str


class Evidence(Built):
    name: str
    started: str
    hardware: Machine
    claims: list[Outcome]
    commit: str
    files: dict[str, str]
    definitions: dict[str, str]
    log_sha256: str


def brought(model: type[Brought], path: Path) -> dict[str, Any]:
    """The content of a JSON file that fits the model; the first fault is refused, and so is foreign evidence."""
    content: dict[str, Any] = read_json(path)
    if isinstance(content, dict) and content.get("foreign"):
        raise Refusal(
            f"{path} is about an environment that Fusebox did not build, whose files no target pins: it cannot be "
            'promoted; run `nox -s "smoke(TARGET)"` for evidence of a target.'
        )
    try:
        model.model_validate(content)
    except ValidationError as error:
        raise Refusal(f"{path} is damaged or incomplete ({fault_of(error)}): bring the whole file again.") from None
    return content


def fault_of(error: ValidationError) -> str:
    """The first fault that a model finds: where it is, and what is wrong."""
    fault = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, fault['loc'])) or 'all of it'}: {fault['msg']}"


def machine_name(machine: Mapping[str, Any], times: str = " × ") -> str:
    """The name of the hardware, preceded by the number of GPUs if there are several."""
    count = len(machine["gpus"]) if machine["name"] != machine["arch"] else 1
    return f"{count}{times}{machine['name']}" if count > 1 else str(machine["name"])


def where(run: Mapping[str, Any]) -> str:
    """The hardware of a run, and whether it ran in an image."""
    return machine_name(run["hardware"]) + (" (image)" if "image" in run else "")


def grouped(claims: Iterable[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """The rows of each claim and package, in the order in which they ran."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for claim in claims:
        groups.setdefault((claim["package"], claim["claim"]), []).append(claim)
    return groups


def worst(rows: Iterable[dict[str, Any]]) -> str:
    """The outcome of several rows: refuted if one is, else unproven if one is, else proved."""
    outcomes = {row["outcome"] for row in rows}
    return next(word for word in ("refuted", "unproven", "proved") if word in outcomes)


def built(root: Path, target: str) -> dict[str, Any] | None:
    """The committed manifest of a target's environment, if one is kept."""
    path = built_path(root, target)
    return brought(Built, path) if path.exists() else None


def built_path(root: Path, target: str) -> Path:
    return root / "smoke_tests" / "evidence" / "built" / f"{target}.json"


def promoted(root: Path, target: str) -> list[dict[str, Any]]:
    """The committed evidence of a target, one per hardware."""
    return [read(path) for path in sorted((root / "smoke_tests" / "evidence").glob(f"{target}--*.json"))]


def against_moving(plan: Plan) -> str | None:
    """Why a target's floating tag must not move: a claim that a run refutes, or that no run of this stack proves.

    What one run could not prove, for example on fewer GPUs, another run may.
    """
    room, runs = Room(plan.root), promoted(plan.root, plan.target.name)
    if not runs:
        return "nothing of this target was ever proved"
    against: dict[str, str] = {}
    proved = set()
    for run in runs:
        ran_as = built_for(plan, run)
        partly = ", compiled for some of its GPUs only" if ran_as.stack != plan.stack else ""
        for row, word in states(ran_as, room, run, run["claims"]):
            if word == "refuted":
                return f"{row['id']} is {word} in {run['name']}"
            if word == "proved" and not partly:
                proved.add(row["id"])
            against.setdefault(row["id"], f"{row['id']} is {word} in {run['name']}{partly}")
    for identity, reason in against.items():
        if identity not in proved:
            return reason
    first, *others = (missing_claims(plan, room, run) for run in runs)
    missing = next((claim for claim in first if all(claim in other for other in others)), None)
    return f"{missing.id} was not run in {runs[0]['name']}" if missing else None


def missing_claims(plan: Plan, room: Room, run: dict[str, Any]) -> list[Claim]:
    """The claims that a run of the target should contain but does not."""
    ran = {row["id"].split("[")[0] for row in run["claims"]}
    return [claim for claim in room.claims.values() if claim.is_expected(plan, room) and claim.id not in ran]


def read(path: Path) -> dict[str, Any]:
    """Evidence whose raw log exists and is unchanged; other evidence is refused."""
    evidence = brought(Evidence, path)
    log = path.with_suffix(".log")
    if not log.exists() or sha256_of(log) != evidence["log_sha256"]:
        raise Refusal(
            f"{path}: its raw log {log.name} is missing or was changed: restore both from the run that made them."
        )
    return evidence


def built_for(plan: Plan, evidence: dict[str, Any]) -> Plan:
    """The plan with the GPU architectures that a run's wheels were compiled for: `--sm` can leave some out."""
    if evidence.get("stack") == plan.stack:  # though each compiled package may have kernels for some of them only
        return plan
    architectures = [
        package["built_with"]["sm"] for package in evidence["packages"].values() if package["built_with"].get("sm")
    ]
    # A package may have kernels for only some of the run's architectures.
    compiled = list(dict.fromkeys(sm for several in sorted(architectures, key=len, reverse=True) for sm in several))
    return for_architectures(plan, compiled) if compiled else plan


def states(plan: Plan, room: Room, run: Mapping[str, Any], rows: list[Row]) -> list[tuple[Row, str]]:
    """Rows of a run, each with its state: its outcome, or changed if the stack or its code has changed since.

    So is one whose claim is no longer about the target's version of its package.
    """
    if run["stack"] != plan.stack:
        return [(row, CHANGED) for row in rows]
    keys = zip(rows, room.keys_of(run, rows), strict=True)
    return [
        (row, CHANGED if key != row["key"] or room.leaves_out(row["id"], plan) else str(row["outcome"]))
        for row, key in keys
    ]


def counted(words: Iterable[str]) -> dict[str, int]:
    """How often each state is among these, the best state first."""
    counts = collections.Counter(words)
    return {word: counts[word] for word in ("proved", CHANGED, "unproven", "refuted") if counts[word]}


def changes(plan: Plan, room: Room, run: Mapping[str, Any]) -> dict[str, list[str]]:
    """What changed since a run (a definition, or "the stack") -> the rows that it affects."""
    concerned: dict[str, list[str]] = {}
    table = table_of(run)
    for row, word in states(plan, room, run, run["claims"]):
        if word != CHANGED:
            continue
        whole = "the stack" if run["stack"] != plan.stack else "what it can reach" if "ran" not in row else ""
        names = (
            [f"{file}:{name}" for file, name in room.code.changed(of_row(table, row["ran"]))] if not whole else [whole]
        )
        else_changed = (
            "the versions that it is about" if room.leaves_out(row["id"], plan) else "what its names stand for"
        )
        for name in names or [else_changed]:
            concerned.setdefault(name, []).append(row["id"])
    return concerned
