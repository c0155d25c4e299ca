"""Records: files in smoke_tests/evidence/ that programs wrote, and whether a file or its program has changed."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from recipes.errors import Refusal
from recipes.files import digest_of, read_json, sha256_of, write_json
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
    """A file that a program of smoke_tests/ wrote; `changed` is "record" or "program" if that has changed since, or "".

    A file of bench's rows was written by several runs: there is a record for each, with its `shard`.
    """

    file: str
    program: str
    commit: str
    changed: str
    shard: str = ""


def note(root: Path, path: Path) -> str:
    """Record the current commit as the one whose program made a file of smoke_tests/evidence/.

    Of a file of bench's rows, it is the commit of those runs that have none yet.
    """
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
    made = {"commit": commit, "key": _key_of_program(Room(root).code, program)}
    before = _noted(root)
    others = {place: noted for place, noted in before.items() if place.partition("#")[0] != name}
    parts = {
        place: before[place] if place in before and place != name else {**made, "sha256": hashes}
        for place, hashes in _hashes(name, folder).items()
    }
    write_json(folder / "records.json", others | parts)
    return name


def every(root: Path) -> list[Record]:
    """Every committed record; a record without a known commit or without hashes counts as changed."""
    folder, noted = root / "smoke_tests" / "evidence", _noted(root)
    key_of = functools.cache(functools.partial(_key_of_program, Room(root).code))
    records = []
    for pattern, program in PROGRAMS.items():
        for path in sorted(folder.glob(pattern)):
            name = path.relative_to(folder).as_posix()
            for place, hashes in _hashes(name, folder).items():
                made = noted.get(place, {"commit": "", "key": ""})
                is_same = {*hashes} <= {*made.get("sha256", [])}  # a file loses the rows of cells measured again
                changed = "record" if not is_same else "program" if made["key"] != key_of(program) else ""
                records.append(Record(name, program, made["commit"], changed, place.partition("#")[2]))
    return records


def counted(records: Iterable[Record]) -> list[tuple[Record, str]]:
    """Records without their shards, each once, with how many of its file's runs it stands for; "" if for all."""
    alike = Counter(replace(record, shard="") for record in records)
    runs = Counter[str]()
    for record, count in alike.items():
        runs[record.file] += count
    return [
        (record, f"{count} of {runs[record.file]} runs" if count < runs[record.file] else "")
        for record, count in alike.items()
    ]


def program_of(name: str) -> str | None:
    """The program that writes a file of this name."""
    return next((program for pattern, program in PROGRAMS.items() if fnmatch(name, pattern)), None)


def _hashes(name: str, folder: Path) -> dict[str, list[str]]:
    """The hashes of a file's records, by where records.json has them.

    That is the file's own hash by its name; for a file of bench's rows, those of each run's rows by NAME#SHARD.
    """
    if not name.endswith(".jsonl"):
        return {name: [sha256_of(folder / name)]}
    hashes: dict[str, list[str]] = {}
    try:
        for row in map(json.loads, (folder / name).read_text(encoding="utf-8").splitlines()):
            hashes.setdefault(f"{name}#{row['shard']}", []).append(digest_of(row))
        return hashes
    except (ValueError, KeyError, TypeError) as error:
        fault = f"{type(error).__name__}: {error}"
        raise Refusal(f"{folder / name} does not hold bench's rows ({fault}): promote the rows again.") from None


def _noted(root: Path) -> dict[str, dict[str, Any]]:
    path = root / "smoke_tests" / "evidence" / "records.json"
    return read_json(path) if path.exists() else {}


def _key_of_program(code: Code, program: str) -> str | None:
    """The key of everything that a program can reach; None if the program is gone."""
    module = code.modules.get(program)
    return code.key(code.floor(definition.place for definition in module.definitions.values())) if module else None
