"""The committed mutants name claims that exist, survivors and changed outcomes are shown, a run is kept whole."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recipes.__main__ import parsed
from recipes.catalogue.load import Catalogue
from recipes.catalogue.plan import plan
from recipes.errors import Refusal
from recipes.files import ROOT
from recipes.make import environment
from recipes.pages import faults
from recipes.pages.tables import Facts
from recipes.prove import mutants, proofs, records
from recipes.prove.claims import table_of
from recipes.prove.definitions import unpacked
from recipes.tests.conftest import Checkout, script
from recipes.tests.rooms import checkout_room
from recipes.verbs import prove as verbs

RUNS = mutants.committed(ROOT)
CPU = plan(Catalogue(), "cpu")
each_run = pytest.mark.parametrize("run", RUNS, ids=[f"{run['target']}--{run['hardware']['name']}" for run in RUNS])


@each_run
def test_every_mutant_names_a_claim_that_existed(run: dict[str, Any]) -> None:
    """A claim that was renamed since leaves its mutants changed, and not wrong."""
    known = set(checkout_room().claims)
    changed = {
        mutants.identity(row) for row in mutants.changed(mutants.Keys(ROOT), run, plan(Catalogue(), run["target"]))
    }
    for row in run["mutants"]:
        if row["origin"] != "rule" and mutants.identity(row) not in changed:
            assert set(row["claims"]) <= known, row["name"]


def test_every_planted_fault_names_a_claim_that_exists() -> None:
    """As the source names it, run or not; the file may stand apart from the test's name there."""
    room = checkout_room()
    known = {claim.partition("::")[2] for claim in room.claims}
    for where in ("faults/", "training/faults.py"):
        planted = [each for place, each in room.code.definitions.items() if place[0].startswith(where)]
        strings = {text for each in planted for text in each.strings}
        named = {match[1] for text in strings if (match := re.search(r"(?:^|::)(test_\w*)$", text))}
        parts = {name for name in named if name.endswith("_")}  # code adds the rest of the name
        assert named and named - parts <= known, named - known
        assert all(any(name.startswith(part) for name in known) for part in parts), parts


@each_run
def test_no_mutant_is_counted_twice(run: dict[str, Any]) -> None:
    counts = Counter((row["name"], row["operator"], row["column"]) for row in run["mutants"])
    assert counts.most_common(1)[0][1] == 1, counts.most_common(3)


def test_the_cpu_target_has_enough_of_them() -> None:
    (run,) = [run for run in RUNS if run["target"] == "cpu"]
    counted = [row for row in run["mutants"] if row["outcome"] in mutants.COUNTED]
    assert len({(row["name"], row["operator"]) for row in counted if row["origin"] == "chosen"}) >= 50
    assert sum(row["origin"] == "rule" and row["outcome"] == "caught" for row in counted) >= 20
    assert run["clean"]["seeds"] >= 100
    assert run["clean"]["alarms"] == []


def outcomes(**changes: Any) -> dict[str, Any]:
    """Outcomes of a made-up run with one mutant."""
    test = "test_fused_ops.py::test_swiglu"
    row: dict[str, Any] = {"name": "off", "kind": "scale", "origin": "chosen", "operator": "swiglu", "column": "torch"}
    row |= {"claims": [test], "outcome": "caught", "by": f"{test}[torch]", "said": "", "why": ""}
    hardware = {"name": "x86-64", "cpu": "CPU"}
    clean = {"seeds": 3, "claims": 9, "alarms": [], "processes": 1}
    run = {"target": "cpu", "stack": CPU.stack, "hardware": hardware, "files": {}, "failing": [], "clean": clean}
    return run | {"mutants": [row | changes]}


def keep(root: Path, run: dict[str, Any]) -> Path:
    """Commit outcomes to a made-up checkout."""
    path = root / "smoke_tests" / "evidence" / "mutants" / "cpu--x86-64.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(run))
    (root / "smoke_tests" / mutants.COMPILED).write_text("fault = []\n")
    return path


def test_a_caught_mutant_is_shown_with_its_claim(tmp_path: Path) -> None:
    keep(tmp_path, outcomes())
    text = faults.text(tmp_path, {"cpu": CPU})
    assert "1 caught" in text
    assert "| off | swiglu `torch` | scale | `test_swiglu` |" in text


