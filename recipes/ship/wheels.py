"""Collect the wheels that a target built or patched into build/TARGET/wheels/, as others can install them.

A collected wheel has the files of the cache's wheel, and in its .dist-info folder: a version with a local part that
names CUDA and torch (PEP 440), the platform tag that auditwheel finds, requirements on exactly this torch and on the
CUDA libraries that the extensions load, and an SBOM of the source and its patches (PEP 770, CycloneDX). The same wheel
gives the same bytes on every machine.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from email.parser import HeaderParser
from functools import cached_property
from pathlib import Path
from typing import Any

from auditwheel.architecture import Architecture
from auditwheel.error import NonPlatformWheelError
from auditwheel.libc import Libc
from auditwheel.wheel_abi import WheelAbIInfo, analyze_wheel_abi
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from recipes.catalogue.lock import Artifact
from recipes.catalogue.plan import Plan
from recipes.catalogue.schema import Pin, Target
from recipes.errors import Refusal
from recipes.files import disk_named, remove, sha256_of, sync_tree, write_json
from recipes.make import audit, environment
from recipes.make.environment import Wheel
from recipes.make.wheel import record_of, relabel
from recipes.progress import Steps
from recipes.ship import locks, sbom

LIST = "wheels.json"  # beside the wheels: what each was made from
DRIVER = ("libcuda.so.1", "libnvidia-ml.so.1")  # come with NVIDIA's driver
# The local version labels of PyTorch's own builds: the requirement "==2.11.0" alone would match any of them.
BUILDS = (
    *("cpu", "cpu.cxx11.abi", "xpu", "cu102", "cu113", "cu115", "cu116", "cu117", "cu118", "cu121", "cu124", "cu126"),
    *("cu128", "cu129", "cu130", "cu132", "rocm5.2", "rocm5.3", "rocm5.4.2", "rocm5.6", "rocm5.7", "rocm6.0"),
    *("rocm6.1", "rocm6.2", "rocm6.2.4", "rocm6.3", "rocm6.4", "rocm7.0", "rocm7.1", "rocm7.2"),
)


@dataclass(frozen=True)
class Libraries:
    """The shared libraries that a target's environment brings: file name -> (distribution, version) that holds it."""

    holders: Mapping[str, tuple[str, str]]

    @classmethod
    def of(cls, locked: Iterable[tuple[Artifact, Path]], wheels: Iterable[Wheel]) -> Libraries:
        """Those of the locked dependencies and of the target's packages."""
        files = [(artifact.name, artifact.version, path) for artifact, path in locked]
        files += [(wheel.pin.name, wheel.pin.release.metadata_version, wheel.path) for wheel in wheels]
        holders: dict[str, tuple[str, str]] = {}
        for name, version, path in files:
            if path.suffix == ".whl":
                with audit.opened(path) as archive:
                    for file in archive.namelist():
                        if re.search(r"\.so(\.\d+)*$", file):
                            holders.setdefault(file.rpartition("/")[2], (canonicalize_name(name), version))
        return cls(holders)


def local_part(plan: Plan) -> str:
    """What follows the "+" in the versions of a target's wheels, such as "cu130torch2.11".

    What the target's name has beside CUDA and torch follows too ("cu130torch2.11.fa4"), and GPU architectures other
    than the declared ones ("cu121torch2.1.sm90"): wheels of different content have different names.
    """
    target, torch = plan.target, plan.torch
    cuda = _cuda(target)
    version = ".".join(map(str, Version(torch.release.version).release[:2])) if torch else ""
    usual = "cpu" if target.cuda == "none" else f"cu{target.cuda}-torch{version}"
    more = re.sub(r"[^a-z0-9]+", ".", target.name.lower().removeprefix(usual)).strip(".")
    narrowed = ".".join(f"sm{sm.replace('.', '')}" for sm in plan.narrowed)
    return ".".join(part for part in (f"{cuda}torch{version}" if torch else cuda, more, narrowed) if part)


def _cuda(target: Target) -> str:
    """CUDA as PyTorch names it: "cu130", or "cpu"."""
    return "cpu" if target.cuda == "none" else f"cu{target.cuda.replace('.', '')}"


def own(plan: Plan) -> list[Pin]:
    """The packages that the target builds or patches. Its torch is the user's own."""
    return [
        pin
        for pin in plan.pins
        if pin.name != "torch"
        and (pin.release.kind == "source" or (pin.release.kind == "wheel" and plan.patches[pin.name]))
    ]


def version_of(plan: Plan, pin: Pin) -> str:
    """The version of a collected wheel: that of the recipe (every apex calls itself 0.1) and the local part."""
    version = Version(pin.release.version)
    local = ".".join(part for part in (version.local, local_part(plan)) if part)
    return str(Version(f"{version.public}+{local}"))


