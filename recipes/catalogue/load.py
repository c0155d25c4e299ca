"""The data of a checkout, read and validated: a fault is one sentence that names file and key."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, TypeVar

from packaging.requirements import Requirement
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version
from pydantic import BaseModel, ValidationError

from recipes.catalogue.limits import FACTS
from recipes.catalogue.lock import locked_names
from recipes.catalogue.schema import PLACEHOLDERS, Limit, Limits, Package, Pin, Target
from recipes.errors import Refusal, suggestion
from recipes.files import ROOT, read_toml


class Catalogue:
    """All data of one checkout: `root` holds recipes/, patches/ and smoke_tests/."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root
        self._parts: dict[str, Any] = {}
        self.targets: dict[str, Target] = self._part("targets")

    @property
    def targets_file(self) -> Path:
        return self.root / "recipes" / "targets.toml"

    @property
    def limits_file(self) -> Path:
        return self.root / "recipes" / "limits.toml"

    @property
    def packages(self) -> dict[str, Package]:
        """Every package that has a recipe, by distribution name."""
        packages: dict[str, Package] = self._part("packages")
        return packages

    @cached_property
    def learned(self) -> Limits:
        """All of recipes/limits.toml; a row that names what nothing else names is refused, since it would be dead."""
        learned: Limits = self._part("limits")
        self._check_names(learned)
        return learned

    @property
    def limits(self) -> list[Limit]:
        """The learned limits of recipes/limits.toml."""
        return self.learned.limit

    def _part(self, name: str) -> Any:
        """One part of the data, read once. If it is refused, the other parts are read too, to report all faults."""
        if isinstance(self._read(name), Refusal):
            parts = [self._read(part) for part in ("targets", "packages", "limits")]
            raise Refusal.of_all([part for part in parts if isinstance(part, Refusal)])
        return self._parts[name]

    def _read(self, name: str) -> Any:
        """A part, or the refusal of it."""
        if name not in self._parts:
            read = {"targets": self._targets, "packages": self._packages, "limits": self._limits}[name]
            try:
                self._parts[name] = read()
            except Refusal as refusal:
                self._parts[name] = refusal
        return self._parts[name]

    def _targets(self) -> dict[str, Target]:
        tables = read_toml(self.targets_file)
        if not tables:
            raise Refusal(f"{self.targets_file} declares no target: add a table such as [cpu].")
        unquoted = [name for key, table in tables.items() for name in _unquoted(key, table)]
        if unquoted:
            names = list(dict.fromkeys(unquoted))
            raise Refusal(
                f"{self.targets_file}: [{names[0]}] is read as tables inside one another, since a dot separates "
                f'their names: write ["{names[0]}"], with the quotes' + _others(names[1:]) + "."
            )
        return _each(
            tables,
            lambda name: validated(
                Target,
                {"name": name, **_table(tables[name], name, self.targets_file)},
                self.targets_file,
                name,
            ),
        )

    def _packages(self) -> dict[str, Package]:
        paths = {path.stem: path for path in sorted((self.root / "recipes" / "packages").glob("*.toml"))}
        return _each(paths, lambda name: self._package(paths[name]))

    def _limits(self) -> Limits:
        return validated(Limits, read_toml(self.limits_file), self.limits_file)

    def _check_names(self, learned: Limits) -> None:
        """Refuse a row of limits.toml that names a distribution or a fact which nothing else of the checkout names."""
        known = {*FACTS, *learned.releases, *self.packages}
        for package in self.packages.values():
            wanted = [text for release in package.release for text in release.needs]
            wanted += package.build.requires if package.build else []
            known |= {canonicalize_name(Requirement(text).name) for text in wanted}
        locks = self.root / "recipes" / "lock"
        if not all((locks / f"{name}.txt").exists() for name in self.targets):
            return  # `docker build` has only its target's lock, and some rows name packages of other locks
        for path in locks.glob("*.txt"):
            known |= locked_names(path)
        rows = [(f"limit[{at}]", row, row.needs) for at, row in enumerate(learned.limit)]
        rows += [(f"tried[{at}]", row, row.beside) for at, row in enumerate(learned.tried)]  # type: ignore[misc]
        faults = [
            Refusal(
                f"{self.limits_file}: {place} ({row.package} {row.versions}) names {name}, which no recipe, lock or "
                f"list of [releases] has{suggestion(name.lower(), known)}: correct it, or list its versions there."
            )
            for place, row, things in rows
            for name in (row.package, *things)
            if name not in known
        ]
        if faults:
            raise Refusal.of_all(faults)

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
        pins = _each(target.packages, lambda name: self._pin(target, name))
        _each(pins, lambda name: self._check_pin(target, pins[name], pins))
        return [pins[name] for name in self._build_order(pins)]

    def _pin(self, target: Target, name: str) -> Pin:
        """The release of a package that the target names and that fits it."""
        torch, version = target.packages.get("torch"), target.packages[name]
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
                f"{where}: {len(fitting)} releases {version} fit; narrow their ranges in recipes/packages/{name}.toml."
            )
        if not fitting:
            raise Refusal(
                f"{where}: {name} {version} {releases[0].obstacle(target, torch)}; choose another version or target."
            )
        return Pin(package=self.packages[name], release=fitting[0])

    def _check_pin(self, target: Target, pin: Pin, pins: Mapping[str, Pin]) -> None:
        self._check_requirements(target, pin, pins)
        if pin.release.kind == "wheel":
            _check_wheel_name(target, pin)

    def _check_requirements(self, target: Target, pin: Pin, pins: Mapping[str, Pin]) -> None:
        for requirement in map(Requirement, pin.release.needs):
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
        name, version, _, _ = parse_wheel_filename(file)
    except (InvalidWheelFilename, InvalidVersion) as error:
        raise Refusal(f"{where}: {file} is not the name of a wheel ({error}): correct it.") from None
    if (name, version) != (pin.name, Version(pin.release.metadata_version)):
        raise Refusal(f"{where}: {file} is a wheel of {name} {version}: correct the file or the version.")
    if not target.takes(file):
        raise Refusal(
            f"{where}: {file} does not fit target {target.name} (Python {target.python}, x86-64, glibc "
            f"{target.glibc}): choose another file or target."
        )


