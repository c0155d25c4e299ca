"""What was proven: run the claims, keep their outcomes with what was tested, and say which of them still hold.

A claim's key is the hash of its test's syntax tree and of all code of smoke_tests/ that the test reaches; the stack key
is the hash of the pinned inputs. Evidence whose keys differ from the checkout's is stale: shown as such, not as proof.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from packaging.version import Version
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from rich.markup import escape
from rich.table import Table

from recipes import environment
from recipes.cache import read_json, sha256_of, write_json, write_text
from recipes.model import Refusal, digest_of
from recipes.plan import Plan, changed
from recipes.process import group
from recipes.progress import console, say

Definition = ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign | ast.Import | ast.ImportFrom


@dataclass(frozen=True)
class Claim:
    """One test's sentence, read from its source. `id` is FILE::TEST, without parameters.

    `rows` are the test's parameters; `package`, `since`, `until` and `needs_gpu` are what smoke_tests/claims.py says.
    `operators` are those of smoke_tests/fused_ops.py whose implementations are the rows, where it is about such; `only`
    and `seen` say which implementations.
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
        """The package of the target that it is about; None where it speaks of each, or of none that the target has."""
        if self.rows & {"package", "patch"}:
            return None
        stem = self.id.split("::")[0].rpartition("/")[2].removeprefix("test_").removesuffix(".py")
        name = self.package or next((pin.name for pin in plan.pins if pin.package.module == stem), stem)
        held = next((Version(pin.release.version).release for pin in plan.pins if pin.name == name), None)
        return name if held is not None and _holds(held, self.since, self.until) else None

    def is_expected(self, plan: Plan, room: Room) -> bool:
        """Whether a run of the target has to have it. One row per patched file may be none; one per package is not."""
        if self.needs_gpu and plan.target.cuda == "none":
            return False
        if self.operators and not any(room.has(name, plan, self.only, self.seen) for name in self.operators):
            return False
        return self.rows & {"package", "patch"} == {"package"} or self.about(plan) is not None


def _holds(held: tuple[int, ...], since: str, until: str) -> bool:
    """Whether a release is one from since up to until, which is out; "" is no end. As claims.py has it."""
    return held >= Version(since).release and not (until and held >= Version(until).release)


def _parsed(path: Path) -> ast.Module:
    """A file of smoke_tests/ as syntax; one that is no Python is refused with its line."""
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except SyntaxError as error:
        said = error.msg.partition(". ")[0]  # the rest is a guess
        raise Refusal(f"{path}, line {error.lineno}, is not Python ({said}): correct it.") from None
    except (OSError, ValueError) as error:
        raise Refusal(f"{path} cannot be read as Python ({error}): correct it.") from None


