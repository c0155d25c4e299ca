"""Divide a Python file into definitions, each with the hash of its syntax tree and the names that it mentions."""

from __future__ import annotations

import ast
import functools
import hashlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recipes.errors import Refusal

Place = tuple[str, str]  # a file below the folder, and the qualified name of a definition in it
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
CACHED = {"lru_cache", "cache", "fixture"}  # decorators of functions that may run for one claim and serve the next
CLAIM, VERSIONS = "proves", {"since", "until"}  # the decorator of a claim, and what in it selects releases
TOP = "<module>"  # the statements of a module that bind no name
MARKS = "pytestmark"  # what marks every test of a module
TOOL = "recipes"  # a key holds the names that code imports from the tool, not their modules
DIGITS = 16  # hexadecimal digits of a sha256: 64 bits


@dataclass(frozen=True)
class Definition:
    """One definition: the hash of its own syntax, and what that mentions.

    `kind` is "function", "class" or "data"; `names` are dotted (`references.attention`), `strings` its constants;
    `cached`: a later caller may get what an earlier call returned.
    """

    place: Place
    kind: str
    digest: str
    names: frozenset[str] = frozenset()
    strings: frozenset[str] = frozenset()
    cached: bool = False


@dataclass
class Module:
    """A parsed file: its definitions, and what its imports bind (name -> module and the name there, None: itself)."""

    definitions: dict[str, Definition] = field(default_factory=dict)
    imports: dict[str, set[tuple[str, str | None]]] = field(default_factory=dict)


def hash_of(content: bytes) -> str:
    """The hash of a file or of a syntax tree, shortened."""
    return hashlib.sha256(content).hexdigest()[:DIGITS]


def syntax(path: Path) -> ast.Module:
    """The syntax tree of a file; a file that is not Python is refused with its line."""
    return _parse(text_of(path), str(path))


def text_of(path: Path) -> str:
    """The text of a file; an unreadable file is refused."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise Refusal(f"{path} cannot be read as Python ({error}): correct it.") from None


def _parse(text: str, path: str) -> ast.Module:
    try:
        return ast.parse(text)
    except SyntaxError as error:
        reason = error.msg.partition(". ")[0]  # the rest is a guess
        raise Refusal(f"{path}, line {error.lineno}, is not Python ({reason}): correct it.") from None
    except ValueError as error:
        raise Refusal(f"{path} cannot be read as Python ({error}): correct it.") from None


@functools.lru_cache(maxsize=1024)
def split(text: str, path: str, file: str, local: frozenset[str]) -> Module:
    """The definitions of a file; `local` are the names of the modules beside it, which no digest holds."""
    tree, module = _parse(text, path), Module()
    imported = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    bindings = [bound for node in imported for bound in _bindings(node)]
    for name, origin, there in [bound for bound in bindings if bound[1] != "__future__"]:
        module.imports.setdefault(name, set()).add((origin, there))
        if not _is_local(origin, there, local):
            _add(
                module,
                file,
                f"import {name}",
                "data",
                [ast.parse(f"import {name}, {_without_place(origin)}, {there or '_'}")],
                _Own(set()),
            )
    modules = {
        name
        for name, origins in module.imports.items()
        if any((f"{origin}.{there}" if there else origin) in local or there in local for origin, there in origins)
    }
    _divide(module, file, tree.body, "", modules)
    _add_unmentioned_imports(module, file, local)
    # Even if the module has none yet, so that an added one is noticed.
    for name in (TOP, MARKS) if file.rpartition("/")[2].startswith("test_") else (TOP,):
        if name not in module.definitions:
            _add(module, file, name, "data", [], _Own(set()))
    return module


def _add_unmentioned_imports(module: Module, file: str, local: frozenset[str]) -> None:
    """Count an import that nothing mentions, made for what it does, among the statements of the module."""
    mentioned = {name.partition(".")[0] for each in module.definitions.values() for name in each.names}
    for name in sorted(module.imports.keys() - mentioned):
        origins, own = sorted(module.imports[name], key=str), _Own(set())
        elsewhere = [
            f"{_without_place(origin)}.{there}" for origin, there in origins if not _is_local(origin, there, local)
        ]
        own.names |= {name for origin, there in origins if there is None and _is_local(origin, there, local)}
        if own.names or elsewhere:
            _add(module, file, TOP, "data", [ast.parse(repr(text)) for text in elsewhere], own)


def _is_local(origin: str, there: str | None, local: frozenset[str]) -> bool:
    """Whether an import is of a module of this folder, or of something in one."""
    return bool({origin, f"{origin}.{there}", origin.partition(".")[0]} & local)


def _without_place(origin: str) -> str:
    """The module that an import is from; of the tool's modules, which may move, the name of the tool."""
    return TOOL if origin.partition(".")[0] == TOOL else origin


def _bindings(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str, str | None]]:
    """What an import binds: the name, the module, and the name there (None: the module itself)."""
    for alias in node.names:
        if isinstance(node, ast.ImportFrom):
            yield alias.asname or alias.name, node.module or "", alias.name
        elif alias.asname:
            yield alias.asname, alias.name, None
        else:
            yield alias.name.partition(".")[0], alias.name.partition(".")[0], None


