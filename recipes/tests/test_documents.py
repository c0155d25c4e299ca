"""A document's statement is answered by one thing, and holds where its numbers say so."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recipes.catalogue.load import Catalogue
from recipes.errors import Refusal
from recipes.files import ROOT
from recipes.measure import documents, results
from recipes.measure.documents import Statement
from recipes.pages import tables
from recipes.prove import proofs, records
from recipes.tests.conftest import Checkout
from recipes.tests.rows import SHARD, arm, fast, row

CELLS = ["linear/sweep/*/both"]
LOW, HIGH = "0.50 (0.49 to 0.51)", "1.50 (1.49 to 1.51)"  # how fast(0.5) and fast(1.5) are written
SLOW, FAST = "linear/sweep/1024x1024x1024/both", "linear/sweep/16384x8192x8192/both"


def stated(cells: list[str] = CELLS, timed: str = "te", **others: Any) -> Statement:
    return Statement(seeds=["A21"], says="FP8 gains", cells=cells, arm=timed, **others)


def measured(statement: Statement, *rows: results.Row) -> list[str]:
    for cell in rows:
        cell["facts"].update(zip("mkn", map(int, re.findall(r"\d+", cell["key"])), strict=False))
        for timed in cell["arms"].values():
            timed["samples_ms"] = timed["samples_ms"] * 9
    judged = results.room("rows").latest([SHARD, *rows]).values()
    return [
        answer.result for answer in documents._measured(statement, "here", [{**each, "run": SHARD} for each in judged])
    ]


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        (stated(), f"{LOW}, {HIGH}"),
        (stated([*CELLS, SLOW]), f"{LOW}, {HIGH}"),
        (stated(least=1.0), f"does not hold (at least 1): {LOW}, {HIGH}"),
        (stated(least=0.4, most=1.6), f"holds (at least 0.4, at most 1.6): {LOW}, {HIGH}"),
        (stated(least=0.5), f"inconclusive (at least 0.5): {LOW}, {HIGH}"),
        (stated(most=1.5), f"inconclusive (at most 1.5): {LOW}, {HIGH}"),
        (stated(least=0.5, most=1.4), f"does not hold (at least 0.5, at most 1.4): {LOW}, {HIGH}"),
        (stated([SLOW], most=1.0), f"holds (at most 1): {LOW}"),
        (stated(rising=["m", "k", "n"]), f"holds (rising with m, k, n): {LOW}, {HIGH}"),
        (stated(falling=["m", "k", "n"]), f"does not hold (falling with m, k, n): {LOW}, {HIGH}"),
        (stated([FAST], over="slower"), "3.00 (3.00 to 3.00)"),
    ],
)
def test_a_statement_is_held_against_every_number(statement: Statement, words: str) -> None:
    rows = row(SLOW, te=fast(0.5)), row(FAST, te=fast(1.5), slower=arm(ms=2.0))
    assert measured(statement, *rows) == [words]


def test_what_is_not_valid_or_not_measured_answers_nothing() -> None:
    slow, invalid = row(SLOW, te=fast(0.5)), row(FAST, te=fast(1.5, fp8_kernels=[]))
    assert measured(stated(), slow, invalid) == [LOW]
    assert measured(stated([SLOW, FAST], rising=["m", "k", "n"]), slow, invalid) == []
    assert measured(stated(over="slower"), slow) == []
    assert measured(stated(["models/*"]), slow) == []


def test_trainings_have_a_verdict_from_five_seeds_on_and_their_numbers_before(tmp_path: Path) -> None:
    folder = tmp_path / "smoke_tests" / "evidence" / "training"
    folder.mkdir(parents=True)
    first = {"beside": "bf16", "seeds": [0], "spikes": 0}
    few = {**first, "differences": [0.25, -0.5]}
    enough = {**first, "differences": [0.01] * 5, "above": 0.01, "interval": [0.008, 0.012], "verdict": "different"}
    report = {"reference": "bf16", "window": 2, "margin": 0.005, "arms": {"bf16": first, "e8m3": few, "fp8": enough}}
    (folder / "cpu--x86-64--tiny.json").write_text(json.dumps(report))

    (answer,) = documents._compared(tmp_path, Statement(seeds=["C06"], says="it diverges", parity="e8m3"))
    assert answer.result == (
        "+0.2500, -0.5000 nats per token above bf16, seed by seed, tiny; no verdict: too few seeds; no spikes"
    )
    elsewhere = Statement(seeds=["C06"], says="it diverges", parity="e8m3", models=["hare-*"])
    assert list(documents._compared(tmp_path, elsewhere)) == []
    record = records.Record("training/cpu--x86-64--tiny.json", "training/parity.py", "306aec5f0670", changed="stack")
    facts = SimpleNamespace(root=tmp_path, record_of={record.file: record}.__getitem__)
    assert "tiny.jsonl); stack changed since 306aec5 (" in tables.trainings(facts)  # type: ignore[arg-type]
    lines = [line for line in tables.trainings(facts).splitlines() if line.startswith("| `")]  # type: ignore[arg-type]
    assert [line.split(" | ") for line in lines] == [
        ["| `e8m3`", "`bf16`", "+0.2500, -0.5000", "no verdict: too few seeds |"],
        ["| `fp8`", "`bf16`", ", ".join(["+0.0100"] * 5), "+0.0100 (+0.0080 to +0.0120): different (margin 0.005) |"],
    ]


def test_a_time_that_the_host_sets_is_said_to_be_that() -> None:
    launches = fast(1.5, host_ms=10.0)
    assert measured(stated(), row(SLOW, te=launches)) == [f"{HIGH}; the host sets the time in 1"]
    base = row(FAST, te=fast(1.5))
    base["arms"]["bf16"]["host_ms"] = 10.0
    assert measured(stated(), row(SLOW, te=launches), base) == [f"{HIGH}, {HIGH}; the host sets the time in 2"]
    one_of_two = [f"{HIGH}, {HIGH}; the host sets the time in 1"]
    assert measured(stated(), row(SLOW, te=launches), row(FAST, te=fast(1.5))) == one_of_two


def test_every_pair_is_looked_at_and_intervals_that_overlap_are_inconclusive() -> None:
    keys = {size: f"linear/sweep/{size}x8x8/both" for size in (1, 2, 4)}

    def words(*gains: float) -> str:
        rows = [row(key, te=fast(gain)) for key, gain in zip(keys.values(), gains, strict=True)]
        (answer,) = measured(stated(rising=["m"]), *rows)
        return answer.partition(" (")[0]

    assert words(1.0, 1.1, 1.2) == "holds"
    assert words(1.0, 1.1, 1.11) == "inconclusive"
    assert words(1.1, 1.11, 1.05) == "does not hold", "neighbours overlap, first and last do not"
    apart = row("linear/sweep/1x8x8/both", te=fast(1.5)), row("linear/sweep/2x4x8/both", te=fast(1.2))
    assert measured(stated(rising=["m", "k"]), *apart) == [], "neither is the larger one"
    assert measured(stated(rising=["m"]), *apart) == [], "they differ in k"


def test_a_number_of_few_samples_has_no_interval_and_no_verdict() -> None:
    (judged,) = results.room("rows").latest([SHARD, row(FAST, te=fast(1.5, samples_ms=[1.0] * 2))]).values()
    (answer,) = documents._measured(stated(least=1.0), "here", [{**judged, "run": SHARD}])
    assert answer.result == "inconclusive (at least 1): 1.50 (2 samples: no interval)"


def test_many_numbers_are_summed_up() -> None:
    cells = [f"linear/sweep/{width}/both" for width in range(5)]
    rows = [row(cell, te=fast(0.9 + 0.2 * index)) for index, cell in enumerate(cells)]
    numbers = "0.90 to 1.70, median 1.30, in 5 cells"
    assert measured(stated(cells, least=1.0), *rows) == [
        f"does not hold (at least 1; 4 of 5 do, 1 do not): {numbers}",
    ]


def test_what_could_be_run_and_was_not_says_what_it_takes(checkout: Checkout) -> None:
    """None of these is impossible, as was once written."""
    answers = documents.answers(proofs.inputs(Catalogue(checkout.root)))
    for seed in ("B40", "B42", "C03", "C09", "C17", "D02", "D08", "D09", "E13", "E16"):
        mine = [answer for answer in answers if seed in answer.statement.seeds]
        assert any(answer.where.startswith("not run; it takes ") and not answer.result for answer in mine), seed
        assert not any(answer.statement.beyond for answer in mine), seed


def test_every_link_of_the_page_is_there() -> None:
    page = ROOT / "docs" / "status" / "documents.md"
    links = re.findall(r"\]\(([^)]+)\)", page.read_text())
    assert len(links) > 5
    assert all((page.parent / link).exists() for link in links)


def test_every_id_is_on_the_page() -> None:
    text = (ROOT / "docs" / "status" / "documents.md").read_text()
    left = re.findall(r"([A-E])(\d\d)(?:-[A-E](\d\d))?", text.partition("Neither claimed nor measured yet:")[2])
    ranges = [f"{letter}{number:02}" for letter, low, high in left for number in range(int(low), int(high or low) + 1)]
    assert {*re.findall(r"\b[A-E]\d\d\b", text), *ranges} == set(documents.IDS)


def test_a_patch_that_was_proved_nowhere_answers_nothing(checkout: Checkout) -> None:
    (checkout.root / "patches" / "transformer-engine" / "0001-cache-with-lru-cache.json").unlink()
    answers = documents.answers(proofs.inputs(Catalogue(checkout.root)))
    assert [answer.result for answer in answers if answer.statement.seeds == ["A06"]] == [""]


def test_the_tests_that_answer_are_there() -> None:
    for test in (statement.test for statement in documents.load() if statement.test):
        file, _, name = test.partition("::")
        code = ast.parse((ROOT / file).read_text())
        assert name in [part.name for part in code.body if isinstance(part, ast.FunctionDef)], test


def test_a_patch_answers_with_what_its_proof_ran_on() -> None:
    answers = documents.answers(proofs.inputs(Catalogue()))
    (answer,) = [each for each in answers if each.statement.seeds == ["A06"]]
    assert re.match(r"(changed since it was )?proved on 1\.8\.0 \(CPython 3\.8", answer.result)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('seeds = ["A06"]', 'seeds = ["A60"]', "A60 is not one of them"),
        ('arm = "fp8 te.delayed graph"\n', "", 'give "cells" and "arm"'),
        ('parity = "fp8/fused"', 'parity = "fp8/fused"\nleast = 0.0', "apply to numbers"),
        ('parity = "fp8/fused"', 'parity = "fp8/fused"\narm = "fp8"', 'give "cells" and "arm"'),
        (
            'parity = "fp8/fused"',
            'test = "recipes/tests/test_documents.py::test_no"',
            '"models" applies to a comparison',
        ),
        ("::test_a_moved_tag_is_refused", "", "does not match"),
        ("0001-cache-with-lru-cache.patch", "0001-no.patch", "there is no patches/transformer-engine/0001-no.patch"),
        ("least = 1.28\n", "leest = 1.28\n", "leest is not a known key"),
        (
            'over = "attention fused"',
            'over = "atention fused"',
            "over 'atention fused' of A01, A28 is no arm",
        ),
        ('arm = "fp8 te.delayed"', 'arm = "/etc/passwd"', 'arm is "/etc/passwd", which does not match'),
    ],
)
def test_a_statement_without_an_answer_is_refused(proved: Checkout, old: str, new: str, words: str) -> None:
    path = proved.root / "recipes" / "seeds.toml"
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(Refusal, match=words):
        documents.answers(proofs.inputs(Catalogue(proved.root)))