def test_a_survivor_is_shown_with_its_reason_or_without(tmp_path: Path) -> None:
    path = keep(tmp_path, outcomes(outcome="survived"))
    assert "| off | swiglu `torch` | **not known** |" in faults.text(tmp_path, {"cpu": CPU})
    path.write_text(json.dumps(outcomes(outcome="survived", why="it is the same number")))
    assert "| off | swiglu `torch` | it is the same number |" in faults.text(tmp_path, {"cpu": CPU})


def test_a_compiled_fault_that_was_not_planted_is_named(tmp_path: Path) -> None:
    path = keep(tmp_path, outcomes())
    here = '[[fault]]\nname = "halved"\noperator = "swiglu"\ncolumn = "torch"\n\n'
    elsewhere = '[[fault]]\nname = "doubled"\noperator = "swiglu"\ncolumn = "xformers"\n'
    (tmp_path / "smoke_tests" / mutants.COMPILED).write_text(here + elsewhere)
    assert "compiled code that were not planted: halved." in faults.text(tmp_path, {"cpu": CPU})
    path.write_text(json.dumps(outcomes(name="halved", origin="compiled")))
    assert "were not planted" not in faults.text(tmp_path, {"cpu": CPU})


def test_what_the_rule_changes_in_training_is_there_with_its_claims() -> None:
    room = checkout_room()
    for row in json.loads((room.folder / mutants.RULED).read_text()):
        assert row["claims"] and set(row["claims"]) <= set(room.claims), row
        for name in row["names"]:
            file, owner = f"training/{row['module']}.py", name.rpartition(".")[0]
            assert {(file, name), (file, owner)} & set(room.code.definitions), name


def test_a_mutant_of_training_depends_on_its_own_row_of_the_ruled_code(tmp_path: Path) -> None:
    folder = room_in(tmp_path)
    (folder / "training").mkdir()
    (folder / "faults").mkdir()
    (folder / "training" / "schedule.py").write_text("def rate_at():\n    return 1\n")
    ruled = {"name": "schedule.rate_at 1:11: 1: 1 becomes 2", "column": "training", "origin": "rule"}
    claims = {"claims": ["test_fused_ops.py::test_rope"]}
    made = [outcomes(by="test_fused_ops.py::test_rope"), outcomes(outcome="survived", by="")]
    rows = [{**each["mutants"][0], **ruled, **claims} for each in made]
    keys = []
    for listed, other in ((["a"], ["b"]), (["a"], ["c"]), (["a", "c"], ["b"]), ([], ["b"])):
        table = [{"module": "schedule", "names": ["rate_at"], "claims": listed}] if listed else []
        table.append({"module": "guard", "names": ["vote"], "claims": other})
        (folder / mutants.RULED).write_text(json.dumps(table))
        keys.append([mutants.Keys(tmp_path).of(row) for row in rows])
    (caught, survived), another, more, gone = keys
    assert caught and survived and another == [caught, survived]
    assert more[0] == caught and more[1] not in (None, survived), "a further claim may catch what survived"
    assert gone == [None, None]


def test_claims_that_fail_on_correct_code_are_named(tmp_path: Path) -> None:
    keep(tmp_path, outcomes() | {"failing": ["test_torch.py::test_flash_attention_ran"]})
    assert "These claims fail without any mutant and so catch none: test_torch.py::" in faults.text(
        tmp_path, {"cpu": CPU}
    )


def test_a_mutant_depends_on_the_reason_that_it_has_and_on_no_other(tmp_path: Path) -> None:
    folder = room_in(tmp_path)
    (folder / "faults").mkdir()
    (folder / "mutants.py").write_text(
        "from smoke_tests.faults.survivors import WHY\n\ndef judged():\n    return WHY\n"
    )
    caught, reasoned = outcomes(by="test_fused_ops.py::test_swiglu[torch]"), outcomes(outcome="survived", why="equal")
    text = 'WHY = []\n\n@explains("a", "equal")\ndef is_equal():\n    return 1\n'
    other = '\n@explains("b", "lost")\ndef is_lost():\n    return 1\n'
    keys = []
    for reasons in (text, text + other, text.replace("return 1", "return 2"), text.replace('"equal"', '"alike"')):
        (folder / "faults" / "survivors.py").write_text(reasons)
        keys.append([mutants.Keys(tmp_path).of(made["mutants"][0]) for made in (caught, reasoned)])
    (of_caught, of_reasoned), with_other, with_another_test, without = keys
    assert of_caught and of_reasoned and with_other == [of_caught, of_reasoned]
    assert with_another_test[0] == of_caught and with_another_test[1] not in (None, of_reasoned)
    assert without == [of_caught, None]


