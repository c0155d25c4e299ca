"""What installs a target's collected wheels with exactly the dependencies that they were proved beside.

requirements.txt names versions and hashes: pip and uv take the files from any index or folder that has them.
pylock.toml (PEP 751) names the place of each file, and is written where the places are known.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name
from pydantic import BaseModel, ConfigDict

from recipes.catalogue.lock import Artifact, artifact_of, hashed_requirement
from recipes.catalogue.schema import FileName, Sha256
from recipes.files import write_text
from recipes.make.environment import Wheel
from recipes.make.fetch import Downloads


class Dependency(BaseModel):
    """A file that a target's environment has beside its collected wheels; `url` is None where no index was asked."""

    model_config = ConfigDict(strict=True, frozen=True)

    name: str
    version: str
    file: FileName
    sha256: Sha256
    size: int
    url: str | None


def dependencies(
    locked: list[tuple[Artifact, Path]], wheels: list[Wheel], ours: set[str], downloads: Downloads, *, places: bool
) -> list[Dependency]:
    """The locked files, and the releases that come as wheels and are not among `ours`, as upstream published them.

    `places`: ask pip's configured index for the URL of each.
    """
    files = list(locked)
    for wheel in wheels:
        if wheel.pin.name not in ours and wheel.pin.release.kind == "wheel" and (artifact := artifact_of(wheel.pin)):
            files.append((artifact, downloads.file(artifact) if wheel.record else wheel.path))
    published = [
        Dependency(
            name=canonicalize_name(artifact.name),
            version=artifact.version,
            file=path.name,
            sha256=artifact.sha256,
            size=path.stat().st_size,
            url=downloads.place(artifact, path.name) if places else None,
        )
        for artifact, path in files
    ]
    return sorted(published, key=lambda dependency: dependency.name)


def write(
    into: Path, target: str, python: str, own: Sequence[tuple[Mapping[str, Any], str]], beside: list[Dependency]
) -> None:
    """Write requirements.txt, and pylock.toml where all places are known. `own` are rows of the list of collected
    wheels, each with its URL or its path from that folder.
    """
    write_text(into / "requirements.txt", requirements(target, [row for row, _ in own], beside))
    if lock := pylock(python, own, beside):
        write_text(into / "pylock.toml", lock)


def requirements(target: str, own: Iterable[Mapping[str, Any]], beside: Iterable[Dependency]) -> str:
    """The text of requirements.txt."""
    lines = [hashed_requirement(row["package"], row["version"], row["sha256"]) for row in own]
    lines += [hashed_requirement(dependency.name, dependency.version, dependency.sha256) for dependency in beside]
    head = f"# Target {target} of Fusebox: its wheels, and what they were proved beside.\n--only-binary :all:\n"
    return head + "".join(f"{line}\n" for line in sorted(lines))


def pylock(python: str, own: Iterable[tuple[Mapping[str, Any], str]], beside: Iterable[Dependency]) -> str | None:
    """The text of pylock.toml; None where a dependency's URL is not known."""
    wheels = [(str(row["package"]), str(row["version"]), row["file"], place, row) for row, place in own]
    for dependency in beside:
        if dependency.url is None:
            return None
        wheels.append((dependency.name, dependency.version, dependency.file, dependency.url, dependency.model_dump()))
    parts = [
        'lock-version = "1.0"\n'
        f"environments = [{json.dumps(_marker(python))}]\n"
        f'requires-python = "=={python}.*"\n'
        'created-by = "fusebox"\n'
    ]
    for name, version, file, place, row in sorted(wheels, key=lambda wheel: wheel[0]):
        where = "url" if "://" in place else "path"
        parts.append(
            "\n[[packages]]\n"
            f"name = {json.dumps(name)}\n"
            f"version = {json.dumps(version)}\n"
            "\n[[packages.wheels]]\n"
            f"name = {json.dumps(file)}\n"
            f"{where} = {json.dumps(place)}\n"
            f"size = {row['size']}\n"
            f'hashes = {{ sha256 = "{row["sha256"]}" }}\n'
        )
    return "".join(parts)


def _marker(python: str) -> str:
    return f"sys_platform == 'linux' and platform_machine == 'x86_64' and python_version == '{python}'"
