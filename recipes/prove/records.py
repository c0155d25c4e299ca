"""Records: files in smoke_tests/evidence/ that programs wrote, and whether something has changed since."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from recipes.catalogue.plan import Plan
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
    """A file that a program of smoke_tests/ wrote, and whether it still holds.

    `changed` is "record", "program" or "stack" (the pinned inputs of its target) if that has changed since, or "".
    A file of bench's rows was written by several runs: there is a record for each, with its `shard`.
    """

    file: str
    program: str
    commit: str
    changed: str
    shard: str = ""


def note(plan: Plan, path: Path) -> str:
    """Record the current commit and the target as those whose program made a file of smoke_tests/evidence/.

    Of a file of bench's rows, the commit is that of those runs that have none yet, and each run names its own target.
    """
    root, target = plan.root, plan.target.name
    folder = root / "smoke_tests" / "evidence"
    try:
        name = path.resolve().relative_to(folder.resolve()).as_posix()
    except ValueError:
        name = str(path)
    if not (program := program_of(name)) or not (folder / name).is_file():
        known = ", ".join(PROGRAMS)
        raise Refusal(f"{path} is not a record below {folder} ({known}): put it there under such a name.")
    named = path.name.partition("--")[0]
    if named not in (target, path.name):
        raise Refusal(f'{path} is a record of {named}, not of {target}: run `nox -s "promote({named})"` with it.')
    if not (commit := commit_of(root)):
        raise Refusal(f"{path} comes from tests that are not committed: commit smoke_tests/, and record it again.")
    made = {"commit": commit, "key": _key_of_program(Room(root).code, program), "target": target, "stack": plan.stack}
    before = _noted(root)
    others = {place: noted for place, noted in before.items() if place.partition("#")[0] != name}
    parts = {
        place: before[place] if place in before and place != name else {**made, **part}
        for place, part in _parts(name, folder).items()
    }
    write_json(folder / "records.json", others | parts)
    return name


def every(root: Path, plans: Mapping[str, Plan]) -> list[Record]:
    """Every committed record. `plans` are those of all targets, by name.

    A record without a known commit, without hashes or without a known stack counts as changed.
    """
    folder, noted = root / "smoke_tests" / "evidence", _noted(root)
    key_of = functools.cache(functools.partial(_key_of_program, Room(root).code))

    def what_changed(program: str, made: Mapping[str, Any], part: Mapping[str, Any]) -> str:
        if not {*part["sha256"]} <= {*made.get("sha256", [])}:  # a file loses the rows of cells measured again
            return "record"
        if made["key"] != key_of(program):
            return "program"
        ran_in = {**made, **part}
        plan = plans.get(ran_in.get("target", ""))
        return "" if plan and ran_in["stack"] in plan.stacks else "stack"

    records = []
    for pattern, program in PROGRAMS.items():
        for path in sorted(folder.glob(pattern)):
            name = path.relative_to(folder).as_posix()
            for place, part in _parts(name, folder).items():
                made = noted.get(place, {"commit": "", "key": ""})
                changed = what_changed(program, made, part)
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


def _parts(name: str, folder: Path) -> dict[str, dict[str, Any]]:
    """What records.json has of a file as it is now: the hashes of each part, by its place there.

    The only part is the file itself, by its name; a file of bench's rows has one per run, by NAME#SHARD, with the
    target and the stack that the run says it had.
    """
    if not name.endswith(".jsonl"):
        return {name: {"sha256": [sha256_of(folder / name)]}}
    parts: dict[str, dict[str, Any]] = {}
    try:
        for row in map(json.loads, (folder / name).read_text(encoding="utf-8").splitlines()):
            part = parts.setdefault(f"{name}#{row['shard']}", {"sha256": []})
            part["sha256"].append(digest_of(row))
            if row["key"] == "shard":
                part.update(target=row["target"], stack=row["stack"])
        return parts
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
