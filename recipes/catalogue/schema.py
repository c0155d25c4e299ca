"""The data: targets, packages and releases, read from TOML, validated strictly, with errors of one sentence.

A target names versions; a version is a release of a package, and a release is an identity (a sha256 or a commit),
the ranges it needs and how it is built. The TOML holds no conditionals; what differs is another release or a patch.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Annotated, Literal, NamedTuple, Self

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.tags import compatible_tags, cpython_tags
from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import InvalidVersion, Version
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from recipes.errors import suggestion


def is_version(text: str) -> bool:
    """Whether a text is a version by PEP 440."""
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


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(str(error)) from None


def _one_line(text: str) -> str:
    if not text.strip() or not text.isprintable():
        raise ValueError("it is not one line of text")
    return text


def _braces(*known: str) -> AfterValidator:
    """A validator that keeps a text whose braces are placeholders of these names."""

    def check(text: str) -> str:
        for name in re.findall(r"\{(\w+)\}", text):
            if name not in known:
                listed = ", ".join(f"{{{placeholder}}}" for placeholder in known)
                raise ValueError(f"it holds {{{name}}}{suggestion(name, known)}; choose one of {listed}")
        if re.search(r"[{}]", re.sub(r"\{\w+\}", "", text)):
            raise ValueError("it holds a brace that is not of a placeholder")
        return text

    return AfterValidator(check)


PLACEHOLDERS = ("sm", "sm_digits", "cuda", "site")  # what "{...}" may name in a [build.env] value

Specifier = Annotated[str, _parsed_by(SpecifierSet, 'a version range such as ">=2.0,<2.4"')]
CudaRange = Annotated[
    str, _parsed_by(lambda text: text == "none" or SpecifierSet(text), 'a version range such as ">=11.8", or "none"')
]
VersionText = Annotated[str, _parsed_by(Version, 'a version such as "2.8.3"')]
RequirementText = Annotated[str, _parsed_by(Requirement, 'a requirement such as "numpy>=1.17"')]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Commit = Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]
Pattern = Annotated[str, Field(min_length=1), _parsed_by(_compiled, "a regular expression")]
Text = Annotated[str, AfterValidator(_one_line)]
Distribution = Annotated[str, Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")]  # its normalized name
Module = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*$")]
Tag = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+/-]*$")]  # a git tag
Address = Annotated[str, Field(pattern=r"^https://[^\s/{}]+\.[^\s/{}]+(/[^\s{}]*)?$")]
Architecture = Annotated[str, Field(pattern=r"^\d+\.\d+$")]
Hardware = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9 -]*$")]
RESERVED = ("apt", "claims", "docs", "index", "site", "tool")  # what recipes/lock/ and build/ have beside targets
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]  # for folders and image tags
ImageName = Annotated[str, Field(pattern=r"^[\w.:/-]+$")]
Repository = Annotated[str, Field(pattern=r"^https://[^/]+(/\w[\w.-]*)+$")]
Variables = dict[
    Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")],
    Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]*$"), _braces(*PLACEHOLDERS)],
]
MiB = Annotated[int, Field(ge=0, le=2**24)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$")]
Header = Annotated[str, Field(pattern=r"^[a-z][\w/.-]*\.(h|hpp|cuh)$")]
Library = Annotated[str, Field(pattern=r"^\w[\w.+-]*$")]  # as passed to a linker: "cublas"
Folder = Annotated[str, Field(pattern=r"^\w[\w.-]*(/\w[\w.-]*)*$")]  # inside a source tree


class Strict(BaseModel):
    """Frozen, no coercion, no unknown keys."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Image(Strict):
    """A base image: `digest` is "sha256:..." or "unresolved" where no registry has been asked yet.

    `apt` are the packages of its distribution that are installed on it.
    """

    image: ImageName
    digest: Annotated[str, Field(pattern=r"^(sha256:[0-9a-f]{64}|unresolved)$")]
    apt: list[Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.+-]+$")]] = []

    @property
    def reference(self) -> str:
        """NAME:TAG@DIGEST, or NAME:TAG while the digest is unresolved."""
        return self.image if self.digest == "unresolved" else f"{self.image}@{self.digest}"


