"""Begin a recipe from what the package index has, or a target from another one; what nobody can know is left out.

What is left out is told at once, as a refusal of the finished file would name it.
"""

from __future__ import annotations

import json
import math
import re
import tarfile
import tomllib
import zipfile
from pathlib import Path, PurePosixPath
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from recipes.catalogue.load import Catalogue, missing_keys
from recipes.catalogue.schema import Package, Target
from recipes.errors import Refusal, suggestion
from recipes.files import read_text, write_text
from recipes.make import metadata
from recipes.make.bump import inline
from recipes.make.cache import Cache
from recipes.make.fetch import Downloads, wheels_for
from recipes.progress import Steps

COMPILED = {"nvcc": (".cu", ".cuh"), "c++": (".cpp", ".cc", ".cxx", ".c", ".pyx")}  # the first match counts
Table = dict[str, Any]


def package(
    catalogue: Catalogue, name: str, version: str, target: str, from_source: bool, cache: Cache, steps: Steps
) -> tuple[Path, list[str]]:
    """Write recipes/packages/NAME.toml for a release; returns its path and what is left to do, a line each."""
    path = catalogue.root / "recipes" / "packages" / f"{name}.toml"
    if path.exists():
        raise Refusal(f"{path} is there already: raise its pin with `nox -s bump`, or add a [[release]] to it by hand.")
    file = _published(catalogue.target(target), name, version, from_source, cache, steps)
    described = metadata.metadata(file)
    if canonicalize_name(described["Name"] or name) != name:
        raise Refusal(f"{file.name} calls itself {described['Name']}: check the name.")
    summary = "".join(char if char.isprintable() else " " for char in described["Summary"] or "")
    head = {"module": _module(file), "summary": summary or None}
    build = None if file.suffix == ".whl" else _build(catalogue, file)
    release = _release(file, version, described)
    text = _toml(head, build, release)
    missing = missing_keys(Package, {"name": name, **tomllib.loads(text)}, path)
    write_text(path, text)
    todo = [f"add to {path}: {', '.join(missing)}"] if missing else []
    todo.append(
        "add where it needs them: cuda (the range of CUDA versions), headers and libraries (of the CUDA toolkit)"
        + (", [build.env] and options (what its setup.py reads)" if build else "")
    )
    return path, todo


def _published(target: Target, name: str, version: str, from_source: bool, cache: Cache, steps: Steps) -> Path:
    """The wheel of a release for the target; its sdist where that is asked for, or where no wheel fits."""
    downloads = Downloads(cache, steps, None, target)
    links = downloads.of_release(name, version)
    if not from_source and any(map(wheels_for(target), links)):
        return downloads.choose(name, version)
    fit = f"Python {target.python} and glibc {target.glibc}"
    sdist = next((link.filename for link in links if link.filename.endswith(".tar.gz")), None)
    if sdist is None:
        no_wheel, other = ("", "") if from_source else (f" and no wheel for {fit}", ", or another target with --target")
        raise Refusal(f"{name} {version} has no sdist{no_wheel}: choose another version{other}.")
    if not from_source:
        steps.say("todo", f"{name} {version}", f"no wheel for {fit}: it is to be built from its sdist")
    return downloads.published(name, version, sdist)


def _module(file: Path) -> str | None:
    """The one module or package at the top of a wheel; None where there are several, and of an sdist."""
    if file.suffix != ".whl":
        return None
    modules = set()
    with zipfile.ZipFile(file) as archive:
        for name in archive.namelist():
            top, *below = PurePosixPath(name).parts
            if not top.endswith((".dist-info", ".data")) and re.search(r"\.(py|so)$", name):
                modules.add(top if below else top.partition(".")[0])
    modules -= {"test", "tests", "docs", "examples"}
    return modules.pop() if len(modules) == 1 else None


def _build(catalogue: Catalogue, sdist: Path) -> Table:
    """What an sdist says of its build: what that imports, and by the files in it the compiler."""
    with tarfile.open(sdist) as tar:
        project = metadata.of_sdist(tar, "pyproject.toml")
        suffixes = {PurePosixPath(name).suffix for name in tar.getnames()}
    try:
        system = tomllib.loads(project.decode()).get("build-system", {})
        named = {canonicalize_name(Requirement(text).name): text for text in system.get("requires", ["setuptools"])}
    except (ValueError, AttributeError, TypeError, InvalidRequirement) as error:
        raise Refusal(f"{sdist.name}: its pyproject.toml cannot be read ({error}): write the recipe by hand.") from None
    compiler = next((name for name, those in COMPILED.items() if suffixes & set(those)), "none")
    recipes = catalogue.root / "recipes" / "packages"
    ours = {str(name) for name in named if (recipes / f"{name}.toml").exists()}
    ours |= {"torch"} if compiler == "nvcc" else set()
    requires = [text for name, text in named.items() if name not in ours]
    return {"requires": requires, "needs": sorted(ours), "compiler": compiler}


