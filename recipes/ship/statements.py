"""What is signed about an image or a collected wheel: its contents and inputs, what its claims proved and where.

The formats are CycloneDX 1.6 (cyclonedx.org), SLSA provenance v1 (slsa.dev), in-toto's test-result v0.1 and SCAI v0.3
(github.com/in-toto/attestation), and OpenVEX 0.2.0 (openvex.dev). Each is the predicate of an in-toto statement whose
subject is the digest of the image's manifest or of the wheel. cosign signs the statement; it is attached to the image
as an OCI referrer, or lies beside the wheel. A wheel has its CycloneDX document inside (recipes/ship/sbom.py).
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cyclonedx.schema.schema import SchemaVersion1Dot6

from recipes.catalogue.bases import bases
from recipes.catalogue.lock import artifact_of
from recipes.catalogue.plan import Plan
from recipes.catalogue.schema import Source
from recipes.errors import Refusal
from recipes.files import digest_of, read_json, sha256_of
from recipes.prove.evidence import machine_name
from recipes.ship import apt
from recipes.ship.sbom import pedigree

SBOM = "https://cyclonedx.org/bom"
PROVENANCE = "https://slsa.dev/provenance/v1"
TESTS = "https://in-toto.io/attestation/test-result/v0.1"
ATTRIBUTES = "https://in-toto.io/attestation/scai/v0.3"
STATEMENT = "https://in-toto.io/Statement/v1"
VEX = "https://openvex.dev/ns/v0.2.0"
# What externalParameters mean: the target (of the wheel of the claims, none), for a wheel also its package, and the GPU
# architectures if not all.
IMAGE_BUILD, WHEEL_BUILD, CLAIMS_BUILD = "fusebox/publish/v1", "fusebox/wheels/v1", "fusebox/claims/v1"
# Runs in an image: lists its distributions, its Debian packages and the name of its system.
_LIST = r"""
import importlib.metadata as metadata, json, re, subprocess
python = {re.sub("[-_.]+", "-", each.metadata["Name"]).lower(): each.version for each in metadata.distributions()}
command = ["dpkg-query", "-W", "-f", "${Package} ${Version} ${Architecture}\n"]
debian = [line.split() for line in subprocess.check_output(command).decode().splitlines()]
system = [line.partition("=")[2].strip().strip('"') for line in open("/etc/os-release") if line.startswith("ID=")]
print(json.dumps({"python": python, "debian": debian, "system": system[0]}))
"""


@dataclass(frozen=True)
class Contents:
    """What an image has: Python distributions by name, and packages of its system as (name, version, architecture)."""

    python: Mapping[str, str]
    debian: tuple[tuple[str, str, str], ...]
    system: str

    @classmethod
    def of(cls, image: str) -> Contents:
        """Ask the image itself, in a container without a network."""
        command = ["docker", "run", "--rm", "--network=none", image, "python", "-c", _LIST]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise Refusal(
                f"{image} cannot list its packages ({done.stderr.strip()[-200:]}): run it and read what fails."
            )
        listed = json.loads(done.stdout.splitlines()[-1])
        return cls(listed["python"], tuple(tuple(row) for row in listed["debian"]), listed["system"])

    def as_json(self) -> dict[str, Any]:
        """All of it, as image.json lists it."""
        return {"distributions": dict(self.python), "system": self.system, "debian": [list(row) for row in self.debian]}

    @classmethod
    def read(cls, listed: Mapping[str, Any]) -> Contents:
        """What `as_json` wrote."""
        return cls(listed["distributions"], tuple(tuple(row) for row in listed["debian"]), listed["system"])

    def purls(self) -> set[str]:
        """The package URLs of everything."""
        named = {f"pkg:pypi/{name}@{version}" for name, version in self.python.items()}
        return named | {_debian(self.system, *row) for row in self.debian}


def _debian(system: str, name: str, version: str, architecture: str) -> str:
    return f"pkg:deb/{system}/{name}@{version}?arch={architecture}"


def sbom(plan: Plan, image: str, contents: Contents, packages: Mapping[str, Any]) -> dict[str, Any]:
    """CycloneDX: each distribution (ours with the patches in it) and each package of the system.

    `packages` are those of the image's own manifest.
    """
    hashes = {artifact.name: artifact.sha256 for artifact in plan.locked.artifacts}
    hashes |= {name: package["sha256"] for name, package in packages.items()}
    name, _, digest = image.partition("@")
    python = [
        {
            "type": "library",
            "name": distribution,
            "version": version,
            "purl": f"pkg:pypi/{distribution}@{version}",
            "bom-ref": f"pkg:pypi/{distribution}@{version}",
            **({"hashes": [{"alg": "SHA-256", "content": hashes[distribution]}]} if distribution in hashes else {}),
            **_pedigree(plan, distribution),
        }
        for distribution, version in sorted(contents.python.items())
    ]
    system = [
        {"type": "library", "name": row[0], "version": row[1], "purl": purl, "bom-ref": purl}
        for row in sorted(contents.debian)
        for purl in [_debian(contents.system, *row)]
    ]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {"type": "container", "name": name, "version": digest, "bom-ref": image}},
        "components": [*python, *system],
    }


def _pedigree(plan: Plan, distribution: str) -> dict[str, Any]:
    """The release that a package was made from, and each of our patches in it."""
    pin = next((pin for pin in plan.pins if pin.name == distribution), None)
    if pin is None or not plan.patches[pin.name]:
        return {}
    written: Any = pedigree(plan, pin, f"source of {pin.name}")
    return {"pedigree": json.loads(written.as_json(view_=SchemaVersion1Dot6))}


def materials(
    plan: Plan, commit: str, *, with_apt: bool = True, standins: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """Everything that an image is made from, each by its digest: its bases, and the inputs of its environment.

    `with_apt` is false where apt installed what the distribution had, whatever its locks say; `standins` are the images
    that were used in place of bases, by the name of the base.
    """
    images = {image.image: image.digest for image in bases(plan.root).of(plan.target)}
    pinned = inputs(plan, commit)
    for name, digest in images.items():
        used, _, used_digest = (standins or {}).get(name, f"{name}@{digest}").partition("@")
        pinned.append({"uri": f"pkg:docker/{used}", "digest": {"sha256": used_digest.removeprefix("sha256:")}})
    return [*pinned, *_locks(plan.root, apt_locks(plan).values() if with_apt else ())]


def inputs(plan: Plan, commit: str) -> list[dict[str, Any]]:
    """What an environment is built from, each by its digest: what the lock and the recipes of a checkout pin."""
    pinned = checkout_inputs(plan.root, commit)
    locked = [*plan.locked.artifacts, *(plan.toolkit.artifacts if plan.toolkit else ())]
    pinned += [
        {"uri": f"pkg:pypi/{artifact.name}@{artifact.version}", "digest": {"sha256": artifact.sha256}}
        for artifact in locked
    ]
    for pin in plan.pins:
        artifact = artifact_of(pin)
        if artifact:
            pinned.append({"uri": f"pkg:pypi/{pin.name}@{pin.release.version}", "digest": {"sha256": artifact.sha256}})
        pinned += _repositories(pin.release)
    return pinned


def checkout_inputs(root: Path, commit: str) -> list[dict[str, Any]]:
    """What everything is built from, each by its digest: the commit, and the lock of the tool, which pins uv.

    The wheel of the claims is built from nothing else.
    """
    checkout = {"uri": "git+fusebox", "digest": {"gitCommit": commit}}
    return [checkout, *_locks(root, [root / "recipes" / "lock" / "tool.txt"])]


def _locks(root: Path, paths: Iterable[Path | None]) -> list[dict[str, Any]]:
    """Locks as materials, each once."""
    return [
        {"uri": lock.relative_to(root).as_posix(), "digest": {"sha256": sha256_of(lock)}}
        for lock in sorted({path for path in paths if path})
    ]


def apt_locks(plan: Plan) -> dict[str, Path | None]:
    """The lock of what apt installs, or None, by the name of the image on which it installs anything."""
    images = bases(plan.root).of(plan.target)
    return {image.image: apt.lock_of(plan.root, image) for image in images if image.apt}


def _repositories(source: Source) -> Iterator[dict[str, Any]]:
    """The repositories of a source, its submodules included."""
    for tree in ([source] if source.repository else []) + list(source.submodules):
        yield {"uri": f"git+{tree.repository}", "digest": {"gitCommit": tree.commit}}


def builder() -> str:
    """The URI of what builds: GitHub's workflow, or this machine."""
    workflow = os.environ.get("GITHUB_WORKFLOW_REF")
    return f"{os.environ.get('GITHUB_SERVER_URL', '')}/{workflow}" if workflow else f"host:{platform.node()}"


