"""Records: files in smoke_tests/evidence/ that programs wrote, and whether each program has changed since."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from recipes.errors import Refusal
from recipes.files import read_json, write_json
from recipes.prove.claims import Room
from recipes.prove.definitions import Code
from recipes.prove.smoke import commit_of

# Files in smoke_tests/evidence/ -> the program of smoke_tests/ that writes them.
PROGRAMS = {
    "bench/*.jsonl": "bench/__main__.py",
    "training/guard*.json": "training/guard_proof.py",
    "training/kills*.json": "training/kills.py",
    "training/*--*--*.json": "training/parity.py",
}


@dataclass(frozen=True)
class Record:
    """A file that a program of smoke_tests/ wrote, and whether the program has changed since."""

    file: str
    program: str
    commit: str
    changed: bool


def note(root: Path, path: Path) -> str:
    """Record the current commit as the one whose program made a file of smoke_tests/evidence/."""
    folder = root / "smoke_tests" / "evidence"
    try:
        name = path.resolve().relative_to(folder.resolve()).as_posix()
    except ValueError:
        name = str(path)
    if not (program := program_of(name)) or not (folder / name).is_file():
        known = ", ".join(PROGRAMS)
        raise Refusal(f"{path} is not a record below {folder} ({known}): put it there under such a name.")
    if not (commit := commit_of(root)):
        raise Refusal(f"{path} comes from tests that are not committed: commit smoke_tests/, and record it again.")
    noted = {"commit": commit, "key": _key_of_program(Room(root).code, program)}
    write_json(folder / "records.json", {**_noted(root), name: noted})
    return name


def every(root: Path) -> list[Record]:
    """Every committed record; a record without a known commit counts as changed."""
    code, noted = Room(root).code, _noted(root)
    records = []
    for pattern, program in PROGRAMS.items():
        for path in sorted((root / "smoke_tests" / "evidence").glob(pattern)):
            name = path.relative_to(root / "smoke_tests" / "evidence").as_posix()
            made = noted.get(name, {"commit": "", "key": ""})
            records.append(Record(name, program, made["commit"], made["key"] != _key_of_program(code, program)))
    return records


def program_of(name: str) -> str | None:
    """The program that writes a file of this name."""
    return next((program for pattern, program in PROGRAMS.items() if fnmatch(name, pattern)), None)


def _noted(root: Path) -> dict[str, dict[str, str]]:
    path = root / "smoke_tests" / "evidence" / "records.json"
    return read_json(path) if path.exists() else {}


def _key_of_program(code: Code, program: str) -> str | None:
    """The key of everything that a program can reach; None if the program is gone."""
    module = code.modules.get(program)
    return code.key(code.floor(definition.place for definition in module.definitions.values())) if module else None