class Base(Strict):
    """The images that a target's wheels are compiled on and that its environment runs on.

    `glibc` is the C library of the runtime image, given only where the target also runs on older ones.
    """

    wheels: Image
    runtime: Image
    glibc: Annotated[str, Field(pattern=r"^2\.\d+$")] | None = None

    @property
    def unresolved(self) -> list[str]:
        """The images whose digest is not resolved yet."""
        return list(dict.fromkeys(image.image for image in (self.wheels, self.runtime) if image.digest == "unresolved"))


class Target(Strict):
    """One environment: a CUDA/PyTorch pair and the packages in it.

    `glibc` is the C library that every locked wheel has to run on, `driver` the oldest branch of NVIDIA's driver, `sm`
    the GPU architectures to compile for ("9.0"); `cudnn` and `gcc` are what its wheels base compiles against and with.
    `toolkit` is the version of the distribution cuda-toolkit whose wheels (lock/TARGET.toolkit.txt) compile it; without
    one, the CUDA toolkit of the base or the machine does. `proves_on` is the hardware on which a skipped smoke test
    counts as failed. `options` says, by package, how the target limits it, and `variables` are set for whatever runs in
    the target ("{site}" is its site-packages). `requires` are distributions that its users' programs take and none of
    its packages asks for. `runner` is the label of the CI machine that builds, proves and publishes its image;
    `unpublished` says why no machine does. `unproven_in_image` names the claims that a container cannot prove, each
    with the reason. `layers` bounds the sizes of an image's layers, in MiB as a registry has them.
    """

    name: Name
    reason: Text
    python: Annotated[str, Field(pattern=r"^3\.\d+$")]
    cuda: Annotated[str, Field(pattern=r"^(none|\d+\.\d+)$")]
    glibc: Annotated[str, Field(pattern=r"^2\.\d+$")]
    driver: Annotated[str, Field(pattern=r"^\d+$")] | None = None
    cudnn: VersionText | None = None
    gcc: Annotated[str, Field(pattern=r"^\d+$")] | None = None
    toolkit: VersionText | None = None
    sm: list[Architecture]
    proves_on: Annotated[list[Hardware], Field(min_length=1)]
    publish: bool
    unpublished: Text | None = None
    runner: Name | None = None
    base: Base
    packages: Annotated[dict[Distribution, VersionText], Field(min_length=1)]
    requires: list[RequirementText] = []
    options: dict[Text, Text] = {}
    unproven_in_image: dict[Text, Text] = {}
    layers: dict[Literal["cuda", "torch", "dependencies", "packages"], Annotated[float, Field(gt=0)]] = {}
    variables: dict[Annotated[str, Field(pattern=r"^[A-Z][A-Z0-9_]*$")], Annotated[Text, _braces("site")]] = {}

    @field_validator("name")
    @classmethod
    def _is_free(cls, name: str) -> str:
        if name in RESERVED:
            raise ValueError(f"{name} is something other than a target in recipes/lock/ or build/: choose another name")
        return name

    @model_validator(mode="after")
    def _options_are_of_its_packages(self) -> Self:
        if strangers := sorted(set(self.options) - set(self.packages)):
            raise ValueError(f'options names "{strangers[0]}", which is not one of its packages')
        return self

    @model_validator(mode="after")
    def _a_toolkit_is_of_its_cuda(self) -> Self:
        if self.toolkit and not f"{self.toolkit}.".startswith(f"{self.cuda}."):
            raise ValueError(f'toolkit "{self.toolkit}" is not of CUDA {self.cuda}')
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

    @property
    def platforms(self) -> list[str]:
        """The platform tags of wheels that run with the target's C library, the newest first."""
        newest = int(self.glibc.split(".")[1])
        older = ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"]
        return [f"manylinux_2_{minor}_x86_64" for minor in range(newest, 4, -1)] + older

    def takes(self, file: str) -> bool:
        """Whether a wheel runs in the target, by the tags in its name; a name that is no wheel's has none."""
        return _takes(file, self.python, tuple(self.platforms))

    def applies(self, requirement: Requirement) -> bool:
        """Whether the requirement's marker, if it has one, holds for this target."""
        if requirement.marker is None:
            return True
        return requirement.marker.evaluate(dict(self.marker_environment))


