"""What an outcome rests on: each definition by its syntax, wherever it is; and every function of the room, mutated."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from recipes.catalogue.load import Catalogue
from recipes.catalogue.plan import plan
from recipes.files import ROOT
from recipes.prove import evidence
from recipes.prove.claims import OUTSIDE, Room
from recipes.prove.definitions import Code, packed, unpacked
from recipes.prove.parsing import Place
from recipes.tests.conftest import interpreter
from recipes.tests.rooms import PlantedRoom, checkout_room

TEST = """
from claims import proves
import references
from table import ROWS, closed_form as formula

@proves("values are right", seed="A09")
def test_values(device):
    for name in ROWS:
        assert getattr(references, name)(3) == formula(3)

@proves("a script ends well")
def test_script():
    import subprocess, sys
    from helpers import command
    assert subprocess.call(command("job.py")) == 0
"""
FILES = {
    "test_alpha.py": TEST,
    "references.py": "import math\n\ndef double(x):\n    return add(x, x)\n\ndef add(a, b):\n    return a + b\n\n"
    "def other(x):\n    return math.pi\n",
    "table.py": "ROWS = ['double']\n\ndef closed_form(x):\n    return 2 * x\n",
    "helpers.py": "import sys\n\ndef command(file):\n    return [sys.executable, file]\n",
    "job.py": "OPTIONS = 'job.json'\n\ndef work():\n    return 0 if OPTIONS else 1\n\n"
    "if __name__ == '__main__':\n    raise SystemExit(work())\n",
    "conftest.py": "import pytest\n\n@pytest.fixture\ndef device():\n    return 'cpu'\n\n"
    "def judge(report):\n    return report\n",
    "claims.py": "def proves(*_, **__):\n    return lambda test: test\n",
    "pytest.ini": "[pytest]\naddopts = -n0\n",
    "job.json": '{"stage": 1}\n',
}
VALUES, SCRIPT = "test_alpha.py::test_values", "test_alpha.py::test_script"
RAN = {
    VALUES: [("test_alpha.py", "test_values"), ("references.py", "double"), ("references.py", "add"),
             ("table.py", "closed_form")],
    SCRIPT: [("test_alpha.py", "test_script"), ("helpers.py", "command"), ("job.py", "work")],
}  # fmt: skip


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with nothing but smoke tests."""
    (tmp_path / "smoke_tests").mkdir()
    for name, text in FILES.items():
        (tmp_path / "smoke_tests" / name).write_text(text)
    return tmp_path


def edit(checkout: Path, file: str, old: str, new: str) -> None:
    path = checkout / "smoke_tests" / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def recorded(code: Code, places: list[Place]) -> Any:
    """As evidence keeps what these functions rest on."""
    every = code.ran(places, frozenset(place for ran in RAN.values() for place in ran))
    return tuple((place, code.definitions[place].digest) for place in sorted(every)), code.key(every)


def changed_by(checkout: Path, change: Callable[[], None]) -> tuple[set[str], set[str]]:
    """The claims that read "changed" after a change: by what they ran, and by what they can reach."""
    before = Room(checkout)
    runs = {claim: recorded(before.code, places) for claim, places in RAN.items()}
    floors = {claim: before.key(claim) for claim in RAN}
    change()
    after = Room(checkout)
    by_record = {claim for claim, (table, key) in runs.items() if after.code.key_now(table) != key}
    return by_record, {claim for claim in RAN if after.key(claim) != floors[claim]}


BOTH = {VALUES, SCRIPT}


