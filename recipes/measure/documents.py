"""The documents' statements in recipes/seeds.toml, each with its answer here, or the reason why there is none.

A claim answers its ids itself (smoke_tests/claims.py). This module covers the rest: numbers of `bench`, proofs of
patches, comparisons of trainings, and tests of the tool.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from recipes.catalogue import patch
from recipes.catalogue.load import validated
from recipes.catalogue.schema import Strict, Text
from recipes.errors import Refusal, suggestion
from recipes.files import ROOT, read_json, read_text, read_toml
from recipes.measure import results
from recipes.measure.results import Number, Row
from recipes.prove import proofs
from recipes.prove.proofs import Inputs

# The inventory: five documents, and the number of ids in each.
DOCUMENTS = {
    "A": ("HARE 1.1B in FP8", 29),
    "B": ("fused operators for a 1.26B model", 58),
    "C": ("how mature FP8 pre-training is", 24),
    "D": ("float8 with FSDP2", 15),
    "E": ("tilearn, several GPUs", 16),
}
IDS = tuple(f"{letter}{number:02}" for letter, (_, last) in DOCUMENTS.items() for number in range(1, last + 1))


Arm = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9 .,_-]*$")]


class Statement(Strict):
    """A statement of a document, and what answers it.

    `cells` are patterns of the keys of measured cells; the number of a cell is how many times as fast `arm` is as
    `over`, or as its base: the median over pairs, with its interval of 95 %. `least`, `most`, `rising` and `falling`
    say when the statement holds; if a bound lies inside the interval, the answer is open. `patch` is a file of
    patches/; `parity` an arm of smoke_tests/training/parity.py, whose loss lies above bfloat16's, with models of these
    names (`models`, patterns; none: all); `test` a test of the tool (FILE::NAME), which every change has to pass;
    `takes` says what a run would need, and `beyond` why there can be no answer here.
    """

    seeds: Annotated[list[Text], Field(min_length=1)]
    says: Text
    cells: list[Text] = Field(default=[])
    arm: Arm | None = None
    over: Arm | None = None
    least: float | None = None
    most: float | None = None
    rising: list[Text] = Field(default=[])
    falling: list[Text] = Field(default=[])
    patch: Text | None = None
    parity: Text | None = None
    models: list[Text] = Field(default=[])
    test: Annotated[str, Field(pattern=r"^recipes/tests/test_\w+\.py::test_\w+$")] | None = None
    takes: Text | None = None
    beyond: Text | None = None

    @model_validator(mode="after")
    def _has_one_answer(self) -> Self:
        kinds = (self.cells, self.patch, self.parity, self.test, self.takes, self.beyond)
        if sum(map(bool, kinds)) != 1 or bool(self.cells) != bool(self.arm):
            raise ValueError('give "cells" and "arm", or one of "patch", "parity", "test", "takes" and "beyond"')
        if not self.cells and (self.over or self.bound):
            raise ValueError('"over" and bounds apply to numbers only: give "cells", or leave them out')
        if self.models and not self.parity:
            raise ValueError('"models" applies to a comparison of trainings: give "parity", or leave it out')
        if unknown := [seed for seed in self.seeds if seed not in IDS]:
            raise ValueError(f"the ids are A01 to E16, and {unknown[0]} is not one of them")
        return self

    @property
    def bound(self) -> str:
        """When the statement holds, as text; empty if the document only gives a number."""
        words = (
            f"rising with {', '.join(self.rising)}" if self.rising else "",
            f"falling with {', '.join(self.falling)}" if self.falling else "",
            f"at least {self.least:g}" if self.least is not None else "",
            f"at most {self.most:g}" if self.most is not None else "",
        )
        return ", ".join(filter(None, words))

    def judged(self, numbers: list[Number], facts: list[Row]) -> list[bool | None]:
        """For each number, or each pair of numbers, whether it is as stated; None if the intervals do not decide it."""
        if names := self.rising or self.falling:
            pairs = [
                (smaller, larger)
                for smaller, beside in zip(numbers, facts, strict=True)
                for larger, its in zip(numbers, facts, strict=True)
                if _more(beside, its, names)
            ]
            return [_below(*pair) if self.rising else _below(*reversed(pair)) for pair in pairs]
        least = -math.inf if self.least is None else self.least
        most = math.inf if self.most is None else self.most
        return [
            False if high < least or low > most else True if low >= least and high <= most else None
            for _, low, high in numbers
        ]


def _more(facts: Row, others: Row, names: list[str]) -> bool:
    """Whether `others` is larger in some of these names, smaller in none, and equal in everything else."""
    alike = all(others[name] == value for name, value in facts.items() if name not in names)
    return alike and facts != others and all(others[name] >= facts[name] for name in names)


def _below(first: Number, second: Number) -> bool | None:
    """Whether a number is less than another; None if their intervals overlap."""
    return True if first[2] < second[1] else False if first[1] > second[2] else None


@dataclass(frozen=True)
class Answer:
    """What was measured or tested, as text, and where; `result` is empty if there is no answer yet.

    holds: whether the statement holds; None if that is open.
    """

    statement: Statement
    result: str = ""
    where: str = ""
    holds: bool | None = None


def load(root: Path = ROOT) -> list[Statement]:
    """Every statement of recipes/seeds.toml, in its order."""
    path = root / "recipes" / "seeds.toml"
    tables = read_toml(path)
    if set(tables) != {"statement"} or not isinstance(tables["statement"], list):
        raise Refusal(f"{path} is not a list of statements: write each as [[statement]].")
    return [
        validated(Statement, table, path, f"statement {number}") for number, table in enumerate(tables["statement"], 1)
    ]


def answers(now: Inputs) -> list[Answer]:
    """Each statement with its answers: one for each file of rows, or each comparison, that answers it."""
    root = now.catalogue.root
    measured = [(path.stem.replace("--", ", "), results.read(path)[1]) for path in results.committed(root)]
    every = []
    arms = {name for _, cells in measured for row in cells for name in row["arms"]}
    words = set(re.findall(r"\w+", " ".join([*arms, *map(read_text, (root / "smoke_tests" / "bench").glob("*.py"))])))
    for statement in load(root):
        if measured:
            _refuse_unknown_arms(statement, arms, words)
        if statement.patch:
            answers_to_it = [_proved(statement, statement.patch, now)]
        elif statement.parity:
            answers_to_it = list(_compared(root, statement))
        elif statement.test:
            file, _, name = statement.test.partition("::")
            answers_to_it = [Answer(statement, "tested with every change", f"[{name}]({file})")]
        elif statement.takes:
            answers_to_it = [Answer(statement, where=f"not run; it takes {statement.takes}")]
        elif statement.beyond:
            answers_to_it = [Answer(statement, f"not here: {statement.beyond}")]
        else:
            answers_to_it = [answer for place, cells in measured for answer in _measured(statement, place, cells)]
        every += answers_to_it or [Answer(statement, where=_places(statement.cells))]
    return every


def _refuse_unknown_arms(statement: Statement, arms: set[str], words: set[str]) -> None:
    """Refuse a statement about an arm of which a word is neither measured nor in the code: nothing would answer it."""
    for key, name in (("arm", statement.arm), ("over", statement.over)):
        if name and name not in arms and not words.issuperset(re.findall(r"\w+", name)):
            raise Refusal(
                f"recipes/seeds.toml: {key} {name!r} of {', '.join(statement.seeds)} is no arm of a cell"
                f"{suggestion(name, arms)}: correct it."
            )


def trainings(root: Path) -> Iterator[tuple[str, str, str, Path, dict[str, Any]]]:
    """The reports of smoke_tests/training/parity.py: target, machine, model, path without suffix, and report."""
    for path in sorted((root / "smoke_tests" / "evidence" / "training").glob("*--*--*.json")):
        target, machine, model = path.stem.split("--")
        place = path.relative_to(root).with_suffix("")
        yield target, machine, model, place, read_json(path)


def by_seed(arm: dict[str, Any]) -> str:
    """How far an arm's loss lies above bfloat16's, for each seed."""
    return ", ".join(f"{value:+.4f}" for value in arm["differences"])


def verdict(arm: dict[str, Any], margin: float) -> str:
    """The mean over the seeds with its interval of 95 %, and the verdict; or that there are too few seeds."""
    if "verdict" not in arm:
        return "no verdict: too few seeds"
    low, high = arm["interval"]
    return f"{arm['above']:+.4f} ({low:+.4f} to {high:+.4f}): {arm['verdict']} (margin {margin:g})"


def _proved(statement: Statement, name: str, now: Inputs) -> Answer:
    """The answer that the proof of a patch gives to a statement."""
    path = now.catalogue.root / "patches" / name
    if not path.is_file():
        raise Refusal(f"recipes/seeds.toml: there is no patches/{name}: correct it.")
    read, link = patch.read(path), f"[patch](patches/{name})"
    if not proofs.ran(read):
        return Answer(statement, where=link)
    since = "changed since it was " if proofs.changes(read, now) else ""
    return Answer(statement, f"{since}proved on {proofs.proved_on(read)}", link)


def _compared(root: Path, statement: Statement) -> Iterator[Answer]:
    for target, machine, model, _, report in trainings(root):
        if not any(fnmatch(model, pattern) for pattern in statement.models or ["*"]):
            continue
        arm = report["arms"].get(statement.parity, {})
        if "differences" in arm:
            numbers = f"{by_seed(arm)} nats per token above {arm['beside']}, seed by seed, {model}"
            judged = f"{numbers}; {verdict(arm, report['margin'])}; {arm['spikes'] or 'no'} spikes"
            yield Answer(statement, judged, f"{target}, {machine}")


@dataclass(frozen=True)
class _Ratio:
    """How many times as fast a statement's arm is as what it is compared with, in one cell."""

    row: Row
    number: Number
    samples: int
    is_launch_bound: bool

    @property
    def is_open(self) -> bool:
        """Whether there are too few samples for an interval."""
        return self.samples < results.FEWEST

    @property
    def bounded(self) -> Number:
        """The number with its interval, which may be anything if there are too few samples."""
        return (self.number[0], 0.0, math.inf) if self.is_open else self.number

    def __str__(self) -> str:
        number, low, high = self.number
        interval = f"{self.samples} samples: no interval" if self.is_open else f"{low:.2f} to {high:.2f}"
        return f"{number:.2f} ({interval})"


