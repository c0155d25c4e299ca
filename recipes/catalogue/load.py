"""The data of a checkout, read and validated: a fault is one sentence that names file and key."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, TypeVar

from packaging.requirements import Requirement
from packaging.tags import compatible_tags, cpython_tags
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version
from pydantic import BaseModel, ValidationError

from recipes.catalogue.schema import Limit, Limits, Package, Pin, Target
from recipes.errors import Refusal
from recipes.files import ROOT, read_toml


class Catalogue:
    """All data of one checkout: `root` holds recipes/, patches/ and smoke_tests/."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root
        self.targets = {
            name: validated(Target, {"name": name, **_table(table, name, self.targets_file)}, self.targets_file, name)
            for name, table in read_toml(self.targets_file).items()
        }
        if not self.targets:
            raise Refusal(f"{self.targets_file} declares no target: add a table such as [cpu].")

    @property
    def targets_file(self) -> Path:
        return self.root / "recipes" / "targets.toml"

    @cached_property
    def packages(self) -> dict[str, Package]:
        """Every package that has a recipe, by distribution name."""
        return {path.stem: self._package(path) for path in sorted((self.root / "recipes" / "packages").glob("*.toml"))}

    @cached_property
    def limits(self) -> list[Limit]:
        """All rows of recipes/limits.toml."""
        path = self.root / "recipes" / "limits.toml"
        return validated(Limits, read_toml(path), path).limit

    def _package(self, path: Path) -> Package:
        if canonicalize_name(path.stem) != path.stem:
            raise Refusal(
                f"{path} is not named after its distribution: rename it to {canonicalize_name(path.stem)}.toml."
            )
        data = read_toml(path)
        if "name" in data:
            raise Refusal(f"{path}: name is not a known key, since the file's own name is the package's: remove it.")
        return validated(Package, {"name": path.stem, **data}, path)

    def target(self, name: str) -> Target:
        """The target of that name; an unknown name is refused with the nearest known name."""
        if name not in self.targets:
            raise Refusal(
                f"There is no target {name!r}{suggestion(name, self.targets)}; choose one of {', '.join(self.targets)}."
            )
        return self.targets[name]

    def pins(self, target: Target) -> list[Pin]:
        """The target's packages in the order in which they are built; a version that does not fit is refused."""
        torch = target.packages.get("torch")
        pins = {}
        for name, version in target.packages.items():
            where = f"{self.targets_file} [{target.name}.packages] {name}"
            if name not in self.packages:
                raise Refusal(f"{where}: no recipe{suggestion(name, self.packages)}; add recipes/packages/{name}.toml.")
            releases = [release for release in self.packages[name].release if release.version == version]
            if not releases:
                known = [release.version for release in self.packages[name].release]
                nearest = suggestion(version, known)
                raise Refusal(f"{where}: no release {version}{nearest}; add it to recipes/packages/{name}.toml.")
            fitting = [release for release in releases if release.obstacle(target, torch) is None]
            if len(fitting) > 1:
                raise Refusal(
                    f"{where}: {len(fitting)} releases {version} fit; narrow their ranges in "
                    f"recipes/packages/{name}.toml."
                )
            if not fitting:
                raise Refusal(
                    f"{where}: {name} {version} {releases[0].obstacle(target, torch)}; choose another "
                    "version or target."
                )
            pins[name] = Pin(package=self.packages[name], release=fitting[0])
        for pin in pins.values():
            self._check_requirements(target, pin, pins)
            if pin.release.kind == "wheel":
                _check_wheel_name(target, pin)
            if pin.release.kind == "source":
                build_environment(pin, target)
        return [pins[name] for name in self._build_order(pins)]

    def _check_requirements(self, target: Target, pin: Pin, pins: Mapping[str, Pin]) -> None:
        for requirement in map(Requirement, pin.release.requires):
            other = pins.get(canonicalize_name(requirement.name))
            if (
                other
                and target.applies(requirement)
                and not requirement.specifier.contains(other.release.version, prereleases=True)
            ):
                raise Refusal(
                    f"{pin.label} needs {requirement.name}{requirement.specifier}, and target "
                    f"{target.name} has {other.label}: "
                    f"change one of them in {self.targets_file}."
                )

    def _build_order(self, pins: Mapping[str, Pin]) -> Iterable[str]:
        needs = {name: pin.package.build.needs if pin.package.build else [] for name, pin in pins.items()}
        for name, wanted in needs.items():
            for missing in sorted(set(wanted) - set(pins)):
                raise Refusal(
                    f"recipes/packages/{name}.toml: [build] needs {missing!r}, which the target does not "
                    "have; add it there."
                )
        try:
            return list(TopologicalSorter(needs).static_order())
        except CycleError as error:
            raise Refusal(
                f"recipes/packages: [build] needs form a circle: {' -> '.join(error.args[1])}; break it."
            ) from None