ROOM = {
    "test_fused_ops.py": "import bounds\n\ndef test_swiglu():\n    assert bounds.SLOPE\n\ndef test_rope():\n    pass\n",
    "faults.py": "def off():\n    return 1\n\ndef other():\n    return 1\n",
    "mutants.py": "def outcome_of():\n    return 1\n",
    "bounds.py": "SLOPE = 0.004\nOTHER = 1\n",
}


def room_in(folder: Path) -> Path:
    """The folder smoke_tests in another folder, made of ROOM."""
    room = folder / "smoke_tests"
    room.mkdir()
    for name, text in ROOM.items():
        (room / name).write_text(text)
    return room


@pytest.mark.parametrize(
    ("file", "old", "new", "changed"),
    [
        ("bounds.py", "0.004", "0.4", True),
        ("bounds.py", "OTHER = 1", "OTHER = 2", False),
        ("faults.py", "def off():\n    return 1", "def off():\n    return 2", True),
        ("faults.py", "def other():\n    return 1", "def other():\n    return 2", False),
        ("faults.py", "def off()", "def gone()", True),
        ("mutants.py", "return 1", "return 2", True),
        ("test_fused_ops.py", "    pass", "    return", False),
        ("test_fused_ops.py", "    assert", "    # why\n    assert", False),
    ],
)
def test_a_mutant_whose_claim_or_fault_changed_is_counted(
    tmp_path: Path, file: str, old: str, new: str, changed: bool
) -> None:
    folder = room_in(tmp_path)
    made = outcomes(by="test_fused_ops.py::test_swiglu[torch]")
    made["mutants"][0]["key"] = mutants.Keys(tmp_path).of(made["mutants"][0])
    keep(tmp_path, made | {"commit": "68ebab4"})
    sentence = "For 1 of these 1 mutants, code that decided the outcome has changed since 68ebab4"
    assert sentence not in faults.text(tmp_path, {"cpu": CPU})
    (folder / file).write_text(ROOM[file].replace(old, new))
    assert (sentence in faults.text(tmp_path, {"cpu": CPU})) == changed


def test_mutants_beside_other_packages_have_changed(tmp_path: Path) -> None:
    """So they have where the target is gone, and not where GPU architectures were left out."""
    room_in(tmp_path)
    made = outcomes(by="test_fused_ops.py::test_swiglu[torch]")
    made["mutants"][0]["key"] = mutants.Keys(tmp_path).of(made["mutants"][0])
    path = keep(tmp_path, made | {"commit": "68ebab4"})
    sentence = "For 1 of these 1 mutants, a pinned input of the target has changed since 68ebab4"
    assert sentence not in faults.text(tmp_path, {"cpu": CPU}) and sentence in faults.text(tmp_path, {})
    path.write_text(json.dumps(made | {"commit": "68ebab4", "stack": "0" * 64}))
    assert sentence in faults.text(tmp_path, {"cpu": CPU})
    whole, fewer = (plan(Catalogue(), "cu12.1-torch2.1", sm) for sm in (None, ["9.0"]))
    assert len(whole.stacks) == 3 and {whole.stack, fewer.stack} < whole.stacks and fewer.stacks == {fewer.stack}


@pytest.mark.parametrize(("until", "changed"), [("2", True), ("99", False)])
def test_a_mutant_whose_claim_has_left_the_target_has_changed(tmp_path: Path, until: str, changed: bool) -> None:
    room = room_in(tmp_path)
    test = f'@proves("Claim.", until="{until}")\ndef test_amax():\n    pass\n'
    (room / "test_torch.py").write_text(test)
    run = outcomes(claims=["test_torch.py::test_amax"], by="test_torch.py::test_amax")
    run["mutants"][0]["key"] = mutants.Keys(tmp_path).of(run["mutants"][0])
    assert bool(mutants.changed(mutants.Keys(tmp_path), run, CPU)) == changed


