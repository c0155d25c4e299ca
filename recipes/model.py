"""The data: targets, packages and releases, read from TOML, validated strictly, errors as one sentence.

A target names versions; a version is a release of a package, and a release is an identity (a sha256 or a commit),
the ranges it needs and how it is built. The TOML holds no conditionals; what differs is another release or a patch.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

ROOT = Path(__file__).resolve().parent.parent


class Refusal(Exception):
    """What cannot be done, as one sentence: what is wrong, where, and what to do next. Never shown as a traceback."""


def digest_of(value: object) -> str:
    """The sha256, in hexadecimal, of a JSON value in its canonical form."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def is_version(text: str) -> bool:
    """Whether a text is a version as PEP 440 has it."""
    try:
        Version(text)
    except InvalidVersion:
        return False
    return True


def _parsed_by(parse: Callable[[str], object], what: str) -> AfterValidator:
    """A validator that keeps a text which `parse` accepts (its errors are ValueErrors)."""

    def check(text: str) -> str:
        try:
            parse(text)
        except ValueError:
            raise ValueError(f'"{text}" is not {what}') from None
        return text

    return AfterValidator(check)


Specifier = Annotated[str, _parsed_by(SpecifierSet, 'a version range such as ">=2.0,<2.4"')]
CudaRange = Annotated[
    str, _parsed_by(lambda text: text == "none" or SpecifierSet(text), 'a version range such as ">=11.8", or "none"')
]
VersionText = Annotated[str, _parsed_by(Version, 'a version such as "2.8.3"')]
RequirementText = Annotated[str, _parsed_by(Requirement, 'a requirement such as "numpy>=1.17"')]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Commit = Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]
Text = Annotated[str, Field(min_length=1)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]  # of a folder, an image tag
Repository = Annotated[str, Field(pattern=r"^https://[^/]+(/\w[\w.-]*)+$")]
Variables = dict[Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")], Annotated[str, Field(pattern=r"^[^\x00-\x1f]*$")]]
MiB = Annotated[int, Field(ge=0, le=2**24)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$")]
Folder = Annotated[str, Field(pattern=r"^\w[\w.-]*(/\w[\w.-]*)*$")]  # inside a source tree


class Strict(BaseModel):
    """Frozen, no coercion, no unknown keys."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Image(Strict):
    """A base image: `digest` is "sha256:..." or "unresolved" where no registry has been asked yet.

    `apt` are the packages of its distribution that are installed on it.
    """

    image: Text
    digest: Annotated[str, Field(pattern=r"^(sha256:[0-9a-f]{64}|unresolved)$")]
    apt: list[Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.+-]+$")]] = []

    @property
    def reference(self) -> str:
        """NAME:TAG@DIGEST, or NAME:TAG while the digest is unresolved."""
        return self.image if self.digest == "unresolved" else f"{self.image}@{self.digest}"


class Base(Strict):
    """The images that a target's wheels are compiled on and that its environment runs on.

    `glibc` is the C library of the latter, where the target itself also runs on older ones.
    """

    wheels: Image
    runtime: Image
    glibc: Annotated[str, Field(pattern=r"^2\.\d+$")] | None = None

    @property
    def unresolved(self) -> list[str]:
        """The images whose digest nobody has asked for yet."""
        return list(dict.fromkeys(one.image for one in (self.wheels, self.runtime) if one.digest == "unresolved"))


class Target(Strict):
    """One environment: a CUDA/PyTorch pair and the packages in it.

    `glibc` is the oldest C library that runs it, `driver` the oldest branch of NVIDIA's, `sm` the GPU architectures
    compiled for ("9.0"), `cudnn` and `gcc` what its wheels base compiles against and with. `proves_on` is the hardware
    on which a skipped smoke test counts as failed; `options` says, by package, how one is limited here, and `variables`
    are set for whatever runs in it ("{site}" is its site-packages). `runner` is the label of the CI machine that
    builds, proves and publishes its image, `unpublished` why none does.
    """

    name: Name
    reason: Text
    python: Annotated[str, Field(pattern=r"^3\.\d+$")]
    cuda: Annotated[str, Field(pattern=r"^(none|\d+\.\d+)$")]
    glibc: Annotated[str, Field(pattern=r"^2\.\d+$")]
    driver: Annotated[str, Field(pattern=r"^\d+$")] | None = None
    cudnn: VersionText | None = None
    gcc: Annotated[str, Field(pattern=r"^\d+$")] | None = None
    sm: list[Annotated[str, Field(pattern=r"^\d+\.\d+$")]]
    proves_on: Annotated[list[Text], Field(min_length=1)]
    publish: bool
    unpublished: Text | None = None
    runner: Name | None = None
    base: Base
    packages: Annotated[dict[Text, VersionText], Field(min_length=1)]
    options: dict[Text, Text] = {}
    variables: dict[Annotated[str, Field(pattern=r"^[A-Z][A-Z0-9_]*$")], Text] = {}

    @model_validator(mode="after")
    def _options_are_of_its_packages(self) -> Self:
        if strangers := sorted(set(self.options) - set(self.packages)):
            raise ValueError(f'options names "{strangers[0]}", which is not one of its packages')
        return self

    @model_validator(mode="after")
    def _what_is_published_has_a_runner(self) -> Self:
        if self.publish and self.runner is None:
            raise ValueError('publish = true needs "runner", the label of the CI machine that builds and proves it')
        if self.publish == (self.unpublished is not None):
            raise ValueError('publish = false needs "unpublished", the reason, and publish = true has none')
        return self

    @property
    def marker_environment(self) -> dict[str, str]:
        """PEP 508 markers of the target, whatever Python runs the tool."""
        return {
            "python_version": self.python,
            "python_full_version": f"{self.python}.0",
            "implementation_name": "cpython",
            "implementation_version": f"{self.python}.0",
            "platform_python_implementation": "CPython",
            "sys_platform": "linux",
            "os_name": "posix",
            "platform_system": "Linux",
            "platform_machine": "x86_64",
            "extra": "",
        }

    def applies(self, requirement: Requirement) -> bool:
        """Whether the requirement's marker, if it has one, holds for this target."""
        if requirement.marker is None:
            return True
        return requirement.marker.evaluate(dict(self.marker_environment))


class Build(Strict):
    """How a package of kind "source" becomes a wheel.

    `requires` are distributions the build imports, `needs` packages of the target that are installed first, `env` its
    environment ("{sm}" and the like are filled in), `options` arguments of its setup.py. For one GPU architecture it
    takes a core `core_seconds`, of them `longest_seconds` for the longest file, which no second core shortens (by
    default all of it is that); `mib_per_job` is one job's memory.
    """

    requires: list[RequirementText] = []
    needs: list[Text] = []
    compiler: Literal["none", "c++", "nvcc"]
    core_seconds: Seconds
    longest_seconds: Seconds | None = None
    mib_per_job: Annotated[MiB, Field(gt=0)]
    env: Variables = {}
    options: list[Annotated[str, Field(pattern=r"^--\w[\w=-]*$")]] = []


class BuildChanges(Strict):
    """What one release builds otherwise than its package's [build] says."""

    compiler: Literal["none", "c++", "nvcc"] | None = None
    core_seconds: Seconds | None = None
    longest_seconds: Seconds | None = None
    options: list[Annotated[str, Field(pattern=r"^--\w[\w=-]*$")]] | None = None


class Size(Strict):
    """MiB to download and MiB installed."""

    download: MiB
    installed: MiB


class Submodule(Strict):
    """A git submodule: its path in the tree, its repository and commit; `without` are parts that no build reads."""

    path: Folder
    repository: Repository
    commit: Commit
    without: list[Folder] = []


class Source(Strict):
    """Where one version comes from, and what identifies it.

    A wheel or an sdist is a `file` and its `sha256`, found through pip's configured index or, if `index` is given, the
    publisher's own; a git source is `repository` and `commit` (and the `tag` that must still point there).
    `submodules` are all of the tree, also of submodules, but for those in `without`. `wheel_version` is the version
    that its metadata names, where that differs.
    """

    version: VersionText
    wheel_version: VersionText | None = None
    file: FileName | None = None
    sha256: Sha256 | None = None
    index: Annotated[str, Field(pattern=r"^https://")] | None = None
    repository: Repository | None = None
    commit: Commit | None = None
    tag: Text | None = None
    submodules: list[Submodule] = []
    without: list[Folder] = []

    @property
    def identity(self) -> str:
        """The sha256 or the commit; for what a base image provides, the version."""
        return self.sha256 or self.commit or self.version

    @property
    def metadata_version(self) -> str:
        """The version that the wheel calls itself."""
        return self.wheel_version or self.version

    @property
    def _is_file(self) -> bool:
        return self.file is not None and self.sha256 is not None

    @property
    def _is_git(self) -> bool:
        return self.repository is not None and self.commit is not None


class Obstacle(NamedTuple):
    """What a release needs, and what the target has instead."""

    need: str
    has: str

    def __str__(self) -> str:
        return f"{self.need}, and the target has {self.has}"


class Release(Source):
    """One pinned version of a package.

    `provided` comes with the base image. `python`, `torch` and `cuda` are the ranges it needs, `requires` its run-time
    dependencies, `subfolder` the part of the tree that is built, `build` what differs from the package's [build].
    """

    kind: Literal["source", "wheel", "provided"]
    subfolder: Folder | None = None
    python: Specifier = ""
    torch: Specifier = ""
    cuda: CudaRange = ""
    requires: list[RequirementText]
    env: Variables = {}
    build: BuildChanges = BuildChanges()
    mib: Size

    @model_validator(mode="after")
    def _has_one_identity(self) -> Self:
        file, git = self._is_file, self._is_git
        if self.kind == "wheel" and not (file and not git):
            raise ValueError('a release of kind "wheel" needs "file" and "sha256", and no "repository"')
        if self.kind == "source" and file == git:
            raise ValueError('a release of kind "source" needs either "file" and "sha256" or "repository" and "commit"')
        if self.kind == "provided" and (file or git):
            raise ValueError('a release of kind "provided" comes with the base image and has no source of its own')
        return self

    def obstacle(self, target: Target, torch: str | None) -> Obstacle | None:
        """Why this release cannot be in the target, or None. `torch` is the target's version of it."""
        if not SpecifierSet(self.python).contains(f"{target.python}.0"):
            return Obstacle(f"needs Python {self.python}", target.python)
        if self.torch and torch and not SpecifierSet(self.torch).contains(torch, prereleases=True):
            return Obstacle(f"needs torch {self.torch}", torch)
        if self.cuda == "none" and target.cuda != "none":
            return Obstacle("is built without CUDA", f"CUDA {target.cuda}")
        if self.cuda not in ("", "none") and target.cuda == "none":
            return Obstacle(f"needs CUDA {self.cuda}", "none")
        if self.cuda not in ("", "none") and not SpecifierSet(self.cuda).contains(target.cuda):
            return Obstacle(f"needs CUDA {self.cuda}", target.cuda)
        return None


class Package(Strict):
    """A distribution: what is imported, how it is built, which releases are pinned.

    `proved_on` are sources that no target has, on which the proofs of its patches run too.
    """

    name: Text
    module: Text
    summary: Text
    build: Build | None = None
    proved_on: list[Source] = []
    release: Annotated[list[Release], Field(min_length=1)]

    @model_validator(mode="after")
    def _sources_can_be_built(self) -> Self:
        if self.build is None and any(release.kind == "source" for release in self.release):
            raise ValueError('a release of kind "source" needs a [build] table')
        for release in [one for one in self.release if one.kind == "source"]:
            build = self.build_of(release)
            if (build.longest_seconds or 0) > build.core_seconds:
                raise ValueError(f"of {release.version} longest_seconds is a part of core_seconds, and is more")
        if unknown := [one.version for one in self.proved_on if one._is_file == one._is_git]:
            raise ValueError(f'proved_on {unknown[0]} needs either "file" and "sha256" or "repository" and "commit"')
        return self

    def build_of(self, release: Release) -> Build:
        """How one of its source releases is built; the model saw that it has a [build] table."""
        assert self.build is not None
        return self.build.model_copy(update=release.build.model_dump(exclude_none=True))


class Pin(Strict):
    """A package at one release, as a target uses it."""

    package: Package
    release: Release

    @property
    def name(self) -> str:
        return self.package.name

    @property
    def label(self) -> str:
        return f"{self.package.name} {self.release.version}"

    @property
    def build(self) -> Build:
        """How it is built; only a source release is asked."""
        return self.package.build_of(self.release)


class Limit(Strict):
    """`versions` of `package` need `needs`; `thread` is the report or the upstream file where that was learned."""

    package: Text
    versions: Specifier
    needs: Annotated[dict[Text, Specifier], Field(min_length=1)]
    reason: Text
    thread: Annotated[str, Field(pattern=r"^https://")]


class Limits(Strict):
    """limits.toml."""

    limit: list[Limit]


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
        """The target of that name; an unknown one is refused with the nearest known."""
        if name not in self.targets:
            raise Refusal(
                f"There is no target {name!r}{_nearest(name, self.targets)}; choose one of {', '.join(self.targets)}."
            )
        return self.targets[name]

    def pins(self, target: Target) -> list[Pin]:
        """The target's packages in the order in which they are built; a version that does not fit is refused."""
        torch = target.packages.get("torch")
        pins = {}
        for name, version in target.packages.items():
            where = f"{self.targets_file} [{target.name}.packages] {name}"
            if name not in self.packages:
                raise Refusal(f"{where}: no recipe{_nearest(name, self.packages)}; add recipes/packages/{name}.toml.")
            releases = [release for release in self.packages[name].release if release.version == version]
            if not releases:
                known = [release.version for release in self.packages[name].release]
                raise Refusal(
                    f"{where}: no release {version}{_nearest(version, known)}; add it to recipes/packages/{name}.toml."
                )
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
                f"recipes/packages: [build] needs go round in a circle: {' -> '.join(error.args[1])}; break it."
            ) from None


def what_if(target: Target, changes: Mapping[str, Any]) -> Target:
    """The target with other values, as an option of the command names them."""
    return validated(Target, {**target.model_dump(), **changes}, "the command line")


def substitutions(target: Target) -> dict[str, str]:
    """What "{...}" in a [build.env] value stands for."""
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
                    f"recipes/packages/{pin.name}.toml: {key} holds {{{name}}}{_nearest(name, known)}; "
                    f"choose one of {', '.join(known)}."
                )
        return _PLACEHOLDER.sub(lambda match: known[match[1]], text)

    return {key: value(key, text) for key, text in {**pin.build.env, **pin.release.env}.items()}