def _check_wheel_name(target: Target, pin: Pin) -> None:
    """Refuse a wheel whose name says that it is another package or version, or is for another Python or machine."""
    file, where = str(pin.release.file), f"recipes/packages/{pin.name}.toml: release {pin.release.version}"
    try:
        name, version, _, tags = parse_wheel_filename(file)
    except (InvalidWheelFilename, InvalidVersion) as error:
        raise Refusal(f"{where}: {file} is not the name of a wheel ({error}): correct it.") from None
    if (name, version) != (pin.name, Version(pin.release.metadata_version)):
        raise Refusal(f"{where}: {file} is a wheel of {name} {version}: correct the file or the version.")
    python = tuple(map(int, target.python.split(".")))
    fitting = {*cpython_tags(python, platforms=target.platforms)}
    fitting |= {*compatible_tags(python, f"cp{python[0]}{python[1]}", target.platforms)}
    if not tags & fitting:
        raise Refusal(
            f"{where}: {file} does not fit target {target.name} (Python {target.python}, x86-64, glibc "
            f"{target.glibc}): choose another file or target."
        )


def what_if(target: Target, changes: Mapping[str, Any]) -> Target:
    """The target with other values, named by a command-line option."""
    return validated(Target, {**target.model_dump(), **changes}, "the command line")


def substitutions(target: Target) -> dict[str, str]:
    """The values that replace "{...}" in a [build.env] value."""
    return {
        "sm": ";".join(target.sm),
        "sm_digits": ";".join(sm.replace(".", "") for sm in target.sm),
        "cuda": target.cuda,
        "site": "{site}",  # the build environment's site-packages, known when it is made
    }


_PLACEHOLDER = re.compile(r"\{(\w+)\}")


def build_environment(pin: Pin, target: Target) -> dict[str, str]:
    """The variables of the package's build: [build.env], then the release's own, with "{...}" filled in."""
    known = substitutions(target)

    def value(key: str, text: str) -> str:
        for name in _PLACEHOLDER.findall(text):
            if name not in known:
                raise Refusal(
                    f"recipes/packages/{pin.name}.toml: {key} holds {{{name}}}{suggestion(name, known)}; "
                    f"choose one of {', '.join(known)}."
                )
        return _PLACEHOLDER.sub(lambda match: known[match[1]], text)

    return {key: value(key, text) for key, text in {**pin.build.env, **pin.release.env}.items()}


_Model = TypeVar("_Model", bound=BaseModel)


def _table(value: object, key: str, path: Path) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Refusal(f"{path}: {key} is {_kind(value)}, and every top-level key is a target: write a table [{key}].")
    if "name" in value:
        raise Refusal(f"{path}: {key}.name is not a known key, since [{key}] is the target's name: remove it.")
    return value


def validated(model: type[_Model], data: dict[str, Any], path: Path | str, *prefix: str) -> _Model:
    """The validated model; the first fault is refused with its file and key."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        faults = error.errors(include_url=False)
        missing = [_key(*prefix, *fault["loc"]) for fault in faults if fault["type"] == "missing"]
        if faults[0]["type"] == "missing" and len(missing) > 1:
            listed = f"{', '.join(missing[:-1])} and {missing[-1]}"
            raise Refusal(f"{path}: {listed} are missing: add them.") from None
        raise Refusal(f"{path}: {_fault(model, faults[0], _key(*prefix, *faults[0]['loc']))}.") from None


def missing_keys(model: type[BaseModel], data: dict[str, Any], path: Path, *prefix: str) -> list[str]:
    """The keys that a draft lacks, as a refusal would name them; any other fault is refused."""
    try:
        model.model_validate(data)
    except ValidationError as error:
        faults = error.errors(include_url=False)
        if other := next((fault for fault in faults if fault["type"] != "missing"), None):
            raise Refusal(f"{path}: {_fault(model, other, _key(*prefix, *other['loc']))}.") from None
        return [_key(*prefix, *fault["loc"]) for fault in faults]
    return []


def _key(*location: int | str) -> str:
    """The place of a key in a file: release[0].mib.installed."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).removeprefix(".")


def _fault(model: type[BaseModel], fault: Any, key: str) -> str:
    match fault["type"]:
        case "extra_forbidden":
            nearest = suggestion(str(fault["loc"][-1]), _fields(model, fault["loc"][:-1]))
            return f"{key} is not a known key{nearest}: remove or rename it"
        case "missing":
            return f"{key} is missing: add it"
        case "string_pattern_mismatch":
            pattern = fault["ctx"]["pattern"]
            return f"{key} is {json.dumps(fault['input'])[:80]}, which does not match {pattern}: correct it"
        case "value_error":
            return f"{key or 'the file'}: {fault['ctx']['error']}; correct it"
        case _:
            return f"{key} is {_kind(fault['input'])}: {fault['msg'][0].lower()}{fault['msg'][1:]}; correct it"


def _fields(model: Any, location: Iterable[int | str]) -> Iterator[str]:
    """The keys known at that place of the model, to suggest the nearest one."""
    for part in location:
        if isinstance(part, str) and hasattr(model, "model_fields") and part in model.model_fields:
            model = _inner_model(model.model_fields[part].annotation)
    yield from getattr(model, "model_fields", {})


def _inner_model(annotation: Any) -> Any:
    if hasattr(annotation, "model_fields"):
        return annotation
    return next((model for inner in getattr(annotation, "__args__", ()) if (model := _inner_model(inner))), None)


def _kind(value: object) -> str:
    names = {str: "a string", int: "an integer", float: "a float", bool: "a boolean", list: "an array", dict: "a table"}
    return names.get(type(value), "a date or time")


def suggestion(word: str, known: Iterable[str]) -> str:
    match = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {match[0]!r}?)" if match else ""