def test_a_changed_mutant_names_the_commit_at_which_it_was_planted(tmp_path: Path) -> None:
    room_in(tmp_path)
    made = outcomes(by="test_fused_ops.py::test_swiglu[torch]")
    made["mutants"][0] |= {"key": "0" * 64, "commit": "7ac1e2d"}
    keep(tmp_path, made | {"commit": "68ebab4", "earlier": {"7ac1e2d": made["hardware"]}})
    shown = faults.text(tmp_path, {"cpu": CPU})
    assert "has changed since 7ac1e2d" in shown and "68ebab4" not in shown


RECORDED = {
    **ROOM,
    "bounds.py": "OTHER = 1\n\ndef slope():\n    return 0.004\n\ndef unused():\n    return OTHER\n",
    "test_fused_ops.py": ROOM["test_fused_ops.py"].replace("bounds.SLOPE", "bounds.slope()"),
    "mutants.py": "import bounds\n\ndef outcome_of():\n    return bounds.unused()\n",
}
FUNCTIONS = ["bounds.py:slope", "mutants.py:outcome_of", "test_fused_ops.py:test_swiglu"]


def kept_from_a_record(root: Path, **changes: Any) -> dict[str, Any]:
    """The kept outcomes of a made-up checkout in which the functions of a mutant were recorded."""
    for name, text in RECORDED.items():
        path = root / "smoke_tests" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    made = outcomes(functions=FUNCTIONS, compiled=[], **changes)
    (root / "outcomes.json").write_text(json.dumps(made))
    mutants.keep(replace(CPU, root=root), root / "outcomes.json")
    (written,) = mutants.committed(root)
    return written


@pytest.mark.parametrize(
    ("file", "old", "new", "changed"),
    [
        ("bounds.py", "0.004", "0.4", True),
        ("bounds.py", "OTHER = 1", "OTHER = 2", False),  # mutants.py can reach it, but it did not run
        ("faults.py", "def off():\n    return 1", "def off():\n    return 2", True),
        ("faults.py", "def other():\n    return 1", "def other():\n    return 2", False),
        ("mutants.py", "return bounds", "return not bounds", True),
        ("test_fused_ops.py", "    pass", "    return", False),
        ("test_fused_ops.py", "test_swiglu", "test_silu", True),
    ],
)
def test_a_recorded_mutant_depends_on_what_ran(tmp_path: Path, file: str, old: str, new: str, changed: bool) -> None:
    run = kept_from_a_record(tmp_path, by="test_fused_ops.py::test_swiglu[torch]")
    assert [text.partition(":")[2] for text in run["definitions"]] == ["slope", "outcome_of", "test_swiglu"]
    assert run["mutants"][0]["functions"] == "0-2" and not mutants.changed(mutants.Keys(tmp_path), run, CPU)
    path = tmp_path / "smoke_tests" / file
    assert old in RECORDED[file]
    path.write_text(RECORDED[file].replace(old, new))
    assert bool(mutants.changed(mutants.Keys(tmp_path), run, CPU)) == changed


@pytest.mark.parametrize(("outcome", "changed"), [("survived", True), ("left out", True), ("too loud", False)])
def test_a_new_claim_may_catch_what_was_not_caught(tmp_path: Path, outcome: str, changed: bool) -> None:
    run = kept_from_a_record(tmp_path, by="", claims=["test_fused_ops.py"], outcome=outcome)
    path = tmp_path / "smoke_tests" / "test_fused_ops.py"
    path.write_text(RECORDED[path.name] + "\ndef test_of_today():\n    pass\n")
    assert bool(mutants.changed(mutants.Keys(tmp_path), run, CPU)) == changed


def test_a_recorded_mutant_that_torch_compiled_depends_on_all_that_it_can_reach(tmp_path: Path) -> None:
    run = kept_from_a_record(tmp_path, by="test_fused_ops.py::test_swiglu[torch]")
    (row,) = run["mutants"]
    of_torch = {**row, "compiled": row["functions"]}
    assert mutants.Keys(tmp_path).of(of_torch, table_of(run)) not in (None, row["key"])


