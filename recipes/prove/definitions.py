"""The rule of what has changed: an outcome depends on the definitions that ran, each by the hash of its syntax tree.

A definition is a function (its nested functions are definitions of their own), the body of a class, a statement at the
top of a module, an import from elsewhere, or a file of data. An outcome keeps their digests. It counts while all of
them are still in the checkout, in any file, and their names still refer to each other; comments, docstrings, places and
module names do not matter.

smoke_tests/recorder.py records what ran. If there is no record, `floor` takes all that the code can reach.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from pathlib import Path

from recipes.files import digest_of
from recipes.prove.parsing import MARKS, TOP, Definition, Place, binding, hash_of, split, text_of

DATA = (".ini", ".json", ".patch", ".toml")  # what code may read; evidence/ is what it wrote
Recorded = tuple[tuple[Place, str], ...]  # the definitions that existed when something ran, with their digests


class Code:
    """All definitions below a folder of Python, read and never imported.

    harness: the files that run and judge everything there; they belong to every key. outside: the files that affect no
    outcome, such as the recorder; they belong to no key.
    """

    def __init__(self, folder: Path, harness: Iterable[str] = (), outside: Iterable[str] = ()) -> None:
        self.folder, self.outside = folder, frozenset(outside)
        texts = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*.py"))}
        self.files = {_module_name(file): file for file in texts}
        local = frozenset({*self.files, *(f"{folder.name}.{name}" for name in self.files)})
        self.modules = {file: split(text_of(path), str(path), file, local) for file, path in texts.items()}
        self.data: dict[str, Definition] = {}
        for path in sorted(folder.rglob("*")):
            file = path.relative_to(folder).as_posix()
            if path.suffix in DATA and path.is_file() and not file.startswith("evidence/"):
                definition = Definition((file, TOP), "data", hash_of(path.read_bytes()))
                self.data |= {path.name: definition, file: definition}  # code may name a file either way
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
        """The hash of these definitions and of how they refer to each other, without places and module names."""
        chosen = frozenset(places)
        if chosen not in self._keys:
            meant = set()
            for place in chosen:
                for name_there, targets in self._references(place):
                    if not targets.isdisjoint(chosen):
                        meant.add((self.definitions[place].digest, name_there, *self._digests(targets & chosen)))
            digests = {self.definitions[place].digest for place in chosen}
            self._keys[chosen] = digest_of([sorted(digests), sorted(map(list, meant))])
        return self._keys[chosen]

    @functools.cache  # noqa: B019  # a Code lives as long as the verb
    def _references(self, place: Place) -> list[tuple[str, frozenset[Place]]]:
        """The names in a definition that refer to others: without the modules in them, and what they refer to."""
        resolved = (self.resolve(place[0], name) for name in self.definitions[place].names)
        # An import from elsewhere has the same meaning in every file.
        local = ((name, frozenset(each for each in at if not each[1].startswith("import "))) for name, at in resolved)
        return [(name, targets) for name, targets in local if targets]

    @functools.cache  # noqa: B019  # few sets of definitions are asked for, and often
    def _digests(self, places: frozenset[Place]) -> list[str]:
        return sorted({self.definitions[place].digest for place in places})

    def changed(self, recorded: Recorded) -> list[Place]:
        """The definitions that have changed: not the same in their place nor, if that is gone, anywhere else."""
        return [place for place, digest in recorded if not self._now(place, digest)]

    def key_now(self, recorded: Recorded) -> str | None:
        """The key of those definitions where they are now; None where one of them changed."""
        now = self.places_now(recorded)
        return self.key(now) if now is not None else None

    def places_now(self, recorded: Recorded) -> frozenset[Place] | None:
        """The places where those definitions are now; None where one of them changed."""
        now = [self._now(place, digest) for place, digest in recorded]
        return frozenset().union(*now) if all(now) else None

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
        """Everything that decided an outcome for which these functions ran.

        Also the harness, the definitions around them, the data, classes and imports that they mention, and what a
        cached function that they mention ran earlier, as far as that ran `anywhere`. Code that torch.compile compiled
        calls functions unseen, so everything that it can reach counts; what the harness calls was seen.
        """
        reached = set(self.harness)
        pending = [*functions, *self.reach(compiled)]
        while pending:
            place = pending.pop()
            if place in reached or place[0] in self.outside:
                continue
            reached.add(place)
            pending += self._around(place)
            for target in self._meant(place):
                if self.definitions[target].kind != "function":
                    pending.append(target)
                elif self.definitions[target].cached:
                    pending += [target, *(self.reach([target]) & anywhere)]
        return reached

    def started(self, functions: Iterable[Place]) -> frozenset[Place]:
        """Everything that can be reached by the programs that these functions name in strings."""
        strings = frozenset().union(*(self.definitions[each].strings for each in functions))
        programs = {place for text in strings for place in self._named_by(text) if self._is_program(place[0])}
        return self.reach(programs)

    def _is_program(self, file: str) -> bool:
        top = self.definitions.get((file, TOP))
        return file.endswith("__main__.py") or (top is not None and "__name__" in top.names)

    def floor(self, roots: Iterable[Place]) -> frozenset[Place]:
        """Everything that the code of these definitions can reach, and the harness."""
        return self.reach([*roots, *self.harness])

    def reach(self, roots: Iterable[Place]) -> frozenset[Place]:
        """Everything that the code of these definitions can reach."""
        return frozenset().union(*(self._reach(root) for root in roots))

    @functools.cache  # noqa: B019
    def _reach(self, root: Place) -> frozenset[Place]:
        reached: set[Place] = set()
        pending = [root]
        while pending:
            place = pending.pop()
            if place in reached or place[0] in self.outside:
                continue
            reached.add(place)
            pending += self._beside(place)
        return frozenset(reached)

    @functools.cache  # noqa: B019
    def _beside(self, place: Place) -> frozenset[Place]:
        """Everything that the code of one definition names, and the definitions around and inside it."""
        definition = self.definitions[place]
        named = (other for text in definition.strings for other in self._named_by(text))
        return frozenset({*self._around(place), *self._meant(place), *self._inside(place), *named})

    def _around(self, place: Place) -> Iterator[Place]:
        """The surroundings of a definition: its class or outer function, the module's own statements, its marks."""
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

    @functools.cache  # noqa: B019  # each of many mutants that ran a definition asks
    def _meant(self, place: Place) -> frozenset[Place]:
        """What a definition mentions: other definitions by their names, and data by its file."""
        definition = self.definitions[place]
        named = (self.resolve(place[0], name)[1] for name in definition.names)
        return frozenset().union(*named, (self.data[text].place for text in definition.strings & self.data.keys()))

    @functools.cache  # noqa: B019
    def _named_by(self, text: str) -> tuple[Place, ...]:
        """The module that a string names, by its name or its file."""
        file = self.files.get(text.removeprefix(f"{self.folder.name}."))
        named = [file] if file else [path for path in self.modules if path == text or path.endswith(f"/{text}")]
        return tuple(definition.place for path in named for definition in self.modules[path].definitions.values())

    # --- names ---

    def resolve(self, file: str, name: str) -> tuple[str, frozenset[Place]]:
        """The definitions that a dotted name refers to in a file, and the name without the modules in it."""
        asked = (file, name)
        if asked not in self._resolved:
            self._resolved[asked] = (name, frozenset())  # in case imports form a cycle
            self._resolved[asked] = self._resolve(file, name)
        return self._resolved[asked]

    def _resolve(self, file: str, name: str) -> tuple[str, frozenset[Place]]:
        module = self.modules.get(file)
        if module is None:  # data
            return name, frozenset()
        head, *rest = name.split(".")
        if bound := binding(module, head):
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
            if file and (binding(self.modules[file], name) or name in self.modules[file].imports):
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
        """Everything that may be looked up in a module: its definitions, and those that it imports by name."""
        module = self.modules[file]
        places = {definition.place for definition in module.definitions.values()}
        for name in module.imports:
            tail, there = self.resolve(file, name)
            places |= there if tail != "*" else set()
        return frozenset(places)


def _module_name(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def packed(numbers: Iterable[int]) -> str:
    """Numbers as text, with ranges: "0-3 7"."""
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
