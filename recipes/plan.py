"""The plan: what one target is made of, in order, what it will cost, and whether it can be made at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from packaging.version import Version
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from recipes import limits, patch
from recipes.cache import Cache
from recipes.fetch import Lock, artifact_of
from recipes.limits import Reason, Verdict
from recipes.model import Catalogue, Pin, Refusal, Target, build_environment, digest_of, what_if
from recipes.patch import Patch
from recipes.progress import console, say, size

# What a release says of its size and of the cost of building it: no part of what it is.
ESTIMATES: dict[str, Any] = {"mib": True, "build": {"core_seconds": True, "longest_seconds": True, "mib_per_job": True}}


@dataclass(frozen=True)
class Plan:
    """A target with everything it pins. `lock` is None where a what-if has none."""

    root: Path
    target: Target
    pins: list[Pin]
    patches: dict[str, list[Patch]]
    lock: Lock | None

    @property
    def torch(self) -> Pin | None:
        return next((pin for pin in self.pins if pin.name == "torch"), None)

    @property
    def on_base(self) -> bool:
        """Whether the base image provides packages, so that the target is a layer on its Python."""
        return any(pin.release.kind == "provided" for pin in self.pins)

    @property
    def locked(self) -> Lock:
        """The lock, which everything but a what-if needs."""
        if self.lock is None:
            raise Refusal(f"Target {self.target.name} has no lock: write it with `nox -s lock -- {self.target.name}`.")
        return self.lock

    @cached_property
    def stack(self) -> str:
        """The stack key: the sha256 of every pinned input, computable from a checkout."""
        return digest_of(
            {
                "python": self.target.python,
                "cuda": self.target.cuda,
                "sm": self.target.sm,
                "base": self.target.base.model_dump(),
                **({"variables": self.target.variables} if self.target.variables else {}),
                "packages": [
                    {
                        "release": pin.release.model_dump(exclude=ESTIMATES, exclude_defaults=True),
                        "options": pin.build.options if pin.release.kind == "source" else [],
                        "build": build_environment(pin, self.target) if pin.release.kind == "source" else None,
                        "patches": [chosen.sha256 for chosen in self.patches[pin.name]],
                    }
                    for pin in self.pins
                ],
                "lock": self.locked.sha256,
            }
        )


def changed(declared: Target, sm: list[str] | None, python: str | None) -> Target:
    """The target with other GPU architectures or another Python."""
    if sm and declared.cuda == "none":
        raise Refusal(
            f"Target {declared.name} compiles no GPU code, so --sm has nothing to change: choose a target with CUDA."
        )
    changes = {key: value for key, value in (("sm", sm), ("python", python)) if value}
    return what_if(declared, changes) if changes else declared


def plan(catalogue: Catalogue, name: str, sm: list[str] | None = None, python: str | None = None) -> Plan:
    """The plan of a target, or of a what-if (other GPU architectures, another Python). Refuses what cannot be."""
    declared = catalogue.target(name)
    target = changed(declared, sm, python)
    pins = catalogue.pins(target)
    patches = {pin.name: patch.selected(catalogue.root, pin, target) for pin in pins}
    path = catalogue.root / "recipes" / "lock" / f"{name}.txt"
    lock = Lock.read(path, target) if path.exists() and target.python == declared.python else None
    held = limits.facts(target, lock, {})
    limits.refuse(limits.judge(catalogue.limits, held, held))
    return Plan(catalogue.root, target, pins, patches, lock)


def consider(catalogue: Catalogue, target: Target, replaced: Mapping[str, str]) -> Verdict:
    """Whether a target could hold other versions: by learned limits, and by the ranges of the releases.

    Locked dependencies do not count against it, since a lock is resolved again within the limits.
    """
    held = limits.facts(target, None, replaced)
    declared = catalogue.targets[target.name]
    asked = [*replaced, *(key for key in ("sm", "python") if getattr(target, key) != getattr(declared, key))]
    verdict = limits.judge(catalogue.limits, held, asked)
    obstacles, fitting = [], []
    for package, version in {**target.packages, **replaced}.items():
        known = catalogue.packages[package].release if package in catalogue.packages else []
        releases = [release for release in known if Version(release.version) == Version(version)]
        met = [release.obstacle(target, held.get("torch", [None])[0]) for release in releases]
        recipe = f"recipes/packages/{package}.toml"
        if not releases:
            continue
        if all(met):
            obstacles += [Reason(recipe, f"{package} {version} {one}") for one in met[:1]]
        elif package in replaced:
            fitting.append(Reason(recipe, f"{package} {version} fits this target by its ranges"))
    if obstacles:
        return Verdict("refused", (*(verdict.reasons if verdict.word == "refused" else ()), *obstacles))
    if fitting and verdict.word == "unknown":
        return Verdict("allowed", tuple(fitting))
    return verdict


@dataclass(frozen=True)
class Grid:
    """Every release of every package against every target; `holds` are those that the target has."""

    targets: tuple[str, ...]
    rows: dict[tuple[str, str], dict[str, Verdict]]
    holds: frozenset[tuple[str, str, str]]


def grid(catalogue: Catalogue) -> Grid:
    """The whole compatibility matrix, by package and version, then target."""
    rows: dict[tuple[str, str], dict[str, Verdict]] = {}
    for package in catalogue.packages.values():
        for version in dict.fromkeys(release.version for release in package.release):
            rows[package.name, version] = {
                name: consider(catalogue, target, {package.name: version}) for name, target in catalogue.targets.items()
            }
    holds = {(name, *pinned) for name, target in catalogue.targets.items() for pinned in target.packages.items()}
    return Grid(tuple(catalogue.targets), rows, frozenset(holds))


def memory_limit() -> int:
    """Bytes of memory this process may use: the cgroup's limit (version 2 or 1) or the machine's, the smaller."""
    bounds = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        if Path(path).exists() and (text := Path(path).read_text().strip()).isdigit():
            bounds.append(int(text))
    return min(bounds)


def jobs(pin: Pin) -> int:
    """Compile jobs at a time: as many as there are cores, or as memory allows."""
    return max(1, min(len(os.sched_getaffinity(0)), memory_limit() // 2**20 // pin.build.mib_per_job))


def build_seconds(pin: Pin, target: Target) -> float:
    """How long building a pin takes on this machine.

    Of W seconds of work, L of them for the longest file, m jobs in any order take at most L + (W - L) / m (Graham,
    "Bounds on multiprocessing timing anomalies", 1969).
    """
    architectures = len(target.sm) if pin.build.compiler == "nvcc" else 1
    longest = pin.build.longest_seconds or pin.build.core_seconds
    return architectures * (longest + (pin.build.core_seconds - longest) / jobs(pin))


def show(chosen: Plan, cache: Cache) -> None:
    """Print the plan: steps, sources, patches, then disk, memory and time."""
    target = chosen.target
    cuda = "no CUDA" if target.cuda == "none" else f"CUDA {target.cuda}, sm {' '.join(target.sm)}"
    driver = f", driver {target.driver} or newer" if target.driver else ""
    said = f": Python {target.python}, {cuda}{driver}. {target.reason}."
    say(Text.assemble((target.name, "bold"), said))
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("step", "package", "what"):
        table.add_column(column, overflow="fold")
    table.add_column("cost", justify="right", no_wrap=True)
    for pin in chosen.pins:
        if pin.release.kind == "provided":
            table.add_row("base", pin.label, f"comes with {target.base.wheels.image}", "")
        else:
            table.add_row("fetch", pin.label, *_source(pin, cache))
    if chosen.lock:
        missing = sum(not _cached(cache, artifact.sha256) for artifact in chosen.lock.artifacts)
        state = f"{missing} to fetch" if missing else "cached"
        table.add_row(
            "fetch",
            f"{len(chosen.lock.artifacts)} dependencies",
            f"lock/{chosen.lock.path.name} ({state})",
            size(chosen.lock.bytes),
        )
    for pin in chosen.pins:
        for one in chosen.patches[pin.name]:
            table.add_row("patch", pin.label, escape(f"{one.path.name[:4]}: {one.summary}"), "")
    for pin in chosen.pins:
        if pin.release.kind == "source":
            compiler = "no compiler" if pin.build.compiler == "none" else f"{pin.build.compiler}, {jobs(pin)} jobs"
            table.add_row("build", pin.label, compiler, f"{round(build_seconds(pin, target) / 60, 1):g} min")
    if chosen.on_base:
        table.add_row("install", target.name, "onto the base's Python; what is replaced is uninstalled first", "")
    else:
        table.add_row("install", target.name, f"build/{target.name}/env, by hash", "")
    table.add_row("smoke", target.name, f"proves on {', '.join(target.proves_on)}", "1 min")
    console.print(table)
    for package, option in target.options.items():
        say(f"option: {package}: {option}")
    for image in target.base.unresolved:
        say(f"unresolved: the digest of {image} is not known; `nox -s lock -- {target.name}` asks its registry")
    _show_cost(chosen, cache)


def _source(pin: Pin, cache: Cache) -> tuple[str, str]:
    artifact = artifact_of(pin)
    if artifact is None:
        return f"{pin.release.repository}@{(pin.release.commit or '')[:12]}", ""
    state = " (cached)" if _cached(cache, artifact.sha256) else ""
    return f"{artifact.file}{state}", size(pin.release.mib.download * 2**20)


def _cached(cache: Cache, sha256: str) -> bool:
    return any((cache.root / "files" / sha256).glob("*"))


def _show_cost(chosen: Plan, cache: Cache) -> None:
    locked = chosen.lock.bytes if chosen.lock else 0
    download = sum(pin.release.mib.download for pin in chosen.pins) * 2**20 + locked
    installed = sum(pin.release.mib.installed for pin in chosen.pins) * 2**20 + 3 * locked
    built = [pin for pin in chosen.pins if pin.release.kind == "source"]
    peak = max((pin.build.mib_per_job * jobs(pin) for pin in built), default=0)
    whole = sum(build_seconds(pin, chosen.target) for pin in built) / 60 + 1 + download / 2**20 / 60 / 5  # at 5 MiB/s
    place = next(parent for parent in [cache.root, *cache.root.parents] if parent.exists())
    free = shutil.disk_usage(place).free
    say(
        f"disk {size(2 * download + 2 * installed)} (free: {size(free)}), of it {size(download)} to download; "
        f"peak memory {size(peak * 2**20)} (limit: {size(memory_limit())}); "
        f"about {whole:.0f} min cold on {len(os.sched_getaffinity(0))} cores"
    )
    if free < 2 * download + 2 * installed:
        lacking = (f"The disk of {place} is too small for a cold build", "bold")
        say(Text.assemble(lacking, ": set FUSEBOX_CACHE to another one."))
