"""The rendered tables say what data, patches, claims and evidence say; the check names the command that mends them."""

from __future__ import annotations

import dataclasses
import json
import re
import statistics
from pathlib import Path

import pytest

from recipes.catalogue.load import Catalogue
from recipes.catalogue.plan import Plan, plan
from recipes.errors import Refusal
from recipes.pages import ledger, patches, render, tables
from recipes.prove import evidence, records
from recipes.tests.conftest import Checkout

TRAINING = Catalogue().root / "smoke_tests" / "evidence" / "training"


def test_every_rendered_file_is_current() -> None:
    assert render.check(Catalogue()) == 0


def test_the_check_names_the_command_that_mends_it(checkout: Checkout) -> None:
    targets = checkout.targets
    render.write(Catalogue(checkout.root))
    assert render.check(Catalogue(checkout.root)) == 0
    targets.write_text(targets.read_text().replace("any x86-64 machine", "any machine"))
    with pytest.raises(Refusal, match="nox -s render"):
        render.check(Catalogue(checkout.root))
    assert render.write(Catalogue(checkout.root)) == 0
    assert render.check(Catalogue(checkout.root)) == 0
    assert "any machine" in (checkout.root / "docs" / "status" / "targets.md").read_text()


def test_a_lost_marker_is_named(checkout: Checkout) -> None:
    page = checkout.root / "docs" / "status" / "documents.md"
    page.write_text(page.read_text().replace("<!-- /documents -->", ""))
    with pytest.raises(Refusal, match="/documents"):
        render.check(Catalogue(checkout.root))


def test_a_seed_outside_the_inventory_is_refused(checkout: Checkout) -> None:
    test = checkout.root / "smoke_tests" / "test_transformers.py"
    test.write_text(test.read_text().replace('seed="A09"', 'seed="A99"'))
    with pytest.raises(Refusal, match="A99"):
        render.check(Catalogue(checkout.root))


def test_a_patch_for_no_target_shows_none(checkout: Checkout) -> None:
    patch = checkout.root / "patches" / "deepspeed" / "0001-let-the-builder-name-the-cpu.patch"
    patch.write_text(patch.read_text().replace("==0.19.8", "==0.1"))
    table = render.blocks(tables.Facts.of(Catalogue(checkout.root)))["patches"]
    row = next(line for line in table.splitlines() if "deepspeed 0001" in line)
    assert row.endswith("|  |")


def test_a_patch_says_why_and_links_its_threads() -> None:
    sections = patches.reasons(tables.Facts.of(Catalogue())).split("### ")
    (section,) = (section for section in sections if section.startswith("transformer-engine 0001\n"))
    assert "    ImportError: cannot import name 'cache' from 'functools'\n" in section
    assert "[NVIDIA/TransformerEngine issue 958](https://github.com/NVIDIA/TransformerEngine/issues/958)" in section
    assert "[NVIDIA/TransformerEngine commit 38524f7](" in section


def test_quoted_lines_become_code_and_prose_no_emphasis() -> None:
    reason = "It reads _a_name and `b*c`, x*y:\n> an error_of *a*\n> second\nThen more."
    code = "    an error_of *a*\n    second"
    assert patches._paragraphs(reason) == [r"It reads \_a_name and `b*c`, x\*y:", code, "Then more."]


def test_a_number_says_whether_its_program_has_changed() -> None:
    record = records.Record("bench/a--b.jsonl", "bench/__main__.py", "306aec5f0670", changed="")
    assert tables._measured("2026-11-21", record) == "2026-11-21, at 306aec5"
    changed = tables._measured("2026-11-21", dataclasses.replace(record, changed="program"))
    assert changed.startswith("2026-11-21; program changed since 306aec5 ([diff](../../compare/306aec5f0670...main)")
    unknown = dataclasses.replace(record, commit="", changed="record")
    assert tables._measured("2026-11-21", unknown) == "2026-11-21, at an unknown commit"


def test_records_are_judged_once_for_all_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    judged, every = list[Path](), records.every

    def counting(root: Path, plans: dict[str, Plan]) -> list[records.Record]:
        judged.append(root)
        return every(root, plans)

    monkeypatch.setattr(records, "every", counting)
    facts = tables.Facts.of(Catalogue())
    assert tables.headlines(facts) and tables.records_table(facts)
    assert len(judged) == 1


def test_a_cell_says_what_was_built_otherwise_than_declared() -> None:
    declared, fewer = plan(Catalogue(), "cu12.1-torch2.1"), plan(Catalogue(), "cu12.1-torch2.1", sm=["9.0"])
    nvcc = "c++ 12.2.0; Cuda compilation tools, release {}, V{}.131"
    built = {"compiler": nvcc.format("12.4", "12.4"), "sm": ["9.0"]}
    assert tables._otherwise(declared, "apex", built) == "CUDA 12.4 in place of 12.1; sm 9.0 only; "
    assert tables._otherwise(declared, "apex", {"compiler": nvcc.format("12.1", "12.1"), "sm": ["8.0", "9.0"]}) == ""
    assert tables._otherwise(declared, "apex", {"compiler": "c++ 12.2.0"}) == ""
    run = {"packages": {"torch": {"built_with": {}}, "apex": {"built_with": built}}}
    assert evidence.built_for(declared, run).stack == fewer.stack != declared.stack


