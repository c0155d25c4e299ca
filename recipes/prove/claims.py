"""The claims of smoke_tests/, read and never imported: each test's sentence, and its subject."""

from __future__ import annotations

import ast
import hashlib
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from packaging.version import Version

from recipes.catalogue.plan import Plan
from recipes.files import sha256_of
from recipes.process import git_variables
from recipes.prove.definitions import Code, Recorded, unpacked
from recipes.prove.parsing import Place, split, syntax, text_of

HARNESS = ("conftest.py", "claims.py", "hardware.py", "pytest.ini")  # what selects, runs and judges every claim
# What records and shows a run and affects no outcome; and what runs the claims where Fusebox has built nothing.
OUTSIDE = (
    *("recorder.py", "printed.py"),
    *("__main__.py", "foreign.py", "loaded_once.py", "distributions.py", "doctor.py", "elf.py", "torch_symbols.py"),
)


@dataclass(frozen=True)
class Claim:
    """One test's sentence, read from its source. `id` is FILE::TEST, without parameters.

    `rows` are the test's parameters; `package`, `since`, `until` and `needs_gpu` are what smoke_tests/claims.py says.
    `operators` are those of smoke_tests/operators/table.py whose implementations are the rows, where it is about such;
    `only` and `seen` say which implementations.
    """

    id: str
    sentence: str
    seeds: tuple[str, ...]
    rows: frozenset[str]
    package: str | None
    since: str
    until: str
    needs_gpu: bool
    operators: tuple[str, ...]
    only: str
    seen: bool

    def about(self, plan: Plan) -> str | None:
        """The target's package that it is about; None if it is about each package, or about none of the target's."""
        if self.rows & {"package", "patch"}:
            return None
        name, fits = self._subject(plan)
        return name if fits else None

    def leaves_out(self, plan: Plan) -> bool:
        """Whether the target has its package in a version that it is not about."""
        return self._subject(plan)[1] is False

    def _subject(self, plan: Plan) -> tuple[str, bool | None]:
        """The package that it is about, and whether it is about the target's version of that; None if there is none."""
        stem = self.id.split("::")[0].rpartition("/")[2].removeprefix("test_").removesuffix(".py")
        name = self.package or next((pin.name for pin in plan.pins if pin.package.module == stem), stem)
        release = next((Version(pin.release.version).release for pin in plan.pins if pin.name == name), None)
        return name, None if release is None else holds(release, self.since, self.until)

    def is_expected(self, plan: Plan, room: Room) -> bool:
        """Whether a run of the target must contain it. Claims with a row per patched file may have no row at all."""
        if self.needs_gpu and plan.target.cuda == "none":
            return False
        if self.operators:
            is_had = any(room.has(name, plan, self.only, self.seen) for name in self.operators)
            return is_had and (self.package is None or self.about(plan) is not None)
        return self.rows & {"package", "patch"} == {"package"} or self.about(plan) is not None


def holds(release: tuple[int, ...], since: str, until: str) -> bool:
    """Whether since <= release < until, where "" is no end; as in claims.py."""
    return release >= Version(since).release and not (until and release >= Version(until).release)


