"""The documents' statements in recipes/seeds.toml, each beside what answers it here, or why nothing can.

A claim answers its ids itself (smoke_tests/claims.py); here is the rest: numbers of `bench`, proofs of patches,
trainings beside each other, and tests of the tool.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from recipes import bench, patch, proof
from recipes.bench import Row
from recipes.model import ROOT, Refusal, Strict, Text, read_toml, validated

# The inventory: five documents, and how many ids each has, numbered from 1.
DOCUMENTS = {
    "A": ("HARE 1.1B in FP8", 29),
    "B": ("fused operators for a 1.26B model", 58),
    "C": ("how mature FP8 pre-training is", 24),
    "D": ("float8 with FSDP2", 15),
    "E": ("tilearn, several GPUs", 16),
}
IDS = tuple(f"{letter}{number:02}" for letter, (_, last) in DOCUMENTS.items() for number in range(1, last + 1))


class Statement(Strict):
    """One statement of a document, and the one thing that answers it.

    `cells` are patterns of measured cells' keys; in each the number is how many times as fast `arm` is as `over`, or
    as what it was measured beside. `least`, `most` and `rising` say when the statement holds. `patch` is a file of
    patches/; `parity` an arm of smoke_tests/training/parity.py, whose loss lies above bfloat16's; `test` a test of the
    tool (FILE::NAME), which every change has to pass; `beyond` says why none of these can be had here.
    """

    seeds: Annotated[list[Text], Field(min_length=1)]
    says: Text
    cells: list[Text] = Field(default=[])
    arm: Text | None = None
    over: Text | None = None
    least: float | None = None
    most: float | None = None
    rising: bool = False
    patch: Text | None = None
    parity: Text | None = None
    test: Annotated[str, Field(pattern=r"^recipes/tests/test_\w+\.py::test_\w+$")] | None = None
    beyond: Text | None = None

    @model_validator(mode="after")
    def _has_one_answer(self) -> Self:
        kinds = (self.cells, self.patch, self.parity, self.test, self.beyond)
        if sum(map(bool, kinds)) != 1 or bool(self.cells) != bool(self.arm):
            raise ValueError('give "cells" and "arm", or one of "patch", "parity", "test" and "beyond"')
        if unknown := [seed for seed in self.seeds if seed not in IDS]:
            raise ValueError(f"the inventory is A01 to E16, and has no {unknown[0]}")
        return self

    def holds(self, numbers: list[float]) -> bool | None:
        """Whether these numbers are what the document says; None where it says no more than a number."""
        said = [
            numbers == sorted(numbers) if self.rising else None,
            min(numbers) >= self.least if self.least is not None else None,
            max(numbers) <= self.most if self.most is not None else None,
        ]
        return None if said == [None, None, None] else False not in said


@dataclass(frozen=True)
class Answer:
    """What was found, in words, and where; `found` is empty where nothing was yet."""

    statement: Statement
    found: str = ""
    where: str = ""


def load(root: Path = ROOT) -> list[Statement]:
    """Every statement of recipes/seeds.toml, in its order."""
    path = root / "recipes" / "seeds.toml"
    tables = read_toml(path)
    if set(tables) != {"statement"} or not isinstance(tables["statement"], list):
        raise Refusal(f"{path} is no list of statements: write each as [[statement]].")
    return [
        validated(Statement, table, path, f"statement {number}") for number, table in enumerate(tables["statement"], 1)
    ]


def answers(root: Path) -> list[Answer]:
    """Each statement with what answers it, once for each file of rows or comparison that does."""
    measured = [(path.stem.replace("--", ", "), bench.read(root, path)[1]) for path in bench.committed(root)]
    found = []
    for statement in load(root):
        if statement.patch:
            mine = [_proved(root, statement)]
        elif statement.parity:
            mine = list(_compared(root, statement))
        elif statement.test:
            file, _, name = statement.test.partition("::")
            mine = [Answer(statement, "tested with every change", f"[{name}]({file})")]
        elif statement.beyond:
            mine = [Answer(statement, f"not here: {statement.beyond}")]
        else:
            mine = [answer for place, cells in measured for answer in _measured(statement, place, cells)]
        found += mine or [Answer(statement)]
    return found


def _proved(root: Path, statement: Statement) -> Answer:
    path = root / "patches" / str(statement.patch)
    if not path.is_file():
        raise Refusal(f"recipes/seeds.toml: there is no patches/{statement.patch}: correct it.")
    return Answer(statement, f"proved on {proof.told(patch.read(path))}", f"[patch](patches/{statement.patch})")


def _compared(root: Path, statement: Statement) -> Iterator[Answer]:
    for path in sorted((root / "smoke_tests" / "evidence" / "training").glob("*--*--*.json")):
        target, machine, model = path.stem.split("--")
        arm = json.loads(path.read_text(encoding="utf-8"))["arms"].get(statement.parity)
        if arm:
            low, high = arm["interval"]
            found = f"{arm['above']:+.4f} nats per token ({low:+.4f} to {high:+.4f})"
            yield Answer(statement, f"{found}, {model}", f"{target}, {machine}")


def _measured(statement: Statement, place: str, cells: list[Row]) -> Iterator[Answer]:
    numbers, waits = [], []
    for pattern in statement.cells:
        for row in cells:
            arm = bench.valid(row).get(str(statement.arm)) if fnmatch(row["key"], pattern) else None
            over = bench.valid(row).get(statement.over or "") if arm else None
            if arm and (over or (not statement.over and "ratio" in arm)):
                numbers.append(over["ms"] / arm["ms"] if over else arm["ratio"])
                waits.append(arm["launch_bound"])
    if not numbers or (statement.rising and len(numbers) < len(statement.cells)):
        return
    listed = ", ".join(f"{number:.2f}" for number in numbers)
    if len(numbers) > 1 and not statement.rising:
        listed = f"{min(numbers):.2f} to {max(numbers):.2f} in {len(numbers)} cells"
    words = {True: "holds: ", False: "does not hold: ", None: ""}
    listed = f"{words[statement.holds(numbers)]}{listed}" + (", the host sets its time" if all(waits) else "")
    yield Answer(statement, listed, f"{place}: {statement.arm} in {', '.join(f'`{cell}`' for cell in statement.cells)}")
