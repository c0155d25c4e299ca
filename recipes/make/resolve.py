"""Write recipes/lock/TARGET.txt: the packages' requirements, resolved for the target's Python to one file each.

uv resolves over pip's configured index; each version is then the one wheel that fits the target, by its sha256.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from recipes.catalogue import limits
from recipes.catalogue.load import Catalogue
from recipes.catalogue.lock import Lock, hashed_requirement
from recipes.catalogue.plan import Plan
from recipes.errors import Refusal
from recipes.files import digest_of, read_toml, sha256_of, write_text
from recipes.make import environment
from recipes.make.cache import Cache
from recipes.make.fetch import Downloads
from recipes.progress import Steps

TOOL_PYTHON = "3.11"  # the oldest that runs the tool
# Extras of the distribution cuda-toolkit, besides those that torch requires: the compiler and headers.
EXTRAS = ("cccl", "crt", "nvcc", "nvvm", "profiler")


def _declared(plan: Plan) -> Iterator[tuple[str, list[str]]]:
    """What the target and each recipe require to be locked, with a label for who requires it."""
    yield f"target {plan.target.name}", plan.target.requires
    for pin in plan.declared:
        yield pin.label, [*pin.release.needs, *(pin.build.requires if pin.release.kind == "source" else [])]


def requirements(plan: Plan) -> list[str]:
    """The requirements of a target's environment beside its packages: to run, to build and to be smoke-tested."""
    groups = read_toml(plan.root / "pyproject.toml")["dependency-groups"]
    wanted = {"pip", *groups["smoke"], *(text for _, texts in _declared(plan) for text in texts)}
    own = {pin.name for pin in plan.declared}
    parsed = [Requirement(text) for text in wanted]
    needed = [
        requirement
        for requirement in parsed
        if canonicalize_name(requirement.name) not in own and plan.target.applies(requirement)
    ]
    return sorted(str(requirement) for requirement in needed)


def inputs(plan: Plan) -> str:
    """The hash of everything that decides a lock; a lock whose header has another hash is out of date."""
    kept_to = limits.constraints(Catalogue(plan.root).limits, plan.target)
    own = sorted(pin.name for pin in plan.declared)
    return digest_of([requirements(plan), kept_to, plan.target.python, plan.target.glibc, own])


def check(plan: Plan) -> None:
    """Refuse a lock that no longer fits: name the requirement that it does not meet, or else the hash of its header."""
    if plan.lock is None:
        return
    _check_requirements(plan, plan.lock)
    versions = [(artifact.name, artifact.version) for artifact in plan.lock.artifacts]
    expected = [(plan.lock, inputs(plan), "the requirements, the limits, Python or glibc")]
    if plan.toolkit:
        expected.append((plan.toolkit, toolkit_inputs(plan, versions), "the toolkit or the target's own lock"))
    for lock, digest, what in expected:
        if lock.inputs != digest:
            raise Refusal(
                f"{lock.path} is out of date: {what} changed after it was written (its line `# inputs:`); write the "
                f"lock again with `nox -s lock -- {plan.target.name}`."
            )


def _check_requirements(plan: Plan, lock: Lock) -> None:
    """Refuse a lock that lacks what a recipe requires, or has a version of it that the recipe does not allow."""
    versions = {canonicalize_name(artifact.name): artifact.version for artifact in lock.artifacts}
    own = {pin.name for pin in plan.declared}
    for label, texts in _declared(plan):
        for requirement in filter(plan.target.applies, map(Requirement, texts)):
            name = canonicalize_name(requirement.name)
            has = versions.get(name)
            listed = f"{name} {has}" if has else f"no {name}"
            if name in own or (has and requirement.specifier.contains(has, prereleases=True)):
                continue
            raise Refusal(
                f"{lock.path} has {listed}, and {label} needs {requirement}: "
                f"write the lock again with `nox -s lock -- {plan.target.name}`."
            )


def toolkit_inputs(plan: Plan, locked: list[tuple[str, str]]) -> str:
    """The same of a toolkit's lock, which keeps to the versions of the target's lock."""
    return digest_of([_toolkit(plan), sorted(locked)])


def _toolkit(plan: Plan) -> str:
    """The requirement on the wheels of the target's CUDA toolkit."""
    return f"cuda-toolkit[{','.join(EXTRAS)}]=={plan.target.toolkit}"


def write(plan: Plan, cache: Cache, steps: Steps, upgrade: bool = False) -> Path:
    """Resolve, download and hash; the lock is only replaced once all of it is known.

    A version that the lock has stays as long as it fits; `upgrade` takes the newest ones.
    """
    downloads = Downloads(cache, steps, None, plan.target)
    kept_to = limits.constraints(Catalogue(plan.root).limits, plan.target)
    with steps.step("lock", f"{plan.target.name}: resolve {len(requirements(plan))} requirements"):
        earlier = None if upgrade else plan.lock
        locked = _resolve(plan, downloads, requirements(plan), kept_to, earlier)
        toolkit = []
        if plan.target.toolkit:  # its wheels match the environment's versions but are kept apart from it
            pinned = [f"{name}=={version}" for name, version in locked]
            earlier = None if upgrade else plan.toolkit_lock
            beside = _resolve(plan, downloads, [_toolkit(plan)], pinned, earlier)
            toolkit = [artifact for artifact in beside if artifact not in locked]
    path = plan.root / "recipes" / "lock" / f"{plan.target.name}.txt"
    text = _text(plan, downloads, f"the dependencies of {plan.target.name}", inputs(plan), locked)
    if plan.target.toolkit:
        about = f"the CUDA toolkit of {plan.target.name}"
        toolkit_text = _text(plan, downloads, about, toolkit_inputs(plan, locked), toolkit)
        write_text(path.with_suffix(".toolkit.txt"), toolkit_text)
    write_text(path, text)
    return path