class Room:
    """The code of smoke_tests/, read and never imported: its claims, and what each claim reaches."""

    def __init__(self, root: Path) -> None:
        self.folder = root / "smoke_tests"

    @cached_property
    def code(self) -> Code:
        """All definitions of the room."""
        return Code(self.folder, HARNESS, OUTSIDE)

    def others_than(self, files: Mapping[str, str]) -> list[str]:
        """Those of the given files (name -> sha256) that are gone, or whose definitions have changed since.

        Comments, docstrings and places do not count. The earlier text of a file is read from git's history; a file
        whose earlier text was never committed has changed.
        """
        paths = {name: self.folder / name for name in files}
        return [name for name, path in paths.items() if not path.exists() or not _is_same_code(path, files[name])]

    @cached_property
    def claims(self) -> dict[str, Claim]:
        """Every claim, by id, in the order of the files."""
        claims = {}
        for path in sorted(self.folder.rglob("test_*.py")):
            file = path.relative_to(self.folder).as_posix()
            for node in syntax(path).body:
                if isinstance(node, ast.FunctionDef) and (mark := _mark(node, "proves")):
                    claims[f"{file}::{node.name}"] = _claim(f"{file}::{node.name}", node, mark)
        return claims

    def leaves_out(self, identity: str, plan: Plan) -> bool:
        """Whether a claim, or a row of one, is not about the target's version of its package; not so if it is gone."""
        claim = self.claims.get(identity.split("[")[0])
        return claim is not None and claim.leaves_out(plan)

    def test(self, identity: str) -> Place | None:
        """The definition of the test that makes a claim, for any of its rows; None if it is gone."""
        file, _, name = identity.split("[")[0].partition("::")
        return (file, name) if (file, name) in self.code.definitions else None

    def key(self, identity: str) -> str | None:
        """The key of a claim by everything that its code can reach; None if the claim is gone."""
        place = self.test(identity)
        return self.code.key(self.code.floor([place])) if place else None

    def keys_of(self, run: Mapping[str, Any], rows: Iterable[Mapping[str, Any]]) -> list[str | None]:
        """The keys that rows of a run would have now: by what each ran, or could reach if that is not recorded."""
        table, by_ran, keys = table_of(run), dict[str, str | None](), []
        for row in rows:
            ran = row.get("ran")
            if ran is not None and ran not in by_ran:  # half of all rows ran the same as another one
                by_ran[ran] = self.code.key_now(of_row(table, ran))
            keys.append(self.key(row["id"]) if ran is None else by_ran[ran])
        return keys

    def has(self, operator: str, plan: Plan, only: str = "", seen: bool = False) -> bool:
        """Whether a target has an implementation of an operator, by operators/table.py.

        only: by this package; seen: one that is known by its kernels. As `every` of smoke_tests/claims.py has them.
        """
        versions = {pin.name: Version(pin.release.version).release for pin in plan.pins}
        dtypes = "cpu" if plan.target.cuda == "none" else "cuda"
        for column, entry in self._table[operator].items():
            package = column.partition(".")[0]
            taken = only in ("", package) and entry[dtypes] and (entry["forward"] or not seen)
            if taken and package in versions and holds(versions[package], entry["since"], entry["until"]):
                return True
        return False

    @cached_property
    def _table(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Operator -> implementation -> the fields of its Entry; what is no literal stands there as its text."""
        nodes = {}
        for node in syntax(self.folder / "operators" / "table.py").body:
            if isinstance(node, ast.ClassDef | ast.AnnAssign):
                nodes[node.name if isinstance(node, ast.ClassDef) else ast.unparse(node.target)] = node
        entry, table = nodes["Entry"], nodes["OPERATORS"]
        assert isinstance(entry, ast.ClassDef) and isinstance(table, ast.AnnAssign) and table.value
        assigned = [node for node in entry.body if isinstance(node, ast.AnnAssign)]
        fields = [field for field in assigned if isinstance(field.target, ast.Name)]
        names = [ast.unparse(field.target) for field in fields]
        defaults = {name: field.value for name, field in zip(names, fields, strict=True) if field.value}
        written = [(name, *row) for name, columns in _pairs(table.value) for row in _pairs(columns)]
        implementations: dict[str, dict[str, dict[str, Any]]] = {}
        for operator, column, call in [*written, *self._rows_of_adapters()]:
            assert isinstance(call, ast.Call)
            given = dict(zip(names, call.args, strict=False)) | {str(pair.arg): pair.value for pair in call.keywords}
            row = {name: _literal(value) for name, value in (defaults | given).items()}
            implementations.setdefault(operator, {}).setdefault(column, row)  # a newer version's row changes no answer
        return implementations

    def _rows_of_adapters(self) -> Iterator[tuple[str, str, ast.Call]]:
        """The rows that adapters add by the decorator `implements`: operator, column and the fields of the Entry."""
        for path in sorted((self.folder / "operators").glob("*_adapter.py")):
            for node in syntax(path).body:
                if isinstance(node, ast.FunctionDef) and (mark := _mark(node, "implements")):
                    name, column = map(ast.literal_eval, mark.args)
                    yield name, column, ast.Call(mark.func, [ast.Name(node.name)], mark.keywords)


def _is_same_code(path: Path, sha256: str) -> bool:
    """Whether a file holds the definitions that it held when it had this hash."""
    if sha256_of(path) == sha256:
        return True
    if path.suffix != ".py" or (earlier := _committed_text(path, sha256)) is None:
        return False
    before, now = (split(text, str(path), path.name, frozenset()) for text in (earlier, text_of(path)))
    return before == now


def _committed_text(path: Path, sha256: str) -> str | None:
    """The text with this hash that git's history has of a file; None if it has none."""

    def git(*words: str) -> bytes:
        command = ["git", "-C", str(path.parent), *words]
        return subprocess.run(command, env=git_variables(), capture_output=True, check=False).stdout

    versions = git("log", "-m", "--format=", "--raw", "--no-abbrev", "--no-renames", "--", path.name).decode()
    for version in versions.splitlines():
        content = git("cat-file", "blob", version.split()[3])  # :MODE MODE BLOB-BEFORE BLOB STATUS\tPATH
        if hashlib.sha256(content).hexdigest() == sha256:
            return content.decode()
    return None


def table_of(run: Mapping[str, Any]) -> Recorded:
    """The definitions that rows of a run ran, with their digests at that time."""
    places = ((at.partition(":"), digest) for at, digest in run.get("definitions", {}).items())
    return tuple(((file, name), digest) for (file, _, name), digest in places)


def of_row(table: Recorded, numbers: str) -> Recorded:
    """Those of a run's definitions that a row names by their numbers."""
    return tuple(table[number] for number in unpacked(numbers))


def _pairs(node: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """The entries of a dictionary whose keys are strings, as it is written down."""
    assert isinstance(node, ast.Dict)
    for key, value in zip(node.keys, node.values, strict=True):
        assert key
        yield ast.literal_eval(key), value


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:  # a name
        return ast.unparse(node)


def _mark(node: ast.FunctionDef, name: str) -> ast.Call | None:
    calls = (call for call in node.decorator_list if isinstance(call, ast.Call) and isinstance(call.func, ast.Name))
    return next((call for call in calls if isinstance(call.func, ast.Name) and call.func.id == name), None)


def _claim(identity: str, node: ast.FunctionDef, mark: ast.Call) -> Claim:
    named = {pair.arg: ast.literal_eval(pair.value) for pair in mark.keywords}
    seeds, needs, every = named.get("seed", ()), _mark(node, "needs"), _mark(node, "every")
    chosen = {pair.arg: ast.literal_eval(pair.value) for pair in every.keywords} if every else {}
    gpu = {pair.arg for pair in needs.keywords} & {"cuda", "sm", "gpus"} if needs else set()
    return Claim(
        id=identity,
        sentence=ast.literal_eval(mark.args[0]),
        seeds=(seeds,) if isinstance(seeds, str) else tuple(seeds),
        rows=frozenset(argument.arg for argument in node.args.args),
        package=named.get("package"),
        since=named.get("since", "0"),
        until=named.get("until", ""),
        needs_gpu=bool(gpu),
        operators=tuple(ast.literal_eval(name) for name in every.args) if every else (),
        only=chosen.get("only", ""),
        seen=chosen.get("seen", False),
    )
