"""What is signed about an image or a collected wheel: its contents and inputs, what its claims proved and where.

The formats are CycloneDX 1.6 (cyclonedx.org), SLSA provenance v1 (slsa.dev), and in-toto's test-result v0.1 and SCAI
v0.3 (github.com/in-toto/attestation). Each is the predicate of an in-toto statement whose subject is the digest of the
image's manifest or of the wheel. cosign signs the statement; it is attached to the image as an OCI referrer, or lies
beside the wheel. A wheel has its CycloneDX document inside (recipes/ship/sbom.py).
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cyclonedx.schema.schema import SchemaVersion1Dot6

from recipes.catalogue.lock import artifact_of
from recipes.catalogue.plan import Plan
from recipes.catalogue.schema import Source
from recipes.errors import Refusal
from recipes.files import digest_of, sha256_of
from recipes.prove.evidence import machine_name
from recipes.ship.dockerfile import SOURCES
from recipes.ship.sbom import pedigree

SBOM = "https://cyclonedx.org/bom"
PROVENANCE = "https://slsa.dev/provenance/v1"
TESTS = "https://in-toto.io/attestation/test-result/v0.1"
ATTRIBUTES = "https://in-toto.io/attestation/scai/v0.3"
STATEMENT = "https://in-toto.io/Statement/v1"
# What externalParameters mean: the target, of a wheel its package too, and the GPU architectures if not all.
IMAGE_BUILD, WHEEL_BUILD = "fusebox/publish/v1", "fusebox/wheels/v1"
# Run in an image: its distributions, its Debian packages and the name of its system.
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


def materials(plan: Plan, commit: str) -> list[dict[str, Any]]:
    """Everything that an image is made from, each by its digest: its bases, and the inputs of its environment."""
    images = {image.image: image.digest for image in (SOURCES, plan.target.base.wheels, plan.target.base.runtime)}
    bases = [
        {"uri": f"pkg:docker/{name}", "digest": {"sha256": digest.removeprefix("sha256:")}}
        for name, digest in images.items()
    ]
    return [*inputs(plan, commit), *bases]


def inputs(plan: Plan, commit: str) -> list[dict[str, Any]]:
    """What an environment is built from, each by its digest: what the lock and the recipes of a checkout pin."""
    root = plan.root
    pinned = [{"uri": "git+fusebox", "digest": {"gitCommit": commit}}]
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
    lock = root / "recipes" / "lock" / "tool.txt"
    return [*pinned, {"uri": "recipes/lock/tool.txt", "digest": {"sha256": sha256_of(lock)}}]


def _repositories(source: Source) -> Iterator[dict[str, Any]]:
    """The repositories of a source, its submodules included."""
    for tree in ([source] if source.repository else []) + list(source.submodules):
        yield {"uri": f"git+{tree.repository}", "digest": {"gitCommit": tree.commit}}


def builder() -> str:
    """The URI of what builds: GitHub's workflow, or this machine."""
    workflow = os.environ.get("GITHUB_WORKFLOW_REF")
    return f"{os.environ.get('GITHUB_SERVER_URL', '')}/{workflow}" if workflow else f"host:{platform.node()}"


def provenance(
    plan: Plan, commit: str, builder: str, started: datetime.datetime, sm: tuple[str, ...]
) -> dict[str, Any]:
    """SLSA v1: what an image was made from, and by which machine; `builder` is its URI."""
    apt = sorted({*plan.target.base.wheels.apt, *plan.target.base.runtime.apt})
    return _slsa(
        build_type=IMAGE_BUILD,
        parameters={"target": plan.target.name, **({"sm": list(sm)} if sm else {})},
        internal={"stack": plan.stack, "notPinned": {"apt": apt}},
        dependencies=materials(plan, commit),
        builder=builder,
        times={"startedOn": f"{started:%Y-%m-%dT%H:%M:%SZ}"},
    )


def wheel_provenance(plan: Plan, commit: str, builder: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """SLSA v1 of a collected wheel, of which `row` is the line in its list; `builder` is the URI of who collected it.

    The cache's wheel that it was made from may have been compiled earlier and elsewhere, from the same inputs.
    """
    return _slsa(
        build_type=WHEEL_BUILD,
        parameters={"target": plan.target.name, "package": row["package"], "sm": row["sm"]},
        internal={"stack": plan.stack, "madeFrom": {"sha256": row["made_from"]}},
        dependencies=inputs(plan, commit),
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


def write(folder: Path, predicates: Mapping[str, Mapping[str, Any]]) -> dict[str, Path]:
    """Write each predicate to a file of its own; returns its type -> the file."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = {}
    for kind, predicate in predicates.items():
        paths[kind] = folder / f"{_FILES[kind]}.json"
        paths[kind].write_text(json.dumps(predicate, sort_keys=True))
    return paths


_FILES = {SBOM: "sbom", PROVENANCE: "provenance", TESTS: "tests", ATTRIBUTES: "attributes"}