_Model = TypeVar("_Model", bound=BaseModel)


def read_text(path: Path) -> str:
    """A text file of the checkout, its line ends as they are; what cannot be read is refused with the place."""
    try:
        return path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise Refusal(f"{path} does not exist: run from a complete checkout of Fusebox.") from None
    except OSError as error:
        raise Refusal(f"{path} cannot be read ({error.strerror}): check that it is a file of yours.") from None
    except UnicodeDecodeError as error:
        raise Refusal(f"{path} is not UTF-8 (byte {error.start}): save it as UTF-8.") from None


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file; what cannot be read is refused with the place."""
    text = read_text(path)
    if text.startswith("\ufeff"):
        raise Refusal(f"{path} begins with a byte order mark: save it as UTF-8 without one.")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise Refusal(f"{path} is not valid TOML: {str(error).removesuffix('.')}; mend that line.") from None
    except RecursionError:
        raise Refusal(f"{path} is nested too deeply to be a recipe: flatten it.") from None
    except ValueError as error:  # an integer or a date that Python cannot hold
        raise Refusal(f"{path} is not valid TOML: {error}; mend that value.") from None


def _table(value: object, key: str, path: Path) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Refusal(f"{path}: {key} is {_kind(value)}, and every top-level key is a target: write a table [{key}].")
    if "name" in value:
        raise Refusal(f"{path}: {key}.name is not a known key, since [{key}] is the target's name: remove it.")
    return value


def validated(model: type[_Model], data: dict[str, Any], path: Path | str, *prefix: str) -> _Model:
    """The model, or a refusal for the first fault that names file and key."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        location = [*prefix, *fault["loc"]]
        key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).removeprefix(".")
        raise Refusal(f"{path}: {_fault(model, fault, key)}.") from None


def _fault(model: type[BaseModel], fault: Any, key: str) -> str:
    match fault["type"]:
        case "extra_forbidden":
            nearest = _nearest(str(fault["loc"][-1]), _fields(model, fault["loc"][:-1]))
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
    return next((found for inner in getattr(annotation, "__args__", ()) if (found := _inner_model(inner))), None)


def _kind(value: object) -> str:
    names = {str: "a string", int: "an integer", float: "a float", bool: "a boolean", list: "an array", dict: "a table"}
    return names.get(type(value), "a date or time")


def _nearest(word: str, known: Iterable[str]) -> str:
    match = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {match[0]!r}?)" if match else ""