def what_if(target: Target, changes: Mapping[str, Any]) -> Target:
    """The target with other values, named by a command-line option."""
    return validated(Target, {**target.model_dump(), **changes}, "the command line")


def substitutions(pin: Pin, target: Target) -> dict[str, str]:
    """The values that replace "{...}" in a [build.env] value."""
    architectures = ";".join(pin.architectures(target))
    # {site}, the site-packages of the build environment, is known only once that environment is made.
    values = (architectures, architectures.replace(".", ""), target.cuda, "{site}")
    return dict(zip(PLACEHOLDERS, values, strict=True))


def build_environment(pin: Pin, target: Target) -> dict[str, str]:
    """The variables of the package's build: [build.env], then the release's own, with "{...}" filled in."""
    known = substitutions(pin, target)
    return {
        key: re.sub(r"\{(\w+)\}", lambda match: known[match[1]], text)
        for key, text in {**pin.build.env, **pin.release.env}.items()
    }


_Model = TypeVar("_Model", bound=BaseModel)
_Value = TypeVar("_Value")


def _each(names: Iterable[str], make: Callable[[str], _Value]) -> dict[str, _Value]:
    """Apply a function to each name, and raise all refusals together."""
    made, refusals = {}, []
    for name in names:
        try:
            made[name] = make(name)
        except Refusal as refusal:
            refusals.append(refusal)
    if refusals:
        raise Refusal.of_all(refusals)
    return made