def provenance(
    plan: Plan,
    commit: str,
    builder: str,
    started: datetime.datetime,
    sm: tuple[str, ...],
    *,
    unlocked: bool = False,
    standins: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """SLSA v1: what an image was made from, and by which machine; `builder` is its URI.

    `unlocked` is whether apt installed what the distribution had, whatever its locks say; `standins` as for
    `materials`.
    """
    images = bases(plan.root).of(plan.target)
    locks = {} if unlocked else apt_locks(plan)
    loose = sorted({name for image in images if not locks.get(image.image) for name in image.apt})
    return _slsa(
        build_type=IMAGE_BUILD,
        parameters={"target": plan.target.name, **({"sm": list(sm)} if sm else {})},
        internal={
            "stack": plan.stack,
            "notPinned": {"apt": loose},
            "aptLocks": not unlocked,
            "standins": dict(standins or {}),
        },
        dependencies=materials(plan, commit, with_apt=not unlocked, standins=standins),
        builder=builder,
        times={"startedOn": f"{started:%Y-%m-%dT%H:%M:%SZ}"},
    )


def wheel_provenance(plan: Plan, commit: str, builder: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """SLSA v1 of a collected wheel, of which `row` is the line in its list; `builder` is the URI of who collected it.

    The cache's wheel that it was made from may have been compiled earlier and elsewhere, from the same inputs.
    """
    narrowed = {"sm": list(plan.narrowed)} if plan.narrowed else {}
    return _slsa(
        build_type=WHEEL_BUILD,
        parameters={"target": plan.target.name, "package": row["package"], **narrowed},
        internal={"stack": plan.stack, "madeFrom": {"sha256": row["made_from"]}},
        dependencies=inputs(plan, commit),
        builder=builder,
        times={},
    )


def claims_provenance(root: Path, commit: str, builder: str, package: str) -> dict[str, Any]:
    """SLSA v1 of the wheel of the claims; `builder` is the URI of who built it."""
    return _slsa(
        build_type=CLAIMS_BUILD,
        parameters={"target": "", "package": package},
        internal={},
        dependencies=checkout_inputs(root, commit),
        builder=builder,
        times={},
    )


def _slsa(
    *,
    build_type: str,
    parameters: Mapping[str, Any],
    internal: Mapping[str, Any],
    dependencies: list[dict[str, Any]],
    builder: str,
    times: Mapping[str, str],
) -> dict[str, Any]:
    finished = {"finishedOn": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H:%M:%SZ}"}
    return {
        "buildDefinition": {
            "buildType": build_type,
            "externalParameters": parameters,
            "internalParameters": internal,
            "resolvedDependencies": dependencies,
        },
        "runDetails": {"builder": {"id": builder}, "metadata": {**times, **finished}},
    }


def test_result(plan: Plan, evidence: Mapping[str, Any]) -> dict[str, Any]:
    """in-toto's test-result: the claims that were proved (passed), unproven (warned) and refuted (failed)."""
    words = {"passedTests": "proved", "warnedTests": "unproven", "failedTests": "refuted"}
    listed = {
        key: [claim["id"] for claim in evidence["claims"] if claim["outcome"] == word] for key, word in words.items()
    }
    result = "FAILED" if listed["failedTests"] else "WARNED" if listed["warnedTests"] else "PASSED"
    return {
        "result": result,
        "configuration": [
            {"name": "smoke_tests", "digest": {"sha256": digest_of(evidence["files"])}},
            {"name": f"recipes/lock/{plan.locked.path.name}", "digest": {"sha256": plan.locked.sha256}},
            {"name": machine_name(evidence["hardware"])},
        ],
        **listed,
    }


def attributes(evidence: Mapping[str, Any]) -> dict[str, Any]:
    """SCAI: the GPU and the driver that the claims ran on, with the digest of the run's log."""
    machine = evidence["hardware"]
    log = {"name": f"{evidence['name']}.log", "digest": {"sha256": evidence["log_sha256"]}}
    facts = {"hardware": machine_name(machine), "driver": machine.get("driver") or "none"}
    return {"attributes": [{"attribute": f"{key}: {value}", "evidence": log} for key, value in facts.items()]}


def about(file: str, sha256: str, kind: str, predicate: Mapping[str, Any]) -> dict[str, Any]:
    """The in-toto statement that a predicate is about a file with that name and digest."""
    subject = [{"name": file, "digest": {"sha256": sha256}}]
    return {"_type": STATEMENT, "subject": subject, "predicateType": kind, "predicate": predicate}


def vex(plan: Plan) -> dict[str, Any] | None:
    """OpenVEX: what docker/vex.json says about packages that a target pins; None if it says nothing about them."""
    pinned = {f"pkg:pypi/{pin.name}@{pin.release.version}" for pin in plan.pins}
    document: dict[str, Any] = read_json(plan.root / "docker" / "vex.json")
    stated = []
    for statement in document["statements"]:
        if products := [product for product in statement["products"] if product["@id"] in pinned]:
            stated.append(statement | {"products": products})
    return document | {"statements": stated} if stated else None


def write(folder: Path, predicates: Mapping[str, Mapping[str, Any]]) -> dict[str, Path]:
    """Write each predicate to a file of its own; returns its type -> the file."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = {}
    for kind, predicate in predicates.items():
        paths[kind] = folder / f"{_FILES[kind]}.json"
        paths[kind].write_text(json.dumps(predicate, sort_keys=True))
    return paths


_FILES = {SBOM: "sbom", PROVENANCE: "provenance", TESTS: "tests", ATTRIBUTES: "attributes", VEX: "vex"}