def torch_requirement(plan: Plan) -> str | None:
    """The requirement on exactly the torch that the target was built with; other builds of its version are excluded."""
    if plan.torch is None:
        return None
    version = Version(plan.torch.release.metadata_version)
    if version.local:
        return f"torch=={version}"
    ours = Version(plan.torch.release.version).local or _cuda(plan.target)
    return ",".join([f"torch=={version}", *(f"!={version}+{build}" for build in BUILDS if build != ours)])


def folder(plan: Plan) -> Path:
    """ROOT/build/TARGET/wheels, in which the collected wheels are."""
    return environment.folder(plan.root, plan.target) / "wheels"


def collect(
    plan: Plan,
    locked: list[tuple[Artifact, Path]],
    wheels: list[Wheel],
    beside: list[locks.Dependency],
    steps: Steps,
    build: int | None = None,
) -> Path:
    """Write the target's collected wheels, their list and their locks, all of them or none; return their folder.

    `locked` and `wheels` are everything that its environment consists of, `beside` are those of them that are not
    collected, and `build` is the wheels' build number.
    """
    final, libraries = folder(plan), Libraries.of(locked, wheels)
    chosen = {pin.name for pin in own(plan)}
    if not chosen:
        raise Refusal(f"Target {plan.target.name} builds and patches no package: choose a target that does.")
    partial, replaced = (final.with_name(f".wheels.{os.getpid()}{end}") for end in ("", ".old"))
    with disk_named(final):
        final.parent.mkdir(parents=True, exist_ok=True)
        for left in final.parent.glob(".wheels.*"):  # left by a killed run, since we hold the locks
            remove(left)
        try:
            partial.mkdir()
            collected = [_Collected(plan, wheel, libraries, build) for wheel in wheels if wheel.pin.name in chosen]
            rows = [_written(each, partial, steps) for each in collected]
            locks.write(partial, plan.target.name, plan.target.python, [(row, row["file"]) for row in rows], beside)
            dependencies = [dependency.model_dump() for dependency in beside]
            write_json(partial / LIST, {"target": plan.target.name, "wheels": rows, "dependencies": dependencies})
            sync_tree(partial)
            if final.exists():
                final.rename(replaced)
            partial.rename(final)
        finally:
            for left in final.parent.glob(".wheels.*"):
                remove(left)
    return final


def _written(wheel: _Collected, into: Path, steps: Steps) -> dict[str, Any]:
    """Write a wheel into a folder as a step that is shown, and return its row of the list."""
    with steps.step("collect", wheel.pin.label) as step:
        row = wheel.write(into)
        step.note = row["file"]
    return row