@pytest.mark.parametrize(
    ("file", "old", "new", "ran", "reached"),
    [
        pytest.param("test_alpha.py", "== formula(3)", "== formula(4)", {VALUES}, {VALUES}, id="the test"),
        pytest.param("test_alpha.py", "values are right", "values are good", {VALUES}, {VALUES}, id="its sentence"),
        pytest.param("references.py", "return add(x, x)", "return add(x, 2 * x)", {VALUES}, {VALUES}, id="by getattr"),
        pytest.param("references.py", "return a + b", "return b + a", {VALUES}, {VALUES}, id="through code"),
        pytest.param("references.py", "return math.pi", "return math.e", set(), {VALUES}, id="not run"),
        pytest.param("table.py", "['double']", "['double', 'other']", {VALUES}, {VALUES}, id="data that it reads"),
        pytest.param("table.py", "return 2 * x", "return x + x", {VALUES}, {VALUES}, id="by another name"),
        pytest.param("test_alpha.py", "closed_form as formula", "ROWS as formula", {VALUES}, {VALUES}, id="an import"),
        pytest.param("helpers.py", "[sys.executable, file]", "[sys.executable, '-B', file]", {SCRIPT}, {SCRIPT},
                     id="a local import"),
        pytest.param("job.py", "return 0 if", "return False if", {SCRIPT}, {SCRIPT}, id="a script named by a string"),
        pytest.param("job.py", "SystemExit(work())", "SystemExit(not work())", {SCRIPT}, {SCRIPT}, id="its main"),
        pytest.param("job.json", '"stage": 1', '"stage": 2', {SCRIPT}, {SCRIPT}, id="a file of data named by a string"),
        pytest.param("conftest.py", "return 'cpu'", "return 'cuda'", BOTH, BOTH, id="a fixture"),
        pytest.param("conftest.py", "return report", "return None", BOTH, BOTH, id="the judge"),
        pytest.param("pytest.ini", "-n0", "-n1", BOTH, BOTH, id="pytest's options"),
        pytest.param("test_alpha.py", "import references\n", "import references\n\npytestmark = ['skip']\n", BOTH, BOTH,
                     id="marks"),
        pytest.param("references.py", "def add(a, b):\n", "def add(a, b):\n    # why\n    'A sum.'\n", set(), set(),
                     id="a comment and a docstring"),
        pytest.param("references.py", "import math\n", "import math\nimport torchao.float8\n", {VALUES}, {VALUES},
                     id="an import for what it does"),
        pytest.param("references.py", "import math\n", "from __future__ import annotations\nimport math\n", set(),
                     set(), id="a statement for the parser"),
    ],
)  # fmt: skip
def test_what_ran_decides(checkout: Path, file: str, old: str, new: str, ran: set[str], reached: set[str]) -> None:
    assert changed_by(checkout, lambda: edit(checkout, file, old, new)) == (ran, reached)


def test_what_claims_wrote_is_no_input_of_theirs(checkout: Path) -> None:
    def write() -> None:
        (checkout / "smoke_tests" / "evidence").mkdir()
        (checkout / "smoke_tests" / "evidence" / "job.json").write_text("{}")

    assert changed_by(checkout, write) == (set(), set())


def test_a_moved_definition_stays_what_it_is(checkout: Path) -> None:
    def move() -> None:
        edit(checkout, "table.py", "def closed_form(x):\n    return 2 * x\n", "")
        (checkout / "smoke_tests" / "formulas.py").write_text("def closed_form(x):\n    return 2 * x\n")
        edit(checkout, "test_alpha.py", "from table import ROWS, closed_form as formula",
             "from table import ROWS\nfrom formulas import closed_form as formula")  # fmt: skip

    assert changed_by(checkout, move) == (set(), set())


def test_a_moved_definition_keeps_what_its_imports_mean(checkout: Path) -> None:
    """It is looked up by a string in the module that it left, and uses a module from elsewhere."""
    edit(checkout, "references.py", "return add(x, x)", "return math.floor(add(x, x))")

    def move() -> None:
        edit(checkout, "references.py", "def double(x):\n    return math.floor(add(x, x))\n\n", "")
        edit(checkout, "references.py", "import math\n", "import math\nfrom doubled import double\n")
        (checkout / "smoke_tests" / "sums.py").write_text("def add(a, b):\n    return a + b\n")
        edit(checkout, "references.py", "def add(a, b):\n    return a + b\n\n", "from sums import add\n\n")
        (checkout / "smoke_tests" / "doubled.py").write_text(
            "import math\nfrom sums import add\n\ndef double(x):\n    return math.floor(add(x, x))\n"
        )

    assert changed_by(checkout, move) == (set(), set())


def test_a_renamed_module_changes_nothing(checkout: Path) -> None:
    def rename() -> None:
        folder = checkout / "smoke_tests"
        (folder / "references.py").rename(folder / "truth.py")
        edit(checkout, "test_alpha.py", "import references", "import truth")
        edit(checkout, "test_alpha.py", "getattr(references,", "getattr(truth,")

    ran, _ = changed_by(checkout, rename)
    assert ran == {VALUES}, "the test itself names the module"


def test_what_records_is_part_of_no_outcome(checkout: Path) -> None:
    """It is imported by what judges every claim, and so within reach of all."""
    for name in OUTSIDE:
        (checkout / "smoke_tests" / name).write_text("def note():\n    return 1\n")
        edit(checkout, "conftest.py", "import pytest\n", f"import pytest\nimport {name[:-3]}\n")
    edit(checkout, "conftest.py", "return report", "return recorder.note() or printed.note() or report")
    for name in OUTSIDE:
        assert changed_by(checkout, lambda name=name: edit(checkout, name, "return 1", "return 2")) == (set(), set())  # type: ignore[misc]