def test_a_target_that_was_built_and_never_run_says_with_what(checkout: Checkout) -> None:
    planned = plan(Catalogue(checkout.root), "cu12.1-torch2.1", sm=["9.0"])
    made = {"compiler": "c++ 12.2.0; Cuda compilation tools, release 12.4, V12.4.131", "where": "bare", "sm": ["9.0"]}
    packages = {pin.name: {"built_with": made} for pin in planned.pins}
    path = checkout.root / "smoke_tests" / "evidence" / "built" / "cu12.1-torch2.1.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"target": planned.target.name, "stack": planned.stack, "packages": packages}))

    def states() -> set[str]:
        lines = render.blocks(tables.Facts.of(Catalogue(checkout.root)))["matrix"].splitlines()
        built = (
            "CUDA 12.4 in place of 12.1; sm 9.0 only; c++ 12.2.0; Cuda compilation tools, release 12.4, V12.4.131, bare"
        )
        (note,) = [line[1] for line in lines if line[4:] == built]
        cells = [line.split(" | ") for line in lines if line.startswith("| `cu12.1-torch2.1`")]
        assert {cell[4] for cell in cells} == {f"({note}) |"}
        return {cell[3] for cell in cells}

    assert states() == {"built"}
    lock = checkout.root / "recipes" / "lock" / "cu12.1-torch2.1.txt"
    lock.write_text(re.sub(r"(--hash=sha256:)\w{8}", r"\g<1>00000000", lock.read_text(), count=1))
    assert states() == {"built, inputs changed since"}


def test_a_target_says_how_far_its_evidence_reaches() -> None:
    """Bare or as an image, where a claim of a run is proved now; else built or planned."""
    facts = tables.Facts.of(Catalogue())
    plan, run = next((plan, run) for plan, run in facts.runs if plan.target.name == "cpu")
    image = {"image": f"example.org/fusebox@sha256:{'5' * 64}", "base": f"python@{plan.target.base.runtime.digest}"}
    old = {**run, "stack": "another"}
    for runs, words in (
        ([run], "bare"),
        ([run, run | image], "bare, image `sha256:555555555555`"),
        ([run | image | {"base": "debian@sha256:1"}], "image `sha256:555555555555` on a substitute base"),
        ([old], "built"),
        ([], "planned"),
    ):
        assert tables._proved_as(dataclasses.replace(facts, runs=[(plan, each) for each in runs]), plan) == words
    assert evidence.where(run | image) == "x86-64 (image)"


def test_a_log_of_several_runs_says_so() -> None:
    facts = tables.Facts.of(Catalogue())
    target, run = facts.runs[0]
    twice = dataclasses.replace(facts, runs=[(target, run | {"runs_in_log": 2})])
    assert f"{run['name']}.log) of 2 runs" in tables.logs(twice)


@pytest.mark.parametrize(
    ("ids", "text"),
    [("", ""), ("A01", "A01"), ("A01 A02 A03", "A01-A03"), ("A01 A02 A05 A07 A08 B09", "A01-A02 A05 A07-A08 B09")],
)
def test_ranges(ids: str, text: str) -> None:
    assert ledger._ranges(ids.split()) == text.split()


def test_an_id_is_answered_by_the_best_that_there_is_for_it() -> None:
    answered = tables.ids_by_answer(tables.Facts.of(Catalogue()))
    proved, measured, claimed, beyond, left = answered.values()
    assert {"A12", "A13"} <= {*proved, *claimed}  # claims of an H200, proved as long as what they ran is unchanged
    assert "A06" in measured  # the proof of a patch
    assert not {*claimed} & {*proved, *measured}
    assert "D12" in beyond  # needs 512 GPUs
    assert "E08" in left  # needs four GPUs


@pytest.mark.parametrize("report", sorted(TRAINING.glob("*--*--*.json")), ids=lambda path: path.stem)
def test_what_is_said_of_parity_is_of_the_curves_beside_it(report: Path) -> None:
    rows = [json.loads(line) for line in report.with_suffix(".jsonl").read_text().splitlines()]
    seeds: dict[str, set[int]] = {}
    for row in rows:
        assert len(row["loss"]) == len(row["norm"]) == row["options"]["steps"] >= 1000
        seeds.setdefault(row["arm"], set()).add(row["seed"])
    summary = json.loads(report.read_text())
    assert summary["reference"] == rows[0]["arm"]
    assert {arm: set(content["seeds"]) for arm, content in summary["arms"].items()} == seeds
    last = {arm: statistics.mean(row["loss"][-1] for row in rows if row["arm"] == arm) for arm in seeds}
    half = {(row["arm"], row["seed"]): statistics.mean(row["loss"][len(row["loss"]) // 2 :]) for row in rows}
    for arm, compared in summary["arms"].items():
        apart = [half[arm, seed] - half[compared["beside"], seed] for seed in compared["seeds"]]
        assert compared.get("differences", [0.0] * len(apart)) == pytest.approx(apart, abs=1e-6)
        assert ("verdict" in compared) == (len(apart) >= 5 and arm != compared["beside"])
    assert {arm: content["end"] for arm, content in summary["arms"].items()} == pytest.approx(last)
