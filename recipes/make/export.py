"""Take built wheels to another machine: each is a folder KEY/ with its record, checked on both sides."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.errors import Refusal
from recipes.files import digest_of, disk_named, put, sha256_of
from recipes.make import audit
from recipes.make.cache import Cache

ELSEWHERE = ("compiler", "base")  # the inputs that may differ for a wheel compiled elsewhere


def export_wheels(cache: Cache, into: Path) -> int:
    """Copy every built wheel with its record to INTO/KEY/, and return how many there are."""
    folders = sorted(path.parent for path in cache.root.glob("wheels/*/wheel.json"))
    if into.exists() and not into.is_dir():
        raise Refusal(f"{into} is not a folder: choose another place.")
    for folder in folders:
        if cache.wheel(folder.name) is None:
            raise Refusal(
                f"{folder} does not hold the bytes that its record names: build that wheel again, then export."
            )
        with disk_named(into):
            into.mkdir(parents=True, exist_ok=True)
            if not (into / folder.name).exists():
                partial = into / f".{folder.name}.{os.getpid()}"
                try:
                    shutil.copytree(folder, partial)
                    put(partial, into / folder.name)
                finally:
                    shutil.rmtree(partial, ignore_errors=True)
    return len(folders)


def import_wheels(cache: Cache, source: Path) -> int:
    """Import wheels that `export_wheels` wrote; each is checked by key, hash and CPU before any is kept."""
    folders = sorted(path.parent for path in source.glob("*/wheel.json"))
    if not folders:
        raise Refusal(f"{source} holds no exported wheels (KEY/wheel.json): choose a folder that `cache export` wrote.")
    for folder in folders:
        check_exported(folder)
    for folder in folders:
        with cache.scratch("import") as scratch:
            shutil.copytree(folder, scratch / folder.name)
            put(scratch / folder.name, cache.root / "wheels" / folder.name)
    return len(folders)


def check_exported(folder: Path) -> dict[str, Any]:
    """The record of a folder KEY/ of exported wheels; a folder that differs from its record or its name is refused."""
    record = record_in(folder)
    inputs, wheel, sha256 = record["inputs"], folder / record["file"], record["sha256"]
    label = inputs["package"]
    if digest_of(inputs) != folder.name:
        raise Refusal(f"{label}: {folder} is not named after its inputs: export it again.")
    if not wheel.is_file() or (actual := sha256_of(wheel)) != sha256:
        raise Refusal(
            f"{label}: {wheel} {f'has sha256 {actual}' if wheel.is_file() else 'is missing'}, and its "
            f"record says {sha256}: export it again."
        )
    if "wheel" not in inputs:  # else repacked: its objects are those of the publisher's wheel, whose hash is in the key
        for extension in audit.extensions(wheel):
            audit.refuse_unportable(label, extension)
    return record


def record_in(folder: Path) -> dict[str, Any]:
    """The record of the wheel in a folder KEY/: its inputs, file and sha256."""
    try:
        record: dict[str, Any] = json.loads((folder / "wheel.json").read_text(encoding="utf-8"))
        texts = (record["inputs"]["package"], record["file"], record["sha256"])
        if not all(isinstance(text, str) for text in texts) or (folder / record["file"]).parent != folder:
            raise ValueError("the wheel lies elsewhere")
    except (OSError, ValueError, KeyError, TypeError):
        raise Refusal(f"{folder}/wheel.json is not the record of a wheel: export it again.") from None
    return record


@dataclass(frozen=True)
class Exported:
    """A folder of exported wheels, which serve instead of compiling.

    With `elsewhere`, a wheel also serves if only its compiler and base differ; it keeps its own key.
    """

    folder: Path
    elsewhere: bool = False

    def serving(self, label: str, inputs: Mapping[str, Any]) -> tuple[Path, dict[str, Any]] | None:
        """The folder KEY/ of the wheel that serves for these inputs, and its record, both checked."""
        exact = self.folder / digest_of(inputs)
        chosen = exact if (exact / "wheel.json").exists() else self._made_elsewhere(label, inputs)
        return (chosen, check_exported(chosen)) if chosen else None

    def _made_elsewhere(self, label: str, inputs: Mapping[str, Any]) -> Path | None:
        """The wheel whose inputs differ in its compiler and base alone, if that may serve; several are refused."""
        if not self.elsewhere:
            return None
        wanted = {key: value for key, value in inputs.items() if key not in ELSEWHERE}
        fitting = []
        for path in sorted(self.folder.glob("*/wheel.json")):
            theirs = record_in(path.parent)["inputs"]
            if {key: value for key, value in theirs.items() if key not in ELSEWHERE} == wanted:
                fitting.append(path.parent)
        if len(fitting) > 1:
            raise Refusal(
                f"{label}: {len(fitting)} exported wheels differ in compiler or base alone "
                f"({', '.join(folder.name[:12] for folder in fitting)}): remove all but one of them from the folder."
            )
        return fitting[0] if fitting else None