def _divide(module: Module, file: str, body: list[ast.stmt], prefix: str, modules: set[str]) -> None:
    """Make definitions of the functions and classes among these statements, and at the top of all others."""
    for statement in body:
        own = _Own(modules)
        if isinstance(statement, (*FUNCTIONS, ast.ClassDef)):
            name = f"{prefix}{statement.name}"
            whole = isinstance(statement, ast.ClassDef) and _is_autograd(statement)
            own.keeps_all = whole
            own.generic_visit(statement)
            kind = "class" if isinstance(statement, ast.ClassDef) else "function"
            _add(module, file, name, kind, [statement], own)
            inside = "." if kind == "class" else ".<locals>."
            _divide(module, file, list(own.inner), f"{name}{inside}", modules)
        elif not isinstance(statement, ast.Import | ast.ImportFrom):
            if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Constant):  # a docstring
                changed = own.visit(statement)
                for name in _names(statement) or [TOP]:
                    _add(module, file, name, "data", [changed], own)
            _divide(module, file, list(own.inner), "", modules)


def _add(module: Module, file: str, name: str, kind: str, nodes: list[ast.AST], own: _Own) -> None:
    """Add a definition; a name that is defined twice, as in the branches of an `if`, becomes one definition."""
    before = module.definitions.get(name)
    text = [before.digest if before else "", name, *map(_dumped, nodes)]
    digest = hash_of("\n".join(text).encode())
    names, strings, cached = frozenset(own.names), frozenset(own.strings), False
    for node in nodes:
        if isinstance(node, FUNCTIONS):
            cached = any(CACHED & _words(decorator) for decorator in node.decorator_list)
    if before:
        names, strings, cached = names | before.names, strings | before.strings, cached or before.cached
    module.definitions[name] = Definition((file, name), kind, digest, names, strings, cached)


class _Own(ast.NodeTransformer):
    """Removes what does not belong to a statement (inner functions and classes, imports, docstrings, modules)."""

    def __init__(self, modules: set[str]) -> None:
        self.modules = modules
        self.inner: list[Any] = []
        self.names: set[str] = set()
        self.strings: set[str] = set()
        self.keeps_all = False

    def generic_visit(self, node: ast.AST) -> ast.AST:
        body = getattr(node, "body", None)
        if (
            isinstance(node, (*FUNCTIONS, ast.ClassDef))
            and isinstance(body, list)
            and ast.get_docstring(node) is not None
        ):
            node.body = body[1:]
        return super().generic_visit(node)

    def _inner(self, node: Any) -> ast.AST:
        if self.keeps_all:
            return self.generic_visit(node)
        self.inner.append(node)
        return ast.Expr(ast.Constant(f"def {node.name}"))

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _inner

    def visit_Import(self, node: ast.Import) -> ast.AST:
        return ast.Pass()

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST:
        return ast.Pass()

    def visit_Name(self, node: ast.Name) -> ast.AST:
        self.names.add(node.id)
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        self.names.add(node.arg)
        return self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, str):
            self.strings.add(node.value)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """The versions that a claim is about decide where it runs, and not how it ends."""
        if isinstance(node.func, ast.Name) and node.func.id == CLAIM:
            node.keywords = [given for given in node.keywords if given.arg not in VERSIONS]
        return self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """A module's attribute is what it names, wherever that is."""
        if dotted := _dotted(node):
            self.names.add(dotted)
            if isinstance(node.value, ast.Name) and node.value.id in self.modules:
                return ast.Name(node.attr, node.ctx)
            return node
        return self.generic_visit(node)


def _dotted(node: ast.expr) -> str | None:
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else None


def _is_autograd(node: ast.ClassDef) -> bool:
    return any((_dotted(base) or "").endswith("Function") for base in node.bases)


def _words(node: ast.expr) -> set[str]:
    """The names in a decorator; a fixture is cached where it has a scope."""
    words = {
        part.attr if isinstance(part, ast.Attribute) else part.id
        for part in ast.walk(node)
        if isinstance(part, ast.Attribute | ast.Name)
    }
    scoped = any(isinstance(part, ast.keyword) and part.arg == "scope" for part in ast.walk(node))
    return words if scoped else words - {"fixture"}


def binding(module: Module, name: str) -> list[str]:
    """The definitions that bind a name at the top of a module."""
    return [each for each in (name, f"import {name}") if each in module.definitions]


def _names(statement: ast.stmt) -> list[str]:
    """The names that a statement binds at the top of a module."""
    inner = {
        name.id
        for part in ast.walk(statement)
        if isinstance(part, ast.comprehension)
        for name in ast.walk(part.target)
        if isinstance(name, ast.Name)
    }
    stored = (part.id for part in ast.walk(statement) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store))
    return [name for name in dict.fromkeys(stored) if name not in inner]


def _dumped(node: ast.AST) -> str:
    """The syntax tree as text, the same on every Python: 3.12 added a field, 3.13 leaves empty ones out by default."""
    for part in ast.walk(node):
        if hasattr(part, "type_params"):  # the claims are written for Python 3.8 and have none
            del part.type_params
    every: dict[str, Any] = {"show_empty": True} if sys.version_info >= (3, 13) else {}
    return ast.dump(node, **every)
