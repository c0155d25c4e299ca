"""What a plan costs on this machine (jobs, time, memory, disk), and printing the plan with these costs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from recipes.catalogue.lock import artifact_of
from recipes.catalogue.plan import Plan
from recipes.catalogue.schema import Pin, Target
from recipes.make.cache import Cache
from recipes.progress import console, say, size


def memory_limit() -> int:
    """Bytes of memory this process may use: the cgroup's limit (version 2 or 1) or the machine's, the smaller."""
    bounds = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        if Path(path).exists() and (text := Path(path).read_text().strip()).isdigit():
            bounds.append(int(text))
    return min(bounds)


@dataclass(frozen=True)
class Machine:
    """What a machine gives a build: cores, and bytes of memory."""

    cores: int
    memory: int

    @classmethod
    def here(cls) -> Machine:
        """This machine, as far as this process may use it."""
        return cls(len(os.sched_getaffinity(0)), memory_limit())


def jobs(pin: Pin, machine: Machine | None = None) -> int:
    """Compile jobs at a time: as many as there are cores, if memory allows."""
    machine = machine or Machine.here()
    return max(1, min(machine.cores, machine.memory // 2**20 // pin.build.mib_per_job))


def build_seconds(pin: Pin, target: Target, machine: Machine | None = None) -> float:
    """How long building a pin takes on a machine (default: this one).

    Of W seconds of work, L of them for the longest file, m jobs in any order take at most L + (W - L) / m (Graham,
    "Bounds on multiprocessing timing anomalies", 1969).
    """
    architectures = len(pin.architectures(target)) if pin.build.compiler == "nvcc" else 1
    longest = pin.build.longest_seconds or pin.build.core_seconds
    return architectures * (longest + (pin.build.core_seconds - longest) / jobs(pin, machine))


def show(chosen: Plan, cache: Cache) -> None:
    """Print the plan: steps, sources, patches, then disk, memory and time."""
    target = chosen.target
    cuda = "no CUDA" if target.cuda == "none" else f"CUDA {target.cuda}, sm {' '.join(target.sm)}"
    driver = f", driver {target.driver} or newer" if target.driver else ""
    about = f": Python {target.python}, {cuda}{driver}. {target.reason}."
    say(Text.assemble((target.name, "bold"), about))
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("step", "package", "what"):
        table.add_column(column, overflow="fold")
    table.add_column("cost", justify="right", no_wrap=True)
    for step in _steps(chosen, cache):
        table.add_row(*step)
    console.print(table)
    left_out = {pin.name for pin in chosen.left_out}
    for package, option in target.options.items():
        if package not in left_out:
            say(f"option: {package}: {option}")
    for image in target.base.unresolved:
        say(f"unresolved: the digest of {image} is not known; `nox -s lock -- {target.name}` asks its registry")
    _show_cost(chosen, cache)


def _steps(chosen: Plan, cache: Cache) -> Iterator[tuple[str, str, str, str]]:
    """The lines of the plan, in order of execution: step, package, what is done, and what it costs."""
    target = chosen.target
    for pin in chosen.pins:
        if pin.release.kind == "provided":
            yield "base", pin.label, f"comes with {target.base.wheels.image}", ""
        else:
            yield ("fetch", pin.label, *_source(pin, cache))
    for pin in chosen.left_out:
        yield "leave out", pin.label, f"it {pin.release.reach}", ""
    if chosen.lock:
        missing = sum(not _cached(cache, artifact.sha256) for artifact in chosen.lock.artifacts)
        state = f"{missing} to fetch" if missing else "cached"
        yield (
            "fetch",
            f"{len(chosen.lock.artifacts)} dependencies",
            f"lock/{chosen.lock.path.name} ({state})",
            size(chosen.lock.bytes),
        )
    for pin in chosen.pins:
        for applied in chosen.patches[pin.name]:
            yield "patch", pin.label, escape(f"{applied.path.name[:4]}: {applied.summary}"), ""
    for pin in chosen.pins:
        if pin.release.kind == "source":
            compiler = "no compiler" if pin.build.compiler == "none" else f"{pin.build.compiler}, {jobs(pin)} jobs"
            yield "build", pin.label, compiler, f"{round(build_seconds(pin, target) / 60, 1):g} min"
    if chosen.on_base:
        yield "install", target.name, "onto the base's Python; what is replaced is uninstalled first", ""
    else:
        yield "install", target.name, f"build/{target.name}/env, by hash", ""
    yield "smoke", target.name, f"proves on {', '.join(target.proves_on)}", "1 min"


def _source(pin: Pin, cache: Cache) -> tuple[str, str]:
    artifact = artifact_of(pin)
    if artifact is None:
        return f"{pin.release.repository}@{(pin.release.commit or '')[:12]}", ""
    state = " (cached)" if _cached(cache, artifact.sha256) else ""
    return f"{artifact.file}{state}", size(pin.release.mib.download * 2**20)


def _cached(cache: Cache, sha256: str) -> int:
    """The bytes of a file in the cache; 0 if it is not there."""
    return sum(path.stat().st_size for path in (cache.root / "files" / sha256).glob("*"))


def disk(chosen: Plan) -> tuple[int, int]:
    """Bytes that a cold build of a plan downloads, and bytes that it takes on the disk in all."""
    locked = sum(lock.bytes for lock in (chosen.lock, chosen.toolkit_lock) if lock)
    download = sum(pin.release.mib.download for pin in chosen.pins) * 2**20 + locked
    installed = sum(pin.release.mib.installed for pin in chosen.pins) * 2**20 + 3 * locked
    return download, 2 * (download + installed)


def to_download(chosen: Plan, cache: Cache) -> int:
    """Bytes of a cold build's download that the cache lacks; a git repository counts whether it is there or not."""
    artifacts = [artifact for lock in (chosen.lock, chosen.toolkit_lock) if lock for artifact in lock.artifacts]
    cached = sum(_cached(cache, artifact.sha256) for artifact in artifacts)
    for pin in chosen.pins:
        artifact = artifact_of(pin)
        if artifact and _cached(cache, artifact.sha256):
            cached += pin.release.mib.download * 2**20
    return max(0, disk(chosen)[0] - cached)


def cold_minutes(chosen: Plan, machine: Machine | None = None) -> float:
    """How long a build without a cache takes on a machine (default: this one): to download at 5 MiB/s, to compile."""
    download, _ = disk(chosen)
    built = [pin for pin in chosen.pins if pin.release.kind == "source"]
    return sum(build_seconds(pin, chosen.target, machine) for pin in built) / 60 + 1 + download / 2**20 / 60 / 5


def _show_cost(chosen: Plan, cache: Cache) -> None:
    _, needed = disk(chosen)
    built = [pin for pin in chosen.pins if pin.release.kind == "source"]
    peak = max((pin.build.mib_per_job * jobs(pin) for pin in built), default=0)
    place = next(parent for parent in [cache.root, *cache.root.parents] if parent.exists())
    free = shutil.disk_usage(place).free
    say(
        f"disk {size(needed)} (free: {size(free)}), of it {size(to_download(chosen, cache))} to download; "
        f"peak memory {size(peak * 2**20)} (limit: {size(memory_limit())}); "
        f"about {cold_minutes(chosen):.0f} min cold on {len(os.sched_getaffinity(0))} cores"
    )
    if free < needed:
        lacking = (f"The disk of {place} is too small for a cold build", "bold")
        say(Text.assemble(lacking, ": set FUSEBOX_CACHE to another one."))