@dataclass(frozen=True)
class _Collected:
    """One wheel of the cache, on its way to be a collected one."""

    plan: Plan
    wheel: Wheel
    libraries: Libraries
    build: int | None

    @property
    def pin(self) -> Pin:
        return self.wheel.pin

    @cached_property
    def version(self) -> str:
        return version_of(self.plan, self.pin)

    def write(self, into: Path) -> dict[str, Any]:
        """Write the wheel into that folder, and return its row of the list."""
        came = audit.described(self.wheel.path, "WHEEL").decode()
        tags = self._tags(re.findall(r"^Tag: *(\S+)", came, re.MULTILINE))
        metadata = self._metadata(audit.described(self.wheel.path, "METADATA"))
        old = self._old_stem
        new = f"{canonicalize_name(self.pin.name).replace('-', '_')}-{self.version}"
        info = f"{new}.dist-info"
        bill = sbom.text(self.plan, self.pin, self.wheel, self.version)
        changed = {
            f"{info}/METADATA": metadata,
            f"{info}/WHEEL": self._wheel_file(came, tags),
            f"{info}/sboms/fusebox.cdx.json": bill.encode(),
        }

        def renamed(name: str) -> str:
            for end in (".dist-info", ".data"):
                if name.startswith(f"{old}{end}/"):
                    return f"{new}{end}/{name.removeprefix(f'{old}{end}/')}"
            return name

        final = into / "-".join([new, *([str(self.build)] if self.build else []), _compressed(tags)])
        relabel(self.wheel.path, final, renamed, changed)
        return self._row(final, metadata, tags)

    def _row(self, final: Path, metadata: bytes, tags: list[str]) -> dict[str, Any]:
        release, target, record = self.pin.release, self.plan.target, self.wheel.record
        torch = self.plan.torch
        return {
            "file": final.name,
            "sha256": sha256_of(final),
            "size": final.stat().st_size,
            "package": self.pin.name,
            "version": self.version,
            "summary": self.pin.package.summary,
            "requires_python": HeaderParser().parsestr(metadata.decode())["Requires-Python"],
            "target": target.name,
            "python": target.python,
            "cuda": target.cuda,
            "torch": torch.release.version if torch else None,
            "torch_patches": [patch.name for patch in self.plan.patches["torch"]] if torch else [],
            "sm": record.get("built_with", {}).get("sm", []),
            "tags": tags,
            "patches": [patch.name for patch in self.plan.patches[self.pin.name]],
            "release": release.version,
            "source": f"{release.repository}@{release.commit}" if release.repository else release.file,
            "made_from": self.wheel.sha256,
            "option": target.options.get(self.pin.name),
        }

    @cached_property
    def _old_stem(self) -> str:
        """NAME-VERSION as the cache's wheel has it in the names of its folders."""
        with audit.opened(self.wheel.path) as archive:
            return record_of(self.wheel.path, archive).removesuffix(".dist-info/RECORD")

    def _tags(self, came: list[str]) -> list[str]:
        """The wheel's tags, with the platform that auditwheel finds; a wheel for every platform keeps its own."""
        if not self._extensions:
            return sorted(came)
        policy = self._policy
        platforms = [policy.name, *policy.aliases]
        pythons = dict.fromkeys(tag.rpartition("-")[0] for tag in came)
        return [f"{python}-{platform}" for python in pythons for platform in platforms]

    @cached_property
    def _extensions(self) -> list[audit.Extension]:
        return audit.extensions(self.wheel.path)

    @cached_property
    def _wanted(self) -> set[str]:
        """The libraries that the extensions load and the wheel itself does not hold."""
        inside = {extension.name.rpartition("/")[2] for extension in self._extensions}
        return set().union(*(extension.libraries for extension in self._extensions)) - inside

    @property
    def _policy(self) -> Any:
        """auditwheel's answer; a library that neither the system, the environment nor the driver has is refused."""
        excluded = frozenset(self._wanted & (self.libraries.holders.keys() | set(DRIVER)))
        try:
            answer: WheelAbIInfo = analyze_wheel_abi(
                Libc.GLIBC,
                Architecture.x86_64,
                self.wheel.path,
                excluded,
                disable_isa_ext_check=False,
                allow_graft=False,
            )
        except NonPlatformWheelError as error:
            raise Refusal(f"{self.pin.label}: auditwheel finds no platform ({error}): build it again.") from None
        if answer.overall_policy == answer.policies.linux:
            strange = sorted(answer.external_refs[answer.policies.highest.name].libs)
            raise Refusal(
                f"{self.pin.label}: auditwheel finds that {self.wheel.path.name} runs on this machine only (it loads "
                f"{', '.join(strange) or 'no strange library'}): link these statically, or add the package that holds "
                f"them to target {self.plan.target.name}."
            )
        return answer.overall_policy

    def _metadata(self, came: bytes) -> bytes:
        """METADATA with the version and the requirements of the collected wheel."""
        head, blank, body = came.decode().partition("\n\n")
        ours = self._requirements()
        names: set[str] = {canonicalize_name(Requirement(text).name) for text in ours}
        lines = []
        for line in head.splitlines():
            field, _, value = line.partition(":")
            if field == "Version":
                line = f"Version: {self.version}"
            if field != "Requires-Dist" or not _is_met_by(names, Requirement(value.strip())):
                lines.append(line)
        lines += [f"Requires-Dist: {text}" for text in ours]
        return "".join([*(f"{line}\n" for line in lines), blank and "\n", body]).encode()

    def _requirements(self) -> list[str]:
        """On torch, on the target's other collected wheels that it needs, and on the CUDA libraries that it loads."""
        pin, plan = self.pin, self.plan
        versions = {other.name: version_of(plan, other) for other in own(plan)}
        needed: set[str] = {
            canonicalize_name(asked.name) for asked in map(Requirement, pin.release.needs) if plan.target.applies(asked)
        }
        needed |= set(pin.package.build.needs) if pin.package.build else set()
        exact = [f"{name}=={versions[name]}" for name in sorted(needed & versions.keys() - {pin.name})]
        holders = {self.libraries.holders[name] for name in self._wanted & self.libraries.holders.keys()}
        ranges = [
            _same_series(name, version)
            for name, version in sorted(holders)
            if name != "torch" and name not in versions and name not in plan.target.packages
        ]
        torch = torch_requirement(plan)
        return [*([torch] if torch else []), *exact, *ranges]

    def _wheel_file(self, came: str, tags: list[str]) -> bytes:
        lines = [line for line in came.splitlines() if line and not line.startswith(("Tag:", "Build:"))]
        lines += [f"Build: {self.build}"] if self.build else []
        return "".join(f"{line}\n" for line in [*lines, *(f"Tag: {tag}" for tag in tags)]).encode()


def _is_met_by(names: set[str], asked: Requirement) -> bool:
    """Whether requirements on these packages also cover this requirement, which may be a URL (MS-AMP's is)."""
    return canonicalize_name(asked.name) in names and "extra" not in str(asked.marker)


def _same_series(name: str, version: str) -> str:
    """That version of a CUDA library or a newer one with the same soname."""
    release = Version(version).release
    return f"{name}>={'.'.join(map(str, release[:2]))},<{release[0] + 1}"


def _compressed(tags: list[str]) -> str:
    """The last three parts of a wheel's file name (PEP 425: compressed tag sets)."""
    parts = [list(dict.fromkeys(part)) for part in zip(*(tag.split("-") for tag in tags), strict=True)]
    return f"{'-'.join('.'.join(part) for part in parts)}.whl"
