"""The rooms of recipes/ import in one direction, as docs/maintain/architecture.md says, and no module in a circle."""

from __future__ import annotations

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from recipes.files import ROOT

# Room -> the rooms that it may import, beside the modules of recipes/ itself, which import no room.
MAY_IMPORT = {
    "": set[str](),
    "catalogue": set[str](),
    "make": {"catalogue"},
    "prove": {"catalogue", "make"},
    "ship": {"catalogue", "make", "prove"},
    "measure": {"catalogue", "make", "prove"},
    "pages": {"catalogue", "make", "prove", "ship", "measure"},
    "verbs": {"catalogue", "make", "prove", "ship", "measure", "pages"},
}
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "recipes").rglob("*.py"))
    if "tests" not in path.parts and path.name != "__main__.py"
}


def room_of(module: str) -> str:
    """The package of a module below recipes/; "" of what lies in recipes/ itself."""
    name = module.split(".")[1] if "." in module else ""
    return name if name in MAY_IMPORT else ""


def imported_by(path: Path) -> set[str]:
    """The modules of recipes/ that a file imports anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            within = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= within & MODULES.keys() or {node.module}
    return names & MODULES.keys()


@pytest.mark.parametrize("module", MODULES)
def test_a_room_imports_only_those_before_it(module: str) -> None:
    room = room_of(module)
    rooms = {room_of(name) for name in imported_by(MODULES[module])} - {"", room}
    assert rooms <= MAY_IMPORT[room]


def test_no_module_imports_itself_through_others() -> None:
    TopologicalSorter({module: imported_by(path) for module, path in MODULES.items()}).prepare()


def test_the_page_names_every_module() -> None:
    page = (ROOT / "docs" / "maintain" / "architecture.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)/` \| (.*)$", page, re.MULTILINE))
    for module in MODULES:
        room, name = room_of(module), module.rpartition(".")[2]
        if room not in ("", "verbs", name):
            assert f"`{name}`" in rows[room], f"the row of {room}/ lacks {name}"


def test_no_test_imports_another_test() -> None:
    for path in (ROOT / "recipes" / "tests").glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        modules = {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not any(module.startswith("recipes.tests.test_") for module in modules), path


VAGUE = {"one", "said", "found", "kept", "told", "had"}  # words that do not say what a value is


def names_given_by(tree: ast.AST) -> set[str]:
    """The names that a module gives: to what it assigns, imports, defines and takes as arguments, and to attributes."""
    names: set[str | None] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.arg(arg=name):
                names.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.alias(asname=name) | ast.ExceptHandler(name=name) | ast.MatchAs(name=name):
                names.add(name)
            case ast.MatchStar(name=name) | ast.MatchMapping(rest=name):
                names.add(name)
    return {name for name in names if name}


def test_names_say_what_they_are_of() -> None:
    for path in sorted(path for room in ("recipes", "patches") for path in (ROOT / room).rglob("*.py")):
        vague = names_given_by(ast.parse(path.read_text(encoding="utf-8"))) & VAGUE
        assert not vague, f"{path.relative_to(ROOT)} names something {sorted(vague)[0]}: say what it is"


@pytest.mark.parametrize(
    "code",
    [
        "one = 1",
        "one: int = 1",
        "for said in (): pass",
        "[kept for kept in ()]",
        "if (found := 1): pass",
        "def told(): pass",
        "def f(*, had): pass",
        "lambda one: 1",
        "class C:\n    found: int",
        "c.kept = 1",
        "with open('f') as said: pass",
        "import os as one",
    ],
)
def test_a_vague_name_is_seen(code: str) -> None:
    assert len(names_given_by(ast.parse(code)) & VAGUE) == 1