def _release(file: Path, version: str, described: Any) -> Table:
    """The [[release]] of a file."""
    wheel = file.suffix == ".whl"
    dynamic = {value.lower() for value in described.get_all("Dynamic", [])}
    # A wheel that lists no requirements has none; those of an sdist may be known only after its build.
    requires = metadata.requires(described) or ([] if wheel else None)
    torch = next(
        (
            requirement
            for requirement in map(Requirement, requires or [])
            if canonicalize_name(requirement.name) == "torch"
        ),
        None,
    )
    mib: Table = {"download": _mib(file.stat().st_size)}
    if wheel:
        with zipfile.ZipFile(file) as archive:
            mib["installed"] = _mib(sum(info.file_size for info in archive.infolist()))
    return {
        "version": version,
        "kind": "wheel" if wheel else "source",
        "file": file.name,
        "sha256": file.parent.name,
        "python": _python(file, described["Requires-Python"] or "") or None,
        "torch": str(torch.specifier) if torch and str(torch.specifier) else None,
        "requires": None if "requires-dist" in dynamic else requires,
        "mib": mib,
    }


def _python(file: Path, declared: str) -> str:
    """The range of Python that a file is for: by its metadata, and for a wheel by its tags."""
    tags = parse_wheel_filename(file.name)[3] if file.suffix == ".whl" else ()
    ranges = {declared} - {""}
    for tag in tags:
        if match := re.fullmatch(r"cp3(\d+)", tag.interpreter):
            ranges = ranges | {f">=3.{match[1]}"} if tag.abi == "abi3" else {f"==3.{match[1]}.*"}
    return ",".join(sorted(ranges))


def _mib(count: int) -> int:
    return math.ceil(count / 2**20)


def _toml(head: Table, build: Table | None, release: Table) -> str:
    """The recipe as it is written; keys without a value are left out."""
    lines = _lines(head)
    if build is not None:
        lines += ["", "[build]", *_lines(build)]
    return "\n".join([*lines, "", "[[release]]", *_lines(release)]) + "\n"


def _lines(table: Table) -> list[str]:
    lines = []
    for key, value in table.items():
        if key == "requires" and value and len(inline(value)) > 100:
            lines += [f"{key} = [", *(f"  {json.dumps(item, ensure_ascii=False)}," for item in value), "]"]
        elif value is not None:
            text = json.dumps(value, ensure_ascii=False) if isinstance(value, str) else inline(value)
            lines.append(f"{key} = {text}")
    return lines


# --- a target


def target(catalogue: Catalogue, name: str, like: str, without: list[str], reason: str | None) -> list[str]:
    """Add the table of a target like another one to recipes/targets.toml; returns what is left to do, a line each."""
    other, path = catalogue.target(like), catalogue.targets_file
    if name in catalogue.targets:
        raise Refusal(f"{path} has a target {name} already: choose another name.")
    if strangers := [package for package in without if package not in other.packages]:
        nearest = suggestion(strangers[0], other.packages)
        raise Refusal(f"--without {strangers[0]}: target {like} has no such package{nearest}; remove the option.")
    text = read_text(path)
    added = _copied(text, name, like, without, reason)
    whole = f"{text.rstrip()}\n\n{added}"
    try:
        table = tomllib.loads(whole)[name]
    except (ValueError, LookupError) as error:
        raise Refusal(f"{path}: the table [{like}] cannot be copied ({error}): write [{name}] by hand.") from None
    remaining = {package: version for package, version in other.packages.items() if package not in without}
    if table.get("packages") != remaining:
        raise Refusal(f"{path}: [{like}.packages] is not one package a line: write [{name}] by hand.")
    missing = missing_keys(Target, {"name": name, **table}, path, name)
    write_text(path, whole)
    return [
        *([f"add to {path}: {', '.join(missing)}"] if missing else []),
        f"change what differs from {like}: python, cuda, sm, glibc, proves_on, the base images, the versions",
        f"then run `nox -s plan -- {name}` and `nox -s lock -- {name}`",
    ]


def _copied(text: str, name: str, like: str, without: list[str], reason: str | None) -> str:
    """The tables of a target under another name, unpublished, without these packages.

    With fewer packages it has layers of other sizes, so their bounds are left out.
    """
    quoted = name if re.fullmatch(r"[\w-]+", name) else json.dumps(name)
    left_out = {
        ".": ["reason", "publish", "unpublished", "runner"],
        ".packages": without,
        ".options": without,
    }
    lines: list[str] = []
    within = ""  # the part of the target that a line belongs to, or nothing
    for line in text.splitlines():
        if header := re.match(r'\["?(?P<target>[^"\]]+?)"?(?P<part>\.\w+)?\]', line):
            bounds = header["part"] == ".layers" and without
            within = (header["part"] or ".") if header["target"] == like and not bounds else ""
            if within:
                lines += ["", f"[{quoted}{header['part'] or ''}]"]
                if within == ".":
                    lines += [f"reason = {json.dumps(reason, ensure_ascii=False)}"] if reason else []
            continue
        key = re.match(r'\s*"?([^"=\s]+)"?\s*=', line)
        if within and key and key[1] not in left_out.get(within, ()):
            lines.append(line)
            if within == "." and key[1] == "proves_on":
                lines += ["publish = false", 'unpublished = "nobody has proved it yet"']
    return "\n".join(lines).strip() + "\n"
