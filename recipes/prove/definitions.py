"""The one rule of staleness: what decides an outcome are the definitions that it ran, each by the hash of its syntax.

A definition is a function (its nested functions are definitions of their own), the body of a class, a statement at the
top of a module, an import from elsewhere, or a file of data. What ran them keeps their digests. It is fresh while all
of them are still in the checkout, in whatever file, and still mean each other by their names; comments, docstrings,
places and module names do not count.

What ran is recorded by smoke_tests/recorder.py. Where that is missing, `floor` takes all that the text can reach.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recipes.errors import Refusal
from recipes.files import digest_of

Place = tuple[str, str]  # a file below the folder, and the qualified name of a definition in it
Recorded = tuple[tuple[Place, str], ...]  # definitions that were there when something ran, and their digests then
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
CACHED = {"lru_cache", "cache", "fixture"}  # decorators of what may run for one claim and serve the next
TOP = "<module>"  # the statements of a module that bind no name
MARKS = "pytestmark"  # what marks every test of a module
TOOL = "recipes"  # a key holds what code imports from the tool, and not the module that it is in
DIGITS = 16  # of a sha256, in hexadecimal: 64 bits


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


class Code:
    """All definitions below a folder of Python, read and never imported.

    harness: the files of what runs and judges everything there; they belong to every key. outside: the files that are
    part of no outcome, such as what records it; they belong to none.
    """

    def __init__(self, folder: Path, harness: Iterable[str] = (), outside: Iterable[str] = ()) -> None:
        self.folder, self.outside = folder, frozenset(outside)
        texts = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*.py"))}
        self.files = {_module_name(file): file for file in texts}
        local = frozenset({*self.files, *(f"{folder.name}.{name}" for name in self.files)})
        self.modules = {file: _split(_text(path), str(path), file, local) for file, path in texts.items()}
        self.data: dict[str, Definition] = {}
        for path in sorted(folder.rglob("*")):
            if path.suffix in (".ini", ".toml", ".patch") and path.is_file():
                file = path.relative_to(folder).as_posix()
                definition = Definition((file, TOP), "data", _digest(path.read_bytes()))
                self.data |= {path.name: definition, file: definition}  # code names a file in either way
        self.definitions: dict[Place, Definition] = {
            definition.place: definition
            for module in self.modules.values()
            for definition in module.definitions.values()
        } | {definition.place: definition for definition in self.data.values()}
        self._by_digest: dict[str, set[Place]] = {}
        for place, definition in self.definitions.items():
            self._by_digest.setdefault(definition.digest, set()).add(place)
        self._resolved: dict[tuple[str, str], tuple[str, frozenset[Place]]] = {}
        self._keys: dict[frozenset[Place], str] = {}
        self.harness = {place for place in self.definitions if place[0] in set(harness)}

    # --- keys ---

    def key(self, places: Iterable[Place]) -> str:
        """The hash of these definitions and of what they mean to each other; it holds no place and no module's name."""
        chosen = frozenset(places)
        if chosen not in self._keys:
            meant = set()
            for place in chosen:
                definition = self.definitions[place]
                for name in definition.names:
                    name_there, targets = self.resolve(place[0], name)
                    # An import from elsewhere says what it means itself, in whatever file it stands.
                    meanings = {each for each in targets & chosen if not each[1].startswith("import ")}
                    if bound := sorted({self.definitions[each].digest for each in meanings}):
                        meant.add((definition.digest, name_there, *bound))
            digests = {self.definitions[place].digest for place in chosen}
            self._keys[chosen] = digest_of([sorted(digests), sorted(map(list, meant))])
        return self._keys[chosen]

    def changed(self, recorded: Recorded) -> list[Place]:
        """The definitions that are no longer what they were: neither in their place nor, if that is gone, elsewhere."""
        return [place for place, digest in recorded if not self._now(place, digest)]

    def key_now(self, recorded: Recorded) -> str | None:
        """The key of those definitions where they are now; None where one of them changed."""
        if self.changed(recorded):
            return None
        return self.key(place for then, digest in recorded for place in self._now(then, digest))

    def _now(self, place: Place, digest: str) -> set[Place]:
        there = self.definitions.get(place)
        if there is not None:
            return {place} if there.digest == digest else set()
        return self._by_digest.get(digest, set())

    # --- what was run ---

    def place(self, file: str, name: str) -> Place | None:
        """The definition of a function that ran; None for a module's own statements, and for files of no room.

        A lambda or a comprehension is part of what it stands in, and a method of an autograd.Function of its class,
        since PyTorch calls its backward in a thread of its own.
        """
        while name:
            if (file, name) in self.definitions:
                return file, name
            name = name.rpartition(".")[0].removesuffix(".<locals>")
        return None

    def ran(self, functions: Iterable[Place], anywhere: frozenset[Place], compiled: Iterable[Place] = ()) -> set[Place]:
        """All that decided an outcome for which these functions ran.

        Beside them: the harness, what they stand in, the data, classes and imports that they mention, and of a cached
        function that they mention what it ran earlier, as far as that ran `anywhere`. What torch.compile compiled calls
        functions unseen: all that it can reach counts.
        """
        reached = set(self.harness)
        pending = [*functions, *(self.floor(compiled) if compiled else ())]
        while pending:
            place = pending.pop()
            if place in reached:
                continue
            reached.add(place)
            pending += self._around(place)
            for target in self._meant(self.definitions[place]):
                if self.definitions[target].kind != "function":
                    pending.append(target)
                elif self.definitions[target].cached:
                    pending += [target, *(self.floor([target]) & anywhere)]
        return reached

    def started(self, functions: Iterable[Place]) -> frozenset[Place]:
        """All that the programs can reach which the strings of these functions name."""
        strings = frozenset().union(*(self.definitions[each].strings for each in functions))
        programs = {place for text in strings for place in self._named_by(text) if self._is_program(place[0])}
        return self.floor(programs) if programs else frozenset()

    def _is_program(self, file: str) -> bool:
        top = self.definitions.get((file, TOP))
        return file.endswith("__main__.py") or (top is not None and "__name__" in top.names)

    def floor(self, roots: Iterable[Place]) -> frozenset[Place]:
        """All that the text of these definitions can reach, and the harness."""
        return frozenset().union(self.harness, *(self._floor(root) for root in roots))

    @functools.cache  # noqa: B019  # a Code lives as long as the verb
    def _floor(self, root: Place) -> frozenset[Place]:
        reached: set[Place] = set()
        pending = [root, *self.harness]
        while pending:
            place = pending.pop()
            if place in reached or place[0] in self.outside:
                continue
            reached.add(place)
            pending += self._beside(place)
        return frozenset(reached)

    @functools.cache  # noqa: B019
    def _beside(self, place: Place) -> frozenset[Place]:
        """All that the text of one definition names, and what is around and inside it."""
        definition = self.definitions[place]
        named = (other for text in definition.strings for other in self._named_by(text))
        return frozenset({*self._around(place), *self._meant(definition), *self._inside(place), *named})

    def _around(self, place: Place) -> Iterator[Place]:
        """What a definition stands in: its class or outer function, the module's own statements, its marks."""
        file, name = place
        for outer in (name.rpartition(".")[0].removesuffix(".<locals>"), TOP, MARKS):
            if (file, outer) in self.definitions:
                yield file, outer

    def _inside(self, place: Place) -> Iterator[Place]:
        """The methods of a class, and the functions inside a function."""
        file, name = place
        if self.definitions[place].kind != "data":
            inner = (f"{name}.", f"{name}.<locals>.")
            yield from ((file, other) for other in self.modules[file].definitions if other.startswith(inner))

    def _meant(self, definition: Definition) -> Iterator[Place]:
        for name in definition.names:
            yield from self.resolve(definition.place[0], name)[1]
        for text in definition.strings & self.data.keys():
            yield self.data[text].place

    @functools.cache  # noqa: B019
    def _named_by(self, text: str) -> tuple[Place, ...]:
        """What a string names: a module that is started, or its file."""
        file = self.files.get(text.removeprefix(f"{self.folder.name}."))
        named = [file] if file else [path for path in self.modules if path == text or path.endswith(f"/{text}")]
        return tuple(definition.place for path in named for definition in self.modules[path].definitions.values())

    # --- names ---

    def resolve(self, file: str, name: str) -> tuple[str, frozenset[Place]]:
        """What a dotted name stands for in a file, and the name without the modules in it."""
        asked = (file, name)
        if asked not in self._resolved:
            self._resolved[asked] = (name, frozenset())  # of imports in a circle
            self._resolved[asked] = self._resolve(file, name)
        return self._resolved[asked]

    def _resolve(self, file: str, name: str) -> tuple[str, frozenset[Place]]:
        module = self.modules.get(file)
        if module is None:  # data
            return name, frozenset()
        head, *rest = name.split(".")
        if bound := _bound(module, head):
            method = f"{head}.{rest[0]}" if rest else ""
            return name, frozenset(
                (file, each) for each in (*bound, *([method] if method in module.definitions else []))
            )
        targets: set[Place] = set()
        tail = name
        for origin, imported in module.imports.get(head, ()):
            tail, places = self._imported(origin, imported, rest, name)
            targets |= places
        return tail, frozenset(targets)

    def _imported(self, module: str, name: str | None, rest: list[str], text: str) -> tuple[str, frozenset[Place]]:
        module = module.removeprefix(f"{self.folder.name}.")
        if name is not None:
            file = self.files.get(module)
            if file and (_bound(self.modules[file], name) or name in self.modules[file].imports):
                return text, self.resolve(file, ".".join([name, *rest]))[1]
            module = f"{module}.{name}" if module and module != self.folder.name else name
        while rest and f"{module}.{rest[0]}" in self.files:
            module, rest = f"{module}.{rest[0]}", rest[1:]
        file = self.files.get(module)
        if file is None:
            return text, frozenset()
        if rest:
            return ".".join(rest), self.resolve(file, ".".join(rest))[1]
        return "*", self._whole(file)

    def _whole(self, file: str) -> frozenset[Place]:
        """All that a name may be looked up for in a module: its definitions, and those that it imports by name."""
        module = self.modules[file]
        places = {definition.place for definition in module.definitions.values()}
        for name in module.imports:
            tail, there = self.resolve(file, name)
            places |= there if tail != "*" else set()
        return frozenset(places)