def _ratios(statement: Statement, cells: list[Row]) -> Iterator[_Ratio]:
    """The numbers for a statement, one for each of its cells in which both arms are valid."""
    matched = {row["key"]: row for pattern in statement.cells for row in cells if fnmatch(row["key"], pattern)}
    for row in matched.values():
        arms = results.valid(row)
        arm = arms.get(str(statement.arm), {})
        base = arms.get(statement.over or arm.get("base") or "")
        if arm and base:
            number = results.times(base, arm) if statement.over else (arm["ratio"], arm["low"], arm["high"])
            yield _Ratio(row, number, len(arm["samples_ms"]), bool(arm["launch_bound"] or base["launch_bound"]))


def _measured(statement: Statement, place: str, cells: list[Row]) -> Iterator[Answer]:
    """The answer that a file of rows gives to a statement; none without a number."""
    ratios = list(_ratios(statement, cells))
    numbers = [ratio.bounded for ratio in ratios]
    judged = statement.judged(numbers, [ratio.row["facts"] for ratio in ratios]) if statement.bound else []
    if not numbers or (statement.bound and not judged):
        return
    listed = ", ".join(map(str, ratios))
    if len(numbers) > 4:
        middle = statistics.median(number for number, _, _ in numbers)
        listed = f"{min(numbers)[0]:.2f} to {max(numbers)[0]:.2f}, median {middle:.2f}, in {len(numbers)} cells"
    holds = None if not judged else False if False in judged else True if all(judged) else None
    waits = sum(ratio.is_launch_bound for ratio in ratios)
    host = f"; the host sets the time in {waits}" if waits else ""
    keys = [ratio.row["key"] for ratio in ratios]
    where = f"{place}: {statement.arm} in {_places(keys if len(keys) <= 4 else statement.cells)}"
    yield Answer(statement, f"{_outcome(statement, judged, holds)}{listed}{host}", where, holds)


def _outcome(statement: Statement, judged: list[bool | None], holds: bool | None) -> str:
    """Whether a statement holds, and for how many numbers, as text; empty for a statement without a bound."""
    if not statement.bound:
        return ""
    outcome = {True: "holds", False: "does not hold", None: "inconclusive"}[holds]
    count = f"; {judged.count(True)} of {len(judged)} do, {judged.count(False)} do not" if len(judged) > 4 else ""
    return f"{outcome} ({statement.bound}{count}): "


def _places(keys: list[str]) -> str:
    return ", ".join(f"`{key}`" for key in keys)