def test_a_mutant_that_is_compiled_depends_on_its_own_row_of_the_list(tmp_path: Path) -> None:
    listed = tmp_path / "smoke_tests" / mutants.COMPILED
    listed.parent.mkdir()
    keys: list[str | None] = []
    for name, new in (("off", "a"), ("off", "b"), ("off", "b"), ("gone", "b")):
        others = f'[[fault]]\nname = "another"\nnew = "{len(keys)}"\n'
        listed.write_text(f'[[fault]]\nname = "{name}"\nnew = "{new}"\n\n{others}')
        run = kept_from_a_record(tmp_path, origin="compiled", by="test_fused_ops.py::test_swiglu[torch]")
        keys.append(run["mutants"][0]["key"])
    assert keys[3] is None and None not in keys[:3] and keys[0] != keys[1] == keys[2]


# A stand-in for an environment's Python: writes outcomes, except with 0 seeds, and exits with the number of seeds.
PLANTING = """#!/bin/sh
test "$2" = smoke_tests.mutants && test "$3" = --out && test "$5" = --seeds && test "$7" = --compiled || exit 3
mkdir -p "$(dirname "$4")"
test "$6" = 0 || cp "$(dirname "$0")/outcomes.json" "$4"
exit $6
"""


def test_outcomes_that_are_not_there_are_refused(checkout: Checkout) -> None:
    checkout.refuse("mutants", "cpu", "--from", "nofile", naming=("--from nofile is not a file", "pass the one"))


def test_a_run_is_kept_and_says_whether_there_was_a_false_alarm(tmp_path: Path) -> None:
    chosen = plan(Catalogue(), "cpu")
    here = type(chosen)(tmp_path, chosen.target, chosen.pins, chosen.patches, chosen.lock)
    python = script(tmp_path / "env" / "bin" / "python", PLANTING)
    (python.parent / "outcomes.json").write_text(json.dumps(outcomes()))
    for seeds, why in ((0, "not a complete run of cpu"), (2, "code 2")):
        with pytest.raises(Refusal, match=why):
            mutants.run(here, tmp_path / "env", tmp_path / "libraries", seeds)
        assert mutants.committed(tmp_path) == []
    assert mutants.run(here, tmp_path / "env", tmp_path / "libraries", seeds=1) == 1
    (written,) = mutants.committed(tmp_path)
    assert (written.pop("commit"), written["mutants"][0].pop("key")) == ("", None)
    assert written == outcomes() | {"definitions": {}}
    (tmp_path / "smoke_tests" / "bounds.py").write_text("SLOPE = 0.4\n")
    (tmp_path / "elsewhere.json").write_text(json.dumps(outcomes() | {"files": {"bounds.py": "0" * 64}}))
    with pytest.raises(Refusal, match="not a complete run of cpu with the tests of this checkout"):
        mutants.keep(here, tmp_path / "elsewhere.json")
    before = mutants.committed(tmp_path)
    for text, why in (
        ('{"cut o', "not valid JSON"),
        ("[]", "damaged or incomplete"),
        (json.dumps(outcomes() | {"clean": None}), r"damaged or incomplete \(clean"),
    ):
        (tmp_path / "elsewhere.json").write_text(text)
        with pytest.raises(Refusal, match=why):
            mutants.keep(here, tmp_path / "elsewhere.json")
    assert mutants.committed(tmp_path) == before


# A stand-in for an environment's Python, in Python: the claims alone leave no mutants, and a whole run plants those of
# outcomes.json that the files of its processes do not hold.
GOING_ON = f"""#!{sys.executable}
import json, sys
from pathlib import Path

words, beside = sys.argv[1:], Path(__file__).parent
out = Path(words[words.index("--out") + 1])
state = json.loads((beside / "outcomes.json").read_text())
if "--share" in words:
    state = {{**state, "mutants": [], "clean": {{**state["clean"], "seeds": 0}}}}
else:
    before = json.loads(out.read_text())
    shares = [json.loads(path.read_text()) for path in sorted(out.parent.glob(out.name + ".*-of-*"))]
    rows = {{row["name"]: row for share in shares for row in share["mutants"]}}
    planted = [row["name"] for row in state["mutants"] if row["name"] not in rows]
    (beside / "planted.json").write_text(json.dumps([words[words.index("--processes") + 1], len(shares), planted]))
    mutants = [rows.get(row["name"], row) for row in state["mutants"]]
    clean = {{**state["clean"], "seeds": int(words[words.index("--seeds") + 1])}}
    state = {{**before, "mutants": mutants, "clean": clean}}
out.parent.mkdir(parents=True, exist_ok=True)
out.write_text(json.dumps(state))
"""