def test_a_program_that_is_started_counts_whole_where_a_kill_hides_what_it_ran(checkout: Path) -> None:
    code = Room(checkout).code
    started = code.started([("test_alpha.py", "test_script")])
    assert {("job.py", "work"), ("job.py", "<module>")} <= started
    assert not code.started([("test_alpha.py", "test_values")])


def test_a_twin_does_not_stand_for_what_changed(checkout: Path) -> None:
    """The same function in two files: the one that ran changes, the other does not."""
    (checkout / "smoke_tests" / "twin.py").write_text("def add(a, b):\n    return a + b\n")
    ran, _ = changed_by(checkout, lambda: edit(checkout, "references.py", "return a + b", "return b + a"))
    assert ran == {VALUES}


def test_a_name_that_means_another_definition_counts(checkout: Path) -> None:
    """Nothing that ran changes but what an import in between means."""
    (checkout / "smoke_tests" / "other.py").write_text("def closed_form(x):\n    return 7\n")
    redirect = ("test_alpha.py", "from table import ROWS, closed_form as formula",
                "from table import ROWS\nfrom other import closed_form as formula")  # fmt: skip
    ran, reached = changed_by(checkout, lambda: edit(checkout, *redirect))
    assert (ran, reached) == ({VALUES}, {VALUES})


def test_a_cached_function_counts_for_whoever_mentions_it(checkout: Path) -> None:
    """The second claim is given what the first one's call returned."""
    (checkout / "smoke_tests" / "table.py").write_text(
        "import functools\nROWS = ['double']\n\n@functools.lru_cache(maxsize=None)\ndef closed_form(x):\n"
        "    return twice(x)\n\ndef twice(x):\n    return 2 * x\n"
    )
    code = Room(checkout).code
    anywhere = frozenset({("table.py", "closed_form"), ("table.py", "twice")})
    without = [place for place in RAN[VALUES] if place[0] != "table.py"]
    assert anywhere <= code.ran(without, anywhere)
    assert ("table.py", "twice") not in code.ran(without, frozenset())


def test_compiled_code_counts_with_what_it_reaches_and_not_with_what_the_harness_does(checkout: Path) -> None:
    """What the harness calls is recorded; only what torch.compile has compiled calls functions unseen."""
    edit(checkout, "conftest.py", "    return report\n", "    import job\n    return job.work() or report\n")
    code = Room(checkout).code
    assert ("job.py", "work") in code.floor([])
    ran = code.ran([("references.py", "double")], frozenset(), compiled=[("references.py", "double")])
    assert ("references.py", "add") in ran and ("job.py", "work") not in ran


def test_keys_are_the_same_on_every_python(checkout: Path) -> None:
    """Written down here on 3.11, 3.12 and 3.13, which dump a syntax tree each in its own way."""
    code = Room(checkout).code
    assert {name: code.key(code.floor([place]))[:16] for name, (place, *_) in RAN.items()} == KEYS


KEYS = {VALUES: "788d025edf7d9c4a", SCRIPT: "0b73e5310c14d4f7"}


@pytest.mark.parametrize("numbers", [[], [3], [0, 1, 2], [0, 2, 3, 9]])
def test_numbers_are_packed(numbers: list[int]) -> None:
    assert list(unpacked(packed(numbers))) == numbers


# --- what is recorded ---

PLANTED = """
import importlib, subprocess, sys, threading
from functools import lru_cache
from pathlib import Path
from smoke_tests import helpers

@pytest.fixture(scope="module")
def shared():
    return helpers.shared()

@lru_cache(maxsize=None)
def trained():
    return helpers.trained()

@proves("one is called by name")
def test_named(shared):
    '''What it says.'''
    assert getattr(helpers, "by" + "_name")() == 1

@proves("one is called in a thread, by a local import")
def test_thread(shared):
    from smoke_tests.helpers import in_a_thread
    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    trained()

@proves("one is called in another process")
def test_process():
    here = Path(__file__).parent
    assert subprocess.call([sys.executable, "job.py"], cwd=str(here)) == 3
    trained()
"""
HELPERS = """
class Held:
    def method(self):
        return [inner for inner in (lambda: 1, )][0]()

def by_name():
    def nested():
        return Held().method()
    def unused():
        return 2
    return nested()

def in_a_thread():
    return 1

def shared():
    return 1

def trained():
    return 1

def never():
    return 1
"""