def _module_name(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:DIGITS]


def syntax(path: Path) -> ast.Module:
    """A file as syntax; one that is no Python is refused with its line."""
    return _parse(_text(path), str(path))


def _text(path: Path) -> str:
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
def _split(text: str, path: str, file: str, local: frozenset[str]) -> Module:
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
    # Also where there are none yet, so that one that is added is seen.
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
    """A definition; a name that is defined twice, as in the branches of an `if`, is one definition of both."""
    before = module.definitions.get(name)
    text = [before.digest if before else "", name, *map(_dumped, nodes)]
    digest = _digest("\n".join(text).encode())
    names, strings, cached = frozenset(own.names), frozenset(own.strings), False
    for node in nodes:
        if isinstance(node, FUNCTIONS):
            cached = any(CACHED & _words(decorator) for decorator in node.decorator_list)
    if before:
        names, strings, cached = names | before.names, strings | before.strings, cached or before.cached
    module.definitions[name] = Definition((file, name), kind, digest, names, strings, cached)


class _Own(ast.NodeTransformer):
    """Takes out of a statement what is no part of it (inner functions and classes, imports, docstrings, modules)."""

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


def _bound(module: Module, name: str) -> list[str]:
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


def packed(numbers: Iterable[int]) -> str:
    """Numbers as text, ranges of them as such: "0-3 7"."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return " ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def unpacked(text: str) -> Iterator[int]:
    """The numbers of such a text."""
    for part in text.split():
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)