class Again:
    """A made-up checkout with a kept run of two mutants, each with another claim, and an environment."""

    def __init__(self, folder: Path) -> None:
        self.room = room_in(folder)
        self.plan = replace(CPU, root=folder)
        self.run = outcomes() | {"commit": "68ebab4"}
        (row,) = self.run["mutants"]
        self.run["mutants"] = [
            {**row, "name": name, "claims": [f"test_fused_ops.py::{test}"], "by": f"test_fused_ops.py::{test}"}
            for name, test in (("off", "test_swiglu"), ("other", "test_rope"))
        ]
        keys = mutants.Keys(folder)
        self.run["mutants"] = [{**row, "key": keys.of(row)} for row in self.run["mutants"]]
        assert all(row["key"] for row in self.run["mutants"])
        self.path = keep(folder, self.run)
        self.python = script(folder / "env" / "bin" / "python", GOING_ON)

    def plant(self, seeds: int = 0, **state: Any) -> list[Any]:
        """What was planted, in how many processes, on a machine of another CPU."""
        new = {**self.run, "hardware": {"name": "x86-64", "cpu": "newer"}, **state}
        (self.python.parent / "outcomes.json").write_text(json.dumps(new))
        folder = self.plan.root
        assert mutants.run(self.plan, folder / "env", folder / "libraries", seeds, only_changed=True) == 0
        processes, shares, planted = json.loads((self.python.parent / "planted.json").read_text())
        assert int(processes) == shares >= 2
        assert not list((folder / "build").rglob("*-of-*"))
        return list(planted)


def test_only_what_has_changed_is_planted_again(tmp_path: Path) -> None:
    """The others keep their commit and its machine, through another such run too; the seeds keep theirs."""
    again = Again(tmp_path)
    (again.room / "bounds.py").write_text(ROOM["bounds.py"].replace("0.004", "0.4"))
    assert again.plant() == ["off"]
    (written,) = mutants.committed(tmp_path)
    assert [row.get("commit") for row in written["mutants"]] == [None, "68ebab4"]
    assert written["earlier"] == {"68ebab4": {"name": "x86-64", "cpu": "CPU"}}
    assert written["clean"] == {**again.run["clean"], "commit": "68ebab4"}
    assert not mutants.changed(mutants.Keys(tmp_path), written, CPU)
    assert "1 of these 2 mutants were planted at 68ebab4 (CPU)." in faults.text(tmp_path, {"cpu": CPU})
    again.path.write_text(json.dumps({**written, "commit": "7ac1e2d"}))
    (again.room / "faults.py").write_text(
        ROOM["faults.py"].replace("def off():\n    return 1", "def off():\n    return 2")
    )
    assert again.plant(seeds=5) == ["off"]
    (written,) = mutants.committed(tmp_path)
    assert written["earlier"] == {"68ebab4": {"name": "x86-64", "cpu": "CPU"}}
    assert written["clean"]["seeds"] == 5 and "commit" not in written["clean"]


def test_what_is_not_planted_again_keeps_its_record(tmp_path: Path) -> None:
    """Its functions may have other numbers, and other places, than before."""
    again = Again(tmp_path)
    (again.room / "more.py").write_text("def slope():\n    return 1\n")
    rows = [{**row, "compiled": []} for row in again.run["mutants"]]
    rows[0]["functions"] = ["faults.py:off", "test_fused_ops.py:test_swiglu"]
    rows[1]["functions"] = ["more.py:slope", "test_fused_ops.py:test_rope"]
    (tmp_path / "outcomes.json").write_text(json.dumps({**again.run, "mutants": rows}))
    again.path.unlink()
    mutants.keep(again.plan, tmp_path / "outcomes.json")
    (run,) = mutants.committed(tmp_path)
    again.path.write_text(json.dumps({**run, "commit": "68ebab4"}))
    (again.room / "more.py").rename(again.room / "again.py")
    (again.room / "bounds.py").write_text(ROOM["bounds.py"].replace("0.004", "0.4"))
    again.run["mutants"] = [{**rows[0], "functions": ["test_fused_ops.py:test_swiglu"]}, rows[1]]
    assert again.plant() == ["off"]
    (written,) = mutants.committed(tmp_path)
    table = list(written["definitions"])
    named = [[table[number] for number in unpacked(row["functions"])] for row in written["mutants"]]
    assert named == [["test_fused_ops.py:test_swiglu"], ["again.py:slope", "test_fused_ops.py:test_rope"]]
    assert not mutants.changed(mutants.Keys(tmp_path), written, CPU)