@cache  # the compatibility matrix asks the same question thousands of times
def _takes(file: str, python: str, platforms: tuple[str, ...]) -> bool:
    try:
        tags = parse_wheel_filename(file)[3]
    except (InvalidWheelFilename, InvalidVersion):
        return False
    version = tuple(map(int, python.split(".")))
    own = cpython_tags(version, platforms=platforms)
    return any(tag in tags for tag in own) or any(
        tag in tags for tag in compatible_tags(version, f"cp{version[0]}{version[1]}", platforms)
    )


class Build(Strict):
    """How a package of kind "source" becomes a wheel.

    `requires` are distributions the build imports, `needs` packages of the target that are installed first, `env` its
    environment ("{sm}" and the like are filled in), `options` arguments of its setup.py. For one GPU architecture it
    takes a core `core_seconds`, of them `longest_seconds` for the longest file, which no second core shortens (by
    default all of it is that); `mib_per_job` is one job's memory.
    """

    requires: Annotated[list[RequirementText], Field(min_length=1)]
    needs: list[Distribution] = []
    compiler: Literal["none", "c++", "nvcc"]
    core_seconds: Seconds
    longest_seconds: Seconds | None = None
    mib_per_job: Annotated[MiB, Field(gt=0)]
    env: Variables = {}
    options: list[Annotated[str, Field(pattern=r"^--\w[\w=-]*$")]] = []


class BuildChanges(Strict):
    """How the build of one release differs from its package's [build]."""

    compiler: Literal["none", "c++", "nvcc"] | None = None
    core_seconds: Seconds | None = None
    longest_seconds: Seconds | None = None
    options: list[Annotated[str, Field(pattern=r"^--\w[\w=-]*$")]] | None = None


class Size(Strict):
    """MiB to download and MiB installed."""

    download: MiB
    installed: MiB


class Submodule(Strict):
    """A git submodule: its path in the tree, its repository and commit; `without` lists parts that no build reads."""

    path: Folder
    repository: Repository
    commit: Commit
    without: list[Folder] = []


class Source(Strict):
    """Where one version comes from, and what identifies it.

    A wheel or an sdist is a `file` and its `sha256`, found through pip's configured index or, if `index` is given, the
    publisher's own; a git source is `repository` and `commit` (and the `tag` that must still point there).
    `submodules` are all submodules of the tree, nested ones included, except those in `without`. `wheel_version` is
    the version in the wheel's metadata, where that differs.
    """

    version: VersionText
    wheel_version: VersionText | None = None
    file: FileName | None = None
    sha256: Sha256 | None = None
    index: Address | None = None
    repository: Repository | None = None
    commit: Commit | None = None
    tag: Tag | None = None
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

    `provided` comes with the base image. `python`, `torch` and `cuda` are the ranges it needs, `sm` the only GPU
    architectures that it has kernels for, `requires` the run-time dependencies that its metadata names, `undeclared`
    those that it leaves out, `subfolder` the part of the tree that is built, `build` what differs from the package's
    [build], `parallel_extensions` the variable that tells its setup.py how many extensions to build at a time; without
    it, each waits for the one before.
    """

    kind: Literal["source", "wheel", "provided"]
    subfolder: Folder | None = None
    python: Specifier = ""
    torch: Specifier = ""
    cuda: CudaRange = ""
    sm: list[Architecture] = []
    requires: list[RequirementText]
    undeclared: list[RequirementText] = []
    env: Variables = {}
    build: BuildChanges = BuildChanges()
    parallel_extensions: Annotated[str, Field(pattern=r"^[A-Z][A-Z0-9_]*$")] | None = None
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

    @property
    def needs(self) -> list[str]:
        """Its run-time dependencies, whether its metadata names them or not."""
        return [*self.requires, *self.undeclared]

    @property
    def reach(self) -> str:
        """What `sm` says of a release that names GPU architectures."""
        return f"has kernels for sm {', '.join(self.sm)} only"

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
        if self.sm and not set(self.sm) & set(target.sm):
            return Obstacle(self.reach, f"sm {', '.join(target.sm) or 'none'}")
        return None

    def unfit(self, target: Target, torch: str | None) -> Obstacle | None:
        """The same, and whether its wheel's tags are of another Python or of a newer C library."""
        obstacle = self.obstacle(target, torch)
        if obstacle is None and self.kind == "wheel" and not target.takes(str(self.file)):
            return Obstacle(f"is {self.file}", f"Python {target.python} and glibc {target.glibc}")
        return obstacle