class Room:
    """The code of smoke_tests/, read and never imported: its claims, and what each of them reaches."""

    def __init__(self, root: Path) -> None:
        self.folder = root / "smoke_tests"
        self._paths = {
            path.relative_to(self.folder).with_suffix("").as_posix().replace("/", "."): path
            for path in self.folder.rglob("*.py")
        }
        self._keys: dict[str, str | None] = {}
        self._read: dict[tuple[str, str], tuple[str, list[tuple[str, str]]]] = {}

    def others_than(self, files: Mapping[str, str]) -> list[str]:
        """The files (name -> sha256) that something was made with and that are others now, or gone."""
        paths = {name: self.folder / name for name in files}
        return [name for name, path in paths.items() if not path.exists() or sha256_of(path) != files[name]]

    @cached_property
    def _definitions(self) -> dict[str, dict[str, Definition]]:
        """Module -> top-level name -> the statement that defines it."""
        modules: dict[str, dict[str, Definition]] = {}
        for module, path in self._paths.items():
            names = modules.setdefault(module, {})
            for statement in _parsed(path).body:
                if isinstance(statement, Definition):
                    names.update(dict.fromkeys(_names(statement), statement))
        return modules

    @cached_property
    def claims(self) -> dict[str, Claim]:
        """Every claim, by id, in the order of the files."""
        found = {}
        for module in sorted(name for name in self._paths if name.split(".")[-1].startswith("test_")):
            for name, node in self._definitions[module].items():
                if isinstance(node, ast.FunctionDef) and (mark := _mark(node, "proves")):
                    file = self._paths[module].relative_to(self.folder).as_posix()
                    found[f"{file}::{name}"] = _claim(f"{file}::{name}", node, mark)
        return found

    def key(self, identity: str) -> str | None:
        """The key of that claim: changes when its test, or code that it reaches, changes; None if it is gone."""
        if identity not in self._keys:
            self._keys[identity] = self._key(self.claims[identity]) if identity in self.claims else None
        return self._keys[identity]

    def has(self, operator: str, plan: Plan, only: str = "", seen: bool = False) -> bool:
        """Whether a target has an implementation of an operator, by the table in fused_ops.py.

        only: by this package; seen: one that is known by its kernels. As `every` of smoke_tests/claims.py has them.
        """
        versions = {pin.name: Version(pin.release.version).release for pin in plan.pins}
        dtypes = "cpu" if plan.target.cuda == "none" else "cuda"
        for column, entry in self._table[operator].items():
            package = column.partition(".")[0]
            taken = only in ("", package) and entry[dtypes] and (entry["forward"] or not seen)
            if taken and package in versions and _holds(versions[package], entry["since"], entry["until"]):
                return True
        return False

    @cached_property
    def _table(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Operator -> implementation -> the fields of its Entry; what is no literal stands there as its text."""
        entry, table = (self._definitions["fused_ops"][name] for name in ("Entry", "OPERATORS"))
        assert isinstance(entry, ast.ClassDef) and isinstance(table, ast.AnnAssign) and table.value
        fields = [one for one in entry.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)]
        names = [ast.unparse(one.target) for one in fields]
        defaults = {name: one.value for name, one in zip(names, fields, strict=True) if one.value}
        found: dict[str, dict[str, dict[str, Any]]] = {}
        for operator, columns in _pairs(table.value):
            for column, call in _pairs(columns):
                assert isinstance(call, ast.Call)
                given = dict(zip(names, call.args, strict=False)) | {
                    str(pair.arg): pair.value for pair in call.keywords
                }
                row = {name: _literal(value) for name, value in (defaults | given).items()}
                found.setdefault(operator, {})[column] = row
        return found

    def _key(self, claim: Claim) -> str:
        file, name = claim.id.split("::")
        module = file.removesuffix(".py").replace("/", ".")
        reached: dict[tuple[str, str], str] = {}
        pending = [(module, name), *(("conftest", fixture) for fixture in self._automatic)]
        while pending:
            place = pending.pop()
            if place not in reached:
                if place not in self._read:
                    node = self._definitions[place[0]][place[1]]
                    self._read[place] = _dumped(node), list(self._references(place[0], node))
                reached[place], references = self._read[place]
                pending += references
        return digest_of(sorted([*place, text] for place, text in reached.items()))

    @cached_property
    def _automatic(self) -> list[str]:
        return [name for name, node in self._definitions.get("conftest", {}).items() if "autouse" in ast.dump(node)]

    def _references(self, module: str, node: Definition) -> Iterator[tuple[str, str]]:
        if isinstance(node, ast.Import | ast.ImportFrom):
            return
        for part in ast.walk(node):
            if isinstance(part, ast.Name | ast.arg):
                yield from self._resolve(module, part.id if isinstance(part, ast.Name) else part.arg)
            elif isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name):
                bound = self._definitions[module].get(part.value.id)
                if isinstance(bound, ast.Import) and part.attr in self._definitions.get(part.value.id, {}):
                    yield part.value.id, part.attr

    def _resolve(self, module: str, name: str) -> Iterator[tuple[str, str]]:
        """Where a name used in a module is defined in the room; fixtures come from conftest."""
        bound = self._definitions[module].get(name)
        if bound is None:
            if name in self._definitions.get("conftest", {}) and module != "conftest":
                yield "conftest", name
        elif isinstance(bound, ast.ImportFrom):
            origin = next((alias.name for alias in bound.names if (alias.asname or alias.name) == name), name)
            source = (bound.module or "").removeprefix("smoke_tests.")
            if origin in self._definitions.get(source, {}):
                yield source, origin
            elif (inner := f"{source}.{origin}") in self._definitions:
                yield from ((inner, each) for each in self._definitions[inner])
        elif not isinstance(bound, ast.Import):
            yield module, name


def _names(statement: Definition) -> list[str]:
    match statement:
        case ast.FunctionDef() | ast.ClassDef():
            return [statement.name]
        case ast.Import() | ast.ImportFrom():
            return [(alias.asname or alias.name).split(".")[0] for alias in statement.names]
        case ast.AnnAssign():
            return [statement.target.id] if isinstance(statement.target, ast.Name) else []
        case ast.Assign():
            return [part.id for target in statement.targets for part in ast.walk(target) if isinstance(part, ast.Name)]


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


def _dumped(node: ast.AST) -> str:
    """The syntax tree as text, the same on every Python: 3.12 added a field, 3.13 leaves empty ones out by default."""
    for part in ast.walk(node):
        if hasattr(part, "type_params"):  # the claims are written for Python 3.8 and have none
            del part.type_params
    every: dict[str, Any] = {"show_empty": True} if sys.version_info >= (3, 13) else {}
    return ast.dump(node, **every)


class Brought(BaseModel):
    """What a file from elsewhere has to hold, since it is read here; what else it holds is kept."""

    model_config = ConfigDict(extra="allow", strict=True)


class Machine(Brought):
    name: Annotated[str, Field(pattern=r"^\w[\w .+-]*$")]  # it becomes the name of a file
    cpu: str


class Hardware(Machine):
    arch: str
    gpus: list[Any]


class Outcome(Brought):
    id: str
    claim: str
    package: str
    outcome: Literal["proved", "refuted", "unproven"]
    seed: list[str]
    seconds: float
    reason: str
    measured: dict[str, Any]


class Outcomes(Brought):
    target: str
    stack: str
    files: dict[str, str]
    hardware: Hardware
    claims: list[Outcome]


class Package(Brought):
    built_with: dict[str, Any]


class Manifest(Brought):
    packages: dict[str, Package]


class Built(Manifest):
    target: str
    stack: str


class Evidence(Built):
    name: str
    hardware: Machine
    claims: list[Outcome]
    log_sha256: str


def brought(model: type[Brought], path: Path) -> dict[str, Any]:
    """What a file of JSON holds, if the model says so; refused by its first fault."""
    found: dict[str, Any] = read_json(path)
    try:
        model.model_validate(found)
    except ValidationError as error:
        raise Refusal(f"{path} is not as its writer leaves it ({fault_of(error)}): bring it again, whole.") from None
    return found


def fault_of(error: ValidationError) -> str:
    """The first fault that a model finds: where, and what."""
    fault = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, fault['loc'])) or 'all of it'}: {fault['msg']}"


def smoke(plan: Plan, env: Path) -> int:
    """Run every claim in the environment, write evidence and log, print the table; 1 if one is refuted."""
    folder = _folder(plan)
    outcomes = folder / "outcomes.json"
    python, tests = str(environment.python_of(env)), str(plan.root / "smoke_tests")
    command = [python, "-m", "pytest", tests, "--no-header", "--evidence", str(outcomes)]
    command += ["--color", "yes" if console.is_terminal else "no"]
    code, log = watched(command, plan.root, environment.run_variables(plan.target, env))
    manifest = read_json(env / "fusebox" / "manifest.json")
    failed = keep(plan, outcomes, code, log, manifest)
    outcomes.unlink()
    return failed


def _folder(plan: Plan) -> Path:
    folder = environment.folder(plan.root, plan.target) / "evidence"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def watched(command: list[str], folder: Path, variables: Mapping[str, str]) -> tuple[int, str]:
    """Run a command, show what it prints, and return its exit code and all of that."""
    lines = []
    with group(command, folder, variables) as process:
        assert process.stdout
        for line in process.stdout:
            console.file.write(line)
            console.file.flush()
            lines.append(line)
        return process.wait(), "".join(lines)


def keep(plan: Plan, outcomes: Path, code: int, log: str, manifest: dict[str, Any], image: str | None = None) -> int:
    """Make evidence of a run's outcomes, show it, and return 1 if a claim was refuted; `image` is where it ran."""
    if not outcomes.exists():
        raise Refusal(
            f"{plan.target.name}: the smoke tests ended with code {code} and left no outcomes: read what "
            "they printed above."
        )
    found = brought(Outcomes, outcomes)
    if found["target"] != plan.target.name:
        raise Refusal(f"{outcomes} is of {found['target']}: bring that of {plan.target.name}.")
    written = _assemble(plan, found, log, manifest, image)
    console.print(_table(written))
    say(f"evidence: {_folder(plan)}/{written['name']}.json")
    return 1 if code or any(claim["outcome"] == "refuted" for claim in written["claims"]) else 0


def _assemble(
    plan: Plan, outcomes: dict[str, Any], log: str, manifest: dict[str, Any], image: str | None
) -> dict[str, Any]:
    """Outcomes with keys and what was tested, written beside the log; no path of this machine stays in it."""
    room, folder = Room(plan.root), _folder(plan)
    if others := room.others_than(outcomes.pop("files")):
        raise Refusal(
            f"{plan.target.name}: these outcomes are of other tests than {room.folder} holds ({', '.join(others)}): "
            "run those, where the environment is."
        )
    name = f"{plan.target.name}--{machine_name(outcomes['hardware'], 'x')}"
    write_text(folder / f"{name}.log", without_paths(plan, re.sub(r"\x1b\[[\d;]*m", "", log)))
    for claim in outcomes["claims"]:
        claim["key"] = room.key(claim["id"].split("[")[0])
        claim["reason"] = without_paths(plan, claim["reason"])
        texts = {name: value for name, value in claim["measured"].items() if isinstance(value, str)}
        claim["measured"].update({name: without_paths(plan, value) for name, value in texts.items()})
    evidence = {
        "name": name,
        **outcomes,
        **({"image": image} if image else {}),
        "packages": manifest["packages"],
        "log_sha256": sha256_of(folder / f"{name}.log"),
    }
    write_json(folder / f"{name}.json", evidence)
    return evidence


def machine_name(machine: Mapping[str, Any], times: str = " × ") -> str:
    """The name of the hardware, before it how many GPUs there were if several."""
    count = len(machine["gpus"]) if machine["name"] != machine["arch"] else 1
    return f"{count}{times}{machine['name']}" if count > 1 else str(machine["name"])


def without_paths(plan: Plan, text: str) -> str:
    """A text to be committed, without the places of checkout and home folder here, and of anything built anywhere."""
    home = os.path.expanduser("~")  # noqa: PTH111  # Path.home() raises where the user has none
    text = text.replace(str(plan.root), ".")
    text = text if home == "/" else text.replace(home, "~")
    text = re.sub(r"[/~.][^\s'\":]*/(?=outcomes\.json)|[/~.][^\s'\":]*/partial/build/", "", text)
    return re.sub(r"[/~.][^\s'\":]*(?=/lib/python3\.\d+/)", "ENV", text)


def _table(evidence: dict[str, Any]) -> Table:
    """One row per claim; its parameters are counted."""
    table = Table(
        title=f"{evidence['target']} on {evidence['hardware']['name']} ({evidence['hardware']['cpu']})",
        box=None,
        pad_edge=False,
    )
    for column in ("outcome", "package", "claim", "seed", "seconds"):
        table.add_column(column, justify="right" if column == "seconds" else "left", overflow="fold")
    for rows in grouped(evidence["claims"]).values():
        good, outcome = sum(row["outcome"] == "proved" for row in rows), worst(rows)
        count = f" ({good} of {len(rows)})" if len(rows) > 1 else ""
        colour = {"proved": "green", "refuted": "red", "unproven": "yellow"}[outcome]
        seconds = sum(row["seconds"] for row in rows)
        sentence = escape(rows[0]["claim"])
        table.add_row(
            f"[{colour}]{outcome}[/{colour}]{count}",
            rows[0]["package"],
            sentence,
            " ".join(rows[0]["seed"]),
            f"{seconds:.1f}",
        )
    return table


def grouped(claims: Iterable[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """The rows of each claim and package, in the order in which they ran."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for claim in claims:
        groups.setdefault((claim["package"], claim["claim"]), []).append(claim)
    return groups


def worst(rows: Iterable[dict[str, Any]]) -> str:
    """The outcome that counts for several rows: refuted before unproven before proved."""
    outcomes = {row["outcome"] for row in rows}
    return next(word for word in ("refuted", "unproven", "proved") if word in outcomes)


def bring(plan: Plan, folder: Path) -> None:
    """Make evidence of a run on another machine: outcomes.json, smoke.log and manifest.json of its environment."""
    outcomes, log, manifest = (folder / name for name in ("outcomes.json", "smoke.log", "manifest.json"))
    for path in (outcomes, log, manifest):
        if not path.is_file():
            raise Refusal(f"{path} is missing: bring it from where the smoke tests ran (README says how).")
    described = brought(Manifest, manifest)
    keep(plan, outcomes, 0, log.read_text(encoding="utf-8", errors="replace"), described)


def promote(plan: Plan) -> tuple[list[Path], list[Path]]:
    """Copy the evidence of a target's smoke runs to smoke_tests/evidence/: what was copied, and what is stale.

    There is one file per hardware. The last run's is refused if it is stale; that of another machine is left out.
    """
    folder = environment.folder(plan.root, plan.target) / "evidence"
    found = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise Refusal(f'{folder} holds no evidence: run `nox -s "smoke({plan.target.name})"` first.')
    room, runs = Room(plan.root), {path: read(path) for path in found}
    stale = [path for path, run in runs.items() if state(built_for(plan, run), room, run, run["claims"]) == "stale"]
    if found[-1] in stale:
        raise Refusal(
            f'{found[-1]} was made by another state of this checkout: run `nox -s "smoke({plan.target.name})"` again.'
        )
    promoted = []
    for path in sorted(set(found) - set(stale)):
        for source in (path, path.with_suffix(".log")):
            final = plan.root / "smoke_tests" / "evidence" / source.name
            final.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, final)
            promoted.append(final.relative_to(plan.root))
    _built_path(plan.root, plan.target.name).unlink(missing_ok=True)  # that claims ran in it says more
    return promoted, sorted(stale)


def keep_built(plan: Plan, folder: Path | None) -> Path:
    """Keep what a target's environment was made of and with, to be committed; no claim need have run in it."""
    source = (folder or environment.folder(plan.root, plan.target) / "env" / "fusebox") / "manifest.json"
    if not source.is_file():
        how = "bring it from where the environment is" if folder else f'run `nox -s "build({plan.target.name})"` first'
        raise Refusal(f"{source} is missing: {how}.")
    manifest = brought(Built, source)
    if manifest["target"] != plan.target.name or manifest["stack"] != built_for(plan, manifest).stack:
        raise Refusal(f'{source} is of another state of this checkout: run `nox -s "build({plan.target.name})"` again.')
    final = _built_path(plan.root, plan.target.name)
    write_json(final, manifest)
    return final.relative_to(plan.root)


def built(root: Path, target: str) -> dict[str, Any] | None:
    """The committed manifest of a target's environment, if one is kept."""
    path = _built_path(root, target)
    return brought(Built, path) if path.exists() else None


def _built_path(root: Path, target: str) -> Path:
    return root / "smoke_tests" / "evidence" / "built" / f"{target}.json"


def promoted(root: Path, target: str) -> list[dict[str, Any]]:
    """The committed evidence of a target, one per hardware."""
    return [read(path) for path in sorted((root / "smoke_tests" / "evidence").glob(f"{target}--*.json"))]


def against_moving(plan: Plan) -> str | None:
    """Why a target's floating tag must stay where it is: a claim that no committed run of this stack proves.

    Or one that a run refutes. What one run could not show, as on fewer GPUs, another may.
    """
    room, runs = Room(plan.root), promoted(plan.root, plan.target.name)
    if not runs:
        return "nothing of this target was ever proved"
    against: dict[str, str] = {}
    proved = set()
    for run in runs:
        ran_as = built_for(plan, run)
        partly = ", compiled for some of its GPUs only" if ran_as.stack != plan.stack else ""
        for row in run["claims"]:
            word = state(ran_as, room, run, [row])
            if word == "refuted":
                return f"{row['id']} is {word} in {run['name']}"
            if word == "proved" and not partly:
                proved.add(row["id"])
            against.setdefault(row["id"], f"{row['id']} is {word} in {run['name']}{partly}")
    for identity, reason in against.items():
        if identity not in proved:
            return reason
    first, *others = (missing_claims(plan, room, run) for run in runs)
    missing = next((claim for claim in first if all(claim in other for other in others)), None)
    return f"{missing.id} was not run in {runs[0]['name']}" if missing else None


def missing_claims(plan: Plan, room: Room, run: dict[str, Any]) -> list[Claim]:
    """The claims that a run of the target should have and has not."""
    ran = {row["id"].split("[")[0] for row in run["claims"]}
    return [claim for claim in room.claims.values() if claim.is_expected(plan, room) and claim.id not in ran]


def read(path: Path) -> dict[str, Any]:
    """Evidence whose raw log is there and unchanged; anything else is refused."""
    evidence = brought(Evidence, path)
    log = path.with_suffix(".log")
    if not log.exists() or sha256_of(log) != evidence["log_sha256"]:
        raise Refusal(
            f"{path}: its raw log {log.name} is missing or was changed: restore both from the run that made them."
        )
    return evidence


def built_for(plan: Plan, evidence: dict[str, Any]) -> Plan:
    """The plan with the GPU architectures that a run's wheels were compiled for: `--sm` can leave some out."""
    found = [
        package["built_with"]["sm"] for package in evidence["packages"].values() if package["built_with"].get("sm")
    ]
    return replace(plan, target=changed(plan.target, found[0], None)) if found else plan


def state(plan: Plan, room: Room, evidence: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """Of some rows: proved, refuted, unproven, or stale when the stack or a claim changed after the run."""
    if evidence["stack"] != plan.stack or any(room.key(row["id"].split("[")[0]) != row["key"] for row in rows):
        return "stale"
    return worst(rows)