@pytest.mark.parametrize("processes", ["-n0", "-n2"])
def test_what_a_claim_runs_is_recorded(room: PlantedRoom, processes: str) -> None:
    room.plant(PLANTED)
    (room.folder / "helpers.py").write_text(HELPERS)
    (room.folder / "job.py").write_text("import os\n\ndef work():\n    os._exit(3)\n\nwork()\n")
    done = room.run(processes)
    assert done.returncode == 0, done.stdout
    rules = ("conftest.py", "claims.py", "hardware.py")
    ran = {
        claim.partition("::")[2]: {name for name in names if not name.startswith(rules)}
        for claim, names in room.outcomes()["ran"].items()
    }
    here, common = "test_alpha.py:", {"test_alpha.py:shared", "helpers.py:shared"}
    first = {f"{here}test_named", "helpers.py:by_name", "helpers.py:by_name.<locals>.nested", "helpers.py:Held.method"}
    assert ran["test_named"] - common == first
    assert ran["test_thread"] - common - {f"{here}trained", "helpers.py:trained"} == {
        f"{here}test_thread", "helpers.py:in_a_thread"
    }  # fmt: skip
    assert {f"{here}test_process", "job.py:work"} <= ran["test_process"]
    assert common <= ran["test_named"] | ran["test_thread"]
    assert not any("never" in name or "unused" in name for names in ran.values() for name in names)


AROUND_IMPORTS = """
def before():
    return 1

def after():
    return [inner() for inner in (lambda: 1,)]

def importing():
    def nested():
        before()
        import elsewhere
        return after()
    return nested()

def failing():
    try:
        import broken_elsewhere
    except KeyError:
        return after()

def last():
    return 1
"""


IN_TURN = """
import json, os, subprocess, sys
from smoke_tests import recorder, used

def mutant(number):
    with recorder.recording() as ran:
        child = [sys.executable, "-c", "from smoke_tests import used; used.second()"]
        used.first() if number else subprocess.run(child)
        recorder.switch("test_alpha.py::test")
        used.third()
        recorder.switch("")
        recorder.end()  # as pytest does at the end of a session
        used.fourth()
    return ran

before = dict(os.environ)
print(json.dumps([mutant(0), mutant(1), mutant(1)]))
assert dict(os.environ) == before
"""