class Package(Strict):
    """A distribution: what is imported, how it is built, which releases are pinned.

    `proved_on` are sources that no target has, on which the proofs of its patches run too. `headers` and `libraries`
    are what compiling it (or against it, as against torch) takes from the CUDA toolkit: one that lacks them is refused.
    """

    name: Text
    module: Module
    summary: Text
    build: Build | None = None
    proved_on: list[Source] = []
    headers: list[Header] = []
    libraries: list[Library] = []
    release: Annotated[list[Release], Field(min_length=1)]

    @model_validator(mode="after")
    def _sources_can_be_built(self) -> Self:
        if self.build is None and any(release.kind == "source" for release in self.release):
            raise ValueError('a release of kind "source" needs a [build] table')
        for release in [source for source in self.release if source.kind == "source"]:
            build = self.build_of(release)
            if (build.longest_seconds or 0) > build.core_seconds:
                raise ValueError(f"release {release.version}: longest_seconds is more than core_seconds")
        if unknown := [source.version for source in self.proved_on if source._is_file == source._is_git]:
            raise ValueError(f'proved_on {unknown[0]} needs either "file" and "sha256" or "repository" and "commit"')
        return self

    def build_of(self, release: Release) -> Build:
        """How one of its source releases is built; validation guarantees the [build] table."""
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

    def architectures(self, target: Target) -> list[str]:
        """The GPU architectures of the target that it has kernels for."""
        return [sm for sm in target.sm if not self.release.sm or sm in self.release.sm]


class Limit(Strict):
    """`versions` of `package` need `needs`; `thread` is the report or the upstream file where that was learned.

    A need is a range, or "none" of what cannot be installed beside the package. It is a need of what is there; where
    `required` is true, a target without that is refused too. `symptom` is a pattern in the text of the error that
    follows where the limit is broken all the same.
    """

    package: Text
    versions: Specifier
    needs: Annotated[dict[Text, CudaRange], Field(min_length=1)]
    reason: Text
    thread: Address
    required: bool = False
    symptom: Pattern | None = None


class Tried(Strict):
    """`versions` of `package` were built, run or published `beside` these ranges; a version outside is not refused."""

    package: Text
    versions: Specifier
    beside: Annotated[dict[Text, Specifier], Field(min_length=1)]
    thread: Address


class Built(Strict):
    """`versions` of `package` were published as builds of these `labels`, such as the cu121 of 2.1.2+cu121."""

    package: Text
    versions: Specifier
    labels: Annotated[list[Text], Field(min_length=1)]
    thread: Address


class BaseFacts(Strict):
    """What base images have whose names begin or end with one of `images`."""

    images: Annotated[list[Text], Field(min_length=1)]
    cudnn: VersionText | None = None
    gcc: Annotated[str, Field(pattern=r"^\d+$")] | None = None


class Symptom(Strict):
    """A `pattern` in an error text such as `example`, its `cause` and `fix`; `thread` is a report of it.

    In both, "{1}" and "{2}" stand for the pattern's groups, and "{package}" for the package that did not build.
    `versions` are the ranges for which the cause holds, of the same things as a limit's. A `general` symptom speaks
    only where no other one does.
    """

    pattern: Pattern
    example: Annotated[str, Field(min_length=1)]  # has several lines if the pattern spans them
    cause: Text
    fix: Text
    thread: Annotated[str, Field(pattern=r"^https://")]
    versions: dict[Text, Specifier] = {}
    general: bool = False


class Symptoms(Strict):
    """symptoms.toml."""

    symptom: list[Symptom]


class Limits(Strict):
    """limits.toml. `releases` are the versions that exist, of packages whose every version no recipe lists.

    `independent` are packages that need no particular version of each other.
    """

    independent: list[Distribution] = []
    limit: list[Limit]
    tried: list[Tried] = []
    built: list[Built] = []
    base: list[BaseFacts] = []
    releases: dict[Distribution, list[VersionText]] = {}
