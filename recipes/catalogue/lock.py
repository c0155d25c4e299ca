"""Read a lock: the files of a target's dependencies, each by its sha256; and the file of a release."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from recipes.catalogue.schema import Pin, Source, Target, is_version
from recipes.errors import Refusal


@dataclass(frozen=True)
class Artifact:
    """A file to fetch: one that a release names, or (`file` None) that of a locked dependency which fits the target."""

    name: str
    version: str
    sha256: str
    file: str | None = None
    index: str | None = None

    @property
    def label(self) -> str:
        return f"{self.name} {self.version}"


def artifact_of(pin: Pin) -> Artifact | None:
    """The file of a release that is a wheel or an sdist."""
    return file_of(pin.name, pin.release)


def file_of(name: str, source: Source) -> Artifact | None:
    """The file of a source that is a wheel or an sdist."""
    if source.file is None or source.sha256 is None:
        return None
    return Artifact(name, source.metadata_version, source.sha256, source.file, source.index)


_LOCKED = re.compile(
    r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>\S+) --hash=sha256:(?P<sha256>[0-9a-f]{64})(  # (?P<bytes>\d+) bytes)?$"
)


def hashed_requirement(name: str, version: str, sha256: str) -> str:
    """The line of a requirements file that pins one file by its hash, as pip's `--require-hashes` needs it."""
    return f"{name}=={version} --hash=sha256:{sha256}"


def locked_names(path: Path) -> set[str]:
    """The distributions of a lock; a line that is none is left to `Lock.read` to refuse."""
    matches = map(_LOCKED.match, path.read_text(encoding="utf-8", errors="replace").splitlines())
    return {match["name"] for match in matches if match}


@dataclass(frozen=True)
class Lock:
    """A file of recipes/lock/, one wheel by sha256 each: TARGET.txt, every dependency of a target, or
    TARGET.toolkit.txt, what its CUDA toolkit has beside those.
    """

    path: Path
    sha256: str
    inputs: str
    artifacts: tuple[Artifact, ...]
    bytes: int

    @property
    def pins(self) -> list[tuple[str, str, str]]:
        """Name, version and sha256 of every file, in order of names: what the lock installs, without its comments."""
        return sorted((artifact.name, artifact.version, artifact.sha256) for artifact in self.artifacts)

    @classmethod
    def read(cls, path: Path, target: Target) -> Lock:
        """Parse a lock; a line that is not a locked requirement is refused with its number."""
        if not path.exists():
            raise Refusal(f"{path} does not exist: write it with `nox -s lock -- {target.name}`.")
        artifacts, total, inputs, content = [], 0, "", path.read_bytes()
        for number, line in enumerate(content.decode(errors="replace").splitlines(), 1):
            if line.startswith("# inputs: "):
                inputs = line.removeprefix("# inputs: ")
            if not line or line.startswith("#"):
                continue
            match = _LOCKED.match(line)
            if match is None or not is_version(match["version"]):
                raise Refusal(
                    f"{path}:{number}: {line[:60]!r} is not a locked requirement: write the file with `nox "
                    f"-s lock -- {target.name}`."
                )
            artifacts.append(Artifact(match["name"], match["version"], match["sha256"]))
            total += int(match["bytes"] or 0)
        return cls(path, hashlib.sha256(content).hexdigest(), inputs, tuple(artifacts), total)