def test_what_runs_is_recorded_several_times_in_a_process(room: PlantedRoom) -> None:
    names = ("first", "second", "third", "fourth")
    (room.folder / "used.py").write_text("".join(f"def {name}():\n    return 1\n\n" for name in names))
    made = subprocess.run(
        [interpreter("3.12"), "-B", "-c", IN_TURN], cwd=room.folder.parent, capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr
    ran = [{claim: names for claim, names in each.items() if claim != "data"} for each in json.loads(made.stdout)]
    claim = {"test_alpha.py::test": ["used.py:third"]}
    assert ran == [{"": ["used.py:second"], **claim}, *2 * [{"": ["used.py:first"], **claim}]]


@pytest.mark.parametrize("processes", ["-n0", "-n2"])
def test_what_runs_around_an_import_from_elsewhere_is_recorded(room: PlantedRoom, processes: str) -> None:
    room.plant(
        """
import subprocess, sys
from smoke_tests import around

@proves("it imports")
def test_imports():
    around.importing()
    around.failing()
    around.last()

@proves("its child imports")
def test_child():
    subprocess.check_call([sys.executable, "-m", "smoke_tests.job"])
"""
    )
    outside = room.folder.parent
    (outside / "elsewhere.py").write_text("import deeper_elsewhere\n\ndef own():\n    return 1\n\nown()\n")
    (outside / "deeper_elsewhere.py").write_text("class Deep:\n    def run(self):\n        return 1\n\nDeep().run()\n")
    (outside / "broken_elsewhere.py").write_text("def fail():\n    raise KeyError\n\nfail()\n")
    (room.folder / "around.py").write_text(AROUND_IMPORTS)
    calls = "around.importing()\n    around.failing()\n    around.last()"
    (room.folder / "job.py").write_text(
        f"from smoke_tests import around\n\ndef work():\n    {calls}\n\ndef end():\n    return 1\n\nwork()\nend()\n"
    )
    done = room.run(processes, PYTHONPATH=str(outside))
    assert done.returncode == 0, done.stdout
    ran = {
        claim.partition("::")[2]: {name for name in names if name.startswith(("around.py", "job.py"))}
        for claim, names in room.outcomes()["ran"].items()
    }
    names = ("before", "after", "importing", "importing.<locals>.nested", "failing", "last")
    around = {f"around.py:{name}" for name in names}
    assert ran["test_imports"] == around
    assert ran["test_child"] == around | {"job.py:work", "job.py:end"}


# --- every function of the room ---

CPU = plan(Catalogue(), "cpu")
SHARES = 24


def with_a_statement_more(path: Path, name: str) -> str:
    """A file's text with one more statement in a function, on a line of its own."""
    text = path.read_text(encoding="utf-8")
    lines, bodies = text.splitlines(keepends=True), []

    def walk(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                if prefix + child.name == name:
                    bodies.append(child)
                walk(child, f"{prefix}{child.name}.<locals>.")
            elif isinstance(child, ast.ClassDef):
                walk(child, f"{prefix}{child.name}.")
            else:
                walk(child, prefix)

    walk(ast.parse(text), "")
    for node in sorted(bodies, key=lambda node: -node.lineno):
        last = node.body[-1]
        lines.insert(int(last.end_lineno or 0), " " * last.col_offset + "0\n")
    assert bodies, (path, name)
    return "".join(lines)


def rows_of(run: dict[str, Any], code: Code) -> dict[str, frozenset[Place]]:
    """The functions that each row was seen to run, as far as they are still there."""
    table = [tuple(text.split(":", 1)) for text in run["definitions"]]
    rows = {}
    for row in run["claims"]:
        seen = [table[number] for number in unpacked(row.get("functions", ""))]
        rows[row["id"]] = frozenset((file, name) for file, name in seen if (file, name) in code.definitions)
    return {row: functions for row, functions in rows.items() if functions}


class Recorded:
    """What each row of cpu's evidence ran, and its key, as the checkout has them."""

    def __init__(self) -> None:
        (run,) = evidence.promoted(ROOT, "cpu")
        self.code = checkout_room().code
        self.functions = rows_of(run, self.code)
        self.anywhere = frozenset().union(*self.functions.values())
        self.started = {row: self.code.started(mine) for row, mine in self.functions.items()}
        self.tables = {
            row: frozenset(self.code.ran(mine, self.anywhere)) | self.started[row]
            for row, mine in self.functions.items()
        }
        self.keys = {table: self.code.key(table) for table in set(self.tables.values())}
        self.parts = parts_of(self.code, frozenset().union(*self.keys))


def parts_of(code: Code, places: Iterable[Place]) -> dict[Place, Any]:
    """What keys are made of: the digest of each definition, and its references to others."""
    there = {place: code.definitions.get(place) for place in places}
    return {place: definition and (definition.digest, code._references(place)) for place, definition in there.items()}


@pytest.fixture(scope="module")
def recorded_rows() -> Recorded:
    """The same for all shares."""
    return Recorded()


@pytest.mark.parametrize("share", range(SHARES))
def test_a_change_of_any_function_is_seen_in_the_claims_that_ran_it_and_no_others(
    share: int, tmp_path: Path, recorded_rows: Recorded
) -> None:
    """Every function that a claim of cpu ran is changed in turn, whether the evidence still holds or not; both ways.

    What a claim ran is what its run recorded. Beyond that a row may rest on what runs all claims, on functions around
    those that ran, and on what a cached function ran for an earlier claim: on nothing else.
    """
    before, functions, started = recorded_rows.code, recorded_rows.functions, recorded_rows.started
    anywhere, tables, keys = recorded_rows.anywhere, recorded_rows.tables, recorded_rows.keys
    assert len(functions) > 100
    digests = {table: tuple((place, before.definitions[place].digest) for place in table) for table in keys}
    changeable = sorted(place for place in anywhere | before.harness if before.definitions[place].kind == "function")
    assert len(changeable) > 300
    shutil.copytree(
        ROOT / "smoke_tests", tmp_path / "smoke_tests", ignore=shutil.ignore_patterns("evidence", "__pycache__")
    )
    for place in changeable[share::SHARES]:
        path = tmp_path / "smoke_tests" / place[0]
        original = path.read_text(encoding="utf-8")
        path.write_text(with_a_statement_more(path, place[1]), encoding="utf-8")
        code = Room(tmp_path).code
        now = parts_of(code, recorded_rows.parts)
        touched = {each for each, parts in recorded_rows.parts.items() if now[each] != parts}
        # A key is made of the parts of its definitions alone.
        other = {table for table in keys if table & touched and code.key_now(digests[table]) != keys[table]}
        path.write_text(original, encoding="utf-8")
        changed = {row for row, table in tables.items() if table in other}
        ran = {row for row, mine in functions.items() if place in mine}
        assert ran <= changed, place
        for row in changed - ran:
            cached = {each for each in tables[row] if before.definitions[each].cached}
            beyond = before.harness | started[row] | before.reach(cached)
            around = any(each[0] == place[0] and each[1].startswith(f"{place[1]}.") for each in functions[row])
            assert place in beyond or around, (place, row)