def _unquoted(key: str, table: object) -> Iterator[str]:
    """The names that a target written without quotes was meant to have: [cu12.4-torch2.6] is cu12, 4-torch2, then 6."""
    if isinstance(table, dict) and table and not set(table) & set(Target.model_fields):
        for name, inner in table.items():
            if isinstance(inner, dict):
                path = f"{key}.{name}"
                yield from [path] if set(inner) & set(Target.model_fields) else _unquoted(path, inner)


def _others(names: list[str]) -> str:
    return f", and so for {', '.join(names)}" if names else ""


def _table(value: object, key: str, path: Path) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Refusal(f"{path}: {key} is {_kind(value)}, and every top-level key is a target: write a table [{key}].")
    if "name" in value:
        raise Refusal(f"{path}: {key}.name is not a known key, since [{key}] is the target's name: remove it.")
    return value


def validated(model: type[_Model], data: dict[str, Any], path: Path | str, *prefix: str) -> _Model:
    """The validated model; all faults are refused together, each with its file and key."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        faults = error.errors(include_url=False)
        message = f"{path}: {'; also, '.join(_faults(model, faults, prefix))}."
        if all(fault["type"] == "missing" for fault in faults):
            raise Incomplete(message, [_key(*prefix, *fault["loc"]) for fault in faults]) from None
        raise Refusal(message) from None


class Incomplete(Refusal):
    """Keys are missing, and nothing else is wrong."""

    def __init__(self, message: str, keys: list[str]) -> None:
        super().__init__(message)
        self.keys = keys


def _faults(model: type[BaseModel], faults: list[Any], prefix: tuple[str, ...]) -> Iterator[str]:
    """What is wrong, key by key. Missing keys are reported together, unless another key misspells them."""
    unknown = [fault for fault in faults if fault["type"] == "extra_forbidden"]
    mistyped = {(*fault["loc"][:-1], nearest) for fault in unknown if (nearest := _nearest(model, fault["loc"]))}
    absent = [fault["loc"] for fault in faults if fault["type"] == "missing" and fault["loc"] not in mistyped]
    missing = [_key(*prefix, *location) for location in absent]
    if len(missing) > 1:
        yield f"{', '.join(missing[:-1])} and {missing[-1]} are missing: add them"
    elif missing:
        yield f"{missing[0]} is missing: add it"
    for fault in faults:
        if fault["type"] != "missing":
            yield _fault(model, fault, prefix)


def missing_keys(model: type[BaseModel], data: dict[str, Any], path: Path, *prefix: str) -> list[str]:
    """The keys that a draft lacks, as a refusal would name them; any other fault is refused."""
    try:
        validated(model, data, path, *prefix)
    except Incomplete as incomplete:
        return incomplete.keys
    return []


def _key(*location: int | str) -> str:
    """The place of a key in a file: release[0].mib.installed."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).removeprefix(".")


def _fault(model: type[BaseModel], fault: Any, prefix: tuple[str, ...]) -> str:
    location, value = fault["loc"], fault["input"]
    is_of_key = location[-1:] == ("[key]",)  # a key that the file itself defines, such as a variable's name
    key = _key(*prefix, *(location[:-1] if is_of_key else location))
    match fault["type"]:
        case "extra_forbidden":
            nearest = _nearest(model, location)
            known = f" (did you mean {nearest!r}?)" if nearest else ""
            return f"{key} is not a known key{known}: remove or rename it"
        case "string_pattern_mismatch":
            pattern = fault["ctx"]["pattern"]
            subject = f"the name of {key}" if is_of_key else f"{key} is {json.dumps(value)[:80]}, which"
            return f"{subject} does not match {pattern}: correct it"
        case "value_error":
            return f"{key or 'the file'}: {fault['ctx']['error']}; correct it"
        case _:
            return f"{key} is {_kind(value)}: {fault['msg'][0].lower()}{fault['msg'][1:]}; correct it"


def _nearest(model: type[BaseModel], location: tuple[int | str, ...]) -> str | None:
    """The known key that is nearest to the unknown one at that place."""
    match = difflib.get_close_matches(str(location[-1]), list(_fields(model, location[:-1])), n=1)
    return match[0] if match else None


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