def tool_inputs(root: Path) -> str:
    """The hash of everything that decides the lock of the tool's own environment in an image."""
    return digest_of([_tool(root), TOOL_PYTHON])


def _tool(root: Path) -> list[str]:
    """The requirements of the tool, and of what an image takes from its environment."""
    groups = read_toml(root / "pyproject.toml")["dependency-groups"]
    return sorted([*groups["tool"], *groups["image"]])


def write_tool(catalogue: Catalogue, cache: Cache, steps: Steps, upgrade: bool = False) -> Path:
    """Write recipes/lock/tool.txt: every distribution of the tool's environment in an image, by all its files' hashes.

    The stage `sources` takes the file that fits its Python. `upgrade` as in `write`.
    """
    downloads = Downloads(cache, steps, None, catalogue.targets["cpu"])
    wanted, path = _tool(catalogue.root), catalogue.root / "recipes" / "lock" / "tool.txt"
    with steps.step("lock", f"the tool: resolve {len(wanted)} requirements"), cache.scratch("lock") as scratch:
        earlier = "" if upgrade or not path.exists() else path.read_text(encoding="utf-8")
        options = ["--generate-hashes", "--python-version", TOOL_PYTHON, "--python-platform", "x86_64-manylinux_2_36"]
        done = _compile(downloads, scratch, wanted, options, earlier)
    if done.returncode != 0:
        raise _unresolved("tool", done.stderr, "the groups tool and image in pyproject.toml")
    about = "# Written by `nox -s lock -- tool`: the tool's own environment in an image, by the hashes of all files.\n"
    write_text(path, f"{about}# inputs: {tool_inputs(catalogue.root)}\n{done.stdout}")
    return path


def _compile(
    downloads: Downloads, scratch: Path, wanted: list[str], options: list[str], earlier: str
) -> subprocess.CompletedProcess[str]:
    """`uv pip compile` over pip's configured index, of wheels alone; uv keeps the `earlier` versions that still fit."""
    settings, given, output = downloads.settings, scratch / "in.txt", scratch / "out.txt"
    given.write_text("\n".join(wanted) + "\n")
    output.write_text(earlier)
    command = ["pip", "compile", str(given), "--output-file", str(output), "--no-header", "--no-annotate"]
    command += ["--only-binary", ":all:", *options]
    command += [f"--find-links={link}" for link in settings.find_links if "://" not in link]
    command += [f"--extra-index-url={index}" for index in settings.indexes[1:] if not index.startswith("file:")]
    command += [f"--index-url={index}" for index in settings.indexes[:1]]
    command += [] if settings.indexes else ["--no-index"]
    return environment.run_uv(downloads.cache, *command)


def _text(plan: Plan, downloads: Downloads, about: str, follows_from: str, resolved: list[tuple[str, str]]) -> str:
    """The text of a lock: its target, the hash of what decides it, and each wheel."""
    lines = [
        f"# Written by `nox -s lock -- {plan.target.name}`: {about}, one wheel each,",
        f"# for Python {plan.target.python} and glibc {plan.target.glibc} or newer.",
        f"# inputs: {follows_from}",
    ]
    for name, version in resolved:
        path = downloads.choose(name, version)
        lines.append(f"{hashed_requirement(name, version, sha256_of(path))}  # {path.stat().st_size} bytes")
    return "\n".join(lines) + "\n"


def _resolve(
    plan: Plan, downloads: Downloads, wanted: list[str], kept_to: list[str], earlier: Lock | None
) -> list[tuple[str, str]]:
    """The names and versions to which requirements resolve under constraints: the earlier versions if they fit."""
    with downloads.cache.scratch("lock") as scratch:
        # A dependency on one of the target's own packages is met by the target, never by the index.
        (scratch / "own.txt").write_text("".join(f"{pin.name}; sys_platform == 'never'\n" for pin in plan.declared))
        (scratch / "constraints.txt").write_text("".join(f"{constraint}\n" for constraint in kept_to))
        options = ["--constraints", str(scratch / "constraints.txt"), "--overrides", str(scratch / "own.txt")]
        options += ["--python-version", plan.target.python]
        options += ["--python-platform", f"x86_64-manylinux_{plan.target.glibc.replace('.', '_')}"]
        versions = "".join(f"{each.name}=={each.version}\n" for each in (earlier.artifacts if earlier else ()))
        done = _compile(downloads, scratch, wanted, options, versions)
    if done.returncode != 0:
        raise _unresolved(plan.target.name, done.stderr, "the ranges in the recipes")
    pinned = [re.match(r"^([A-Za-z0-9._-]+)==([^ ;]+)", line) for line in done.stdout.splitlines() if line.strip()]
    return [(canonicalize_name(match[1]), match[2]) for match in pinned if match]


def _unresolved(name: str, message: str, wrong: str) -> Refusal:
    """The sentence for uv's message if it resolves nothing; `wrong` names the data to correct."""
    reason = " ".join(message.split())
    if re.search(r"Failed to fetch|error sending request", reason):
        return Refusal(
            f"{name}: pip's configured index cannot be reached ({reason[:200]}): check the network and "
            "`pip config list`."
        )
    return Refusal(f"{name}: the requirements do not resolve ({reason[:400]}): correct {wrong}.")
