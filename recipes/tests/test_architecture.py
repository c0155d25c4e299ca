"""The rooms of recipes/ import in one direction, as docs/maintain/architecture.md says, and no module in a circle."""

from __future__ import annotations

import ast
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


def test_no_test_imports_another_test() -> None:
    for path in (ROOT / "recipes" / "tests").glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        modules = {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not any(module.startswith("recipes.tests.test_") for module in modules), path