def test_a_mutant_whose_claim_fails_here_is_planted_again(tmp_path: Path) -> None:
    assert Again(tmp_path).plant(failing=["test_fused_ops.py::test_rope"]) == ["other"]


def test_a_survivor_without_a_reason_is_planted_again(tmp_path: Path) -> None:
    again = Again(tmp_path)
    for row in again.run["mutants"]:
        row.update(outcome="survived", by="", why="equal" if row["name"] == "off" else "")
    (again.room / "faults").mkdir()
    (again.room / "faults" / "survivors.py").write_text('@explains("off", "equal")\ndef is_equal():\n    return 1\n')
    keys = mutants.Keys(tmp_path)
    rows = [{**row, "key": keys.of(row)} for row in again.run["mutants"]]
    again.path.write_text(json.dumps({**again.run, "mutants": rows}))
    assert again.plant() == ["other"]


def test_a_stopped_run_of_changed_mutants_goes_on(tmp_path: Path) -> None:
    """What a process has planted before the stop is not planted again."""
    again = Again(tmp_path)
    (again.room / "bounds.py").write_text(ROOM["bounds.py"].replace("0.004", "0.4"))
    out = environment.folder(tmp_path, again.plan.target) / "mutants.json"
    again.python.write_text(GOING_ON + "sys.exit(9 if '--share' not in words else 0)\n")
    with pytest.raises(Refusal, match="code 9"):
        again.plant()
    share = next(out.parent.glob("*.0-of-*"))
    state = json.loads(share.read_text())
    share.write_text(json.dumps({**state, "mutants": [*state["mutants"], again.run["mutants"][0]]}))
    again.python.write_text(GOING_ON)
    assert again.plant() == []


def test_mutants_beside_other_packages_or_of_other_hardware_are_not_kept_on(tmp_path: Path) -> None:
    again = Again(tmp_path)
    with pytest.raises(Refusal, match="beside other packages"):
        again.plant(stack="2")
    again.python.parent.joinpath("outcomes.json").unlink()
    with pytest.raises(Refusal, match="No mutants of cpu on H200 are kept"):
        again.plant(hardware={"name": "H200", "cpu": "CPU"})
    again.path.unlink()
    again.python.unlink()  # nothing runs
    with pytest.raises(Refusal, match="No mutants of cpu are kept: leave --changed out"):
        again.plant()


def test_a_wrong_number_of_seeds_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parsed(["mutants", "cpu", "--seeds", "-1"])
    assert "-1 is not a number from 0 on" in capsys.readouterr().err


def test_changes_names_the_mutants_and_records_that_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "smoke_tests"
    for name, text in (ROOM | {"training/kills.py": "import bounds\n\ndef kill():\n    return bounds.SLOPE\n"}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    run = outcomes(by="test_fused_ops.py::test_swiglu[torch]")
    run["mutants"][0]["key"] = mutants.Keys(tmp_path).of(run["mutants"][0])
    keep(tmp_path, run | {"commit": "68ebab4"})
    record = folder / "evidence" / "training" / "kills.json"
    record.parent.mkdir()
    record.write_text("{}")
    monkeypatch.setattr(records, "commit_of", lambda root: "1234567")
    records.note(replace(CPU, root=tmp_path), record)
    facts = SimpleNamespace(root=tmp_path, runs=[], plan_of={"cpu": CPU}, proofs=proofs.inputs(Catalogue()))
    monkeypatch.setattr(Facts, "of", lambda catalogue: facts)

    def listed() -> list[str]:
        assert verbs.changes(argparse.Namespace()) == 0
        return capsys.readouterr().out.splitlines()[-2:]

    names = ["mutants/cpu--x86-64, since 68ebab4", "training/kills.json, since 1234567"]
    assert listed() == [f"{name}: nothing changed" for name in names]
    (folder / "bounds.py").write_text(ROOM["bounds.py"].replace("0.004", "0.4"))
    assert listed() == [
        f"{names[0]}: 1 of 1 mutants, such as off",
        f"{names[1]}: the program training/kills.py has changed",
    ]
    record.write_text('{"killed": 1}')
    assert listed()[1] == f"{names[1]}: the record has changed"
