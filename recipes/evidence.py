"""What was proven: run the claims, keep their outcomes with what was tested, and say which of them still hold.

A claim's key is that of the definitions of smoke_tests/ that it ran (recipes/definitions.py); the stack key is the hash
of the pinned inputs. A row whose keys differ from the checkout's has changed since: it is shown as such, not as proof.
"""

from __future__ import annotations

import ast
import collections
import importlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

from packaging.version import Version
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from rich.markup import escape
from rich.table import Table

from recipes import environment
from recipes.cache import read_json, sha256_of, write_json, write_text
from recipes.definitions import Code, Place, Recorded, packed, syntax, unpacked
from recipes.model import ROOT, Refusal
from recipes.plan import Plan, changed
from recipes.process import git_variables, group
from recipes.progress import console, say

CHANGED = "changed"  # of a row: what it was proved of is no longer what the checkout holds
HARNESS = ("conftest.py", "claims.py", "hardware.py", "pytest.ini")  # what selects, runs and judges every claim


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


class Room:
    """The code of smoke_tests/, read and never imported: its claims, and what each of them reaches."""

    def __init__(self, root: Path) -> None:
        self.folder = root / "smoke_tests"

    @cached_property
    def code(self) -> Code:
        """All definitions of the room."""
        return Code(self.folder, HARNESS)

    def others_than(self, files: Mapping[str, str]) -> list[str]:
        """The files (name -> sha256) that something was made with and that have changed since, or are gone."""
        paths = {name: self.folder / name for name in files}
        return [name for name, path in paths.items() if not path.exists() or sha256_of(path) != files[name]]

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

    def test(self, identity: str) -> Place | None:
        """The definition of the test that makes a claim, whatever its row; None if it is gone."""
        file, _, name = identity.split("[")[0].partition("::")
        return (file, name) if (file, name) in self.code.definitions else None

    def key(self, identity: str) -> str | None:
        """The key of a claim by all that its text can reach; None if it is gone."""
        place = self.test(identity)
        return self.code.key(self.code.floor([place])) if place else None

    def key_of(self, run: Mapping[str, Any], row: Mapping[str, Any]) -> str | None:
        """The key that a row of evidence would have now: by what it ran, or where that is not recorded, could reach."""
        return self.code.key_now(recorded(run, row)) if "ran" in row else self.key(row["id"])

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
        nodes = {}
        for node in syntax(self.folder / "fused_ops.py").body:
            if isinstance(node, ast.ClassDef | ast.AnnAssign):
                nodes[node.name if isinstance(node, ast.ClassDef) else ast.unparse(node.target)] = node
        entry, table = nodes["Entry"], nodes["OPERATORS"]
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


def recorded(run: Mapping[str, Any], row: Mapping[str, Any]) -> Recorded:
    """The definitions that a row of evidence ran, with the digests that they had."""
    table = list(run["definitions"].items())
    chosen = (table[number] for number in unpacked(row["ran"]))
    return tuple(
        ((file, name), digest) for (file, _, name), digest in ((at.partition(":"), digest) for at, digest in chosen)
    )


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


def imported(name: str) -> ModuleType:
    """A module of this checkout's smoke_tests/ that needs the standard library only."""
    folder = str(ROOT / "smoke_tests")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(name)


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
    ran: dict[str, list[str]] | None = None
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
    started: str
    hardware: Machine
    claims: list[Outcome]
    commit: str
    files: dict[str, str]
    definitions: dict[str, str]
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
    if others := room.others_than(outcomes["files"]):
        raise Refusal(
            f"{plan.target.name}: these outcomes are of other tests than {room.folder} holds ({', '.join(others)}): "
            "run those, where the environment is."
        )
    name = f"{plan.target.name}--{machine_name(outcomes['hardware'], 'x')}"
    write_text(folder / f"{name}.log", without_paths(plan, re.sub(r"\x1b\[[\d;]*m", "", log)))
    for claim in outcomes["claims"]:
        claim["reason"] = without_paths(plan, claim["reason"])
        texts = {name: value for name, value in claim["measured"].items() if isinstance(value, str)}
        claim["measured"].update({name: without_paths(plan, value) for name, value in texts.items()})
    definitions = _with_keys(room, outcomes["claims"], outcomes.pop("ran", None))
    evidence = {
        "name": name,
        **outcomes,
        **({"image": image} if image else {}),
        "commit": commit_of(plan.root),
        "definitions": definitions,
        "packages": manifest["packages"],
        "log_sha256": sha256_of(folder / f"{name}.log"),
    }
    write_json(folder / f"{name}.json", evidence)
    return evidence


def _with_keys(room: Room, claims: list[dict[str, Any]], ran: dict[str, list[str]] | None) -> dict[str, str]:
    """Give each claim its key and what it ran; the table of all definitions that claims ran, with their digests."""
    code, places = room.code, {}
    functions = {claim: set(_places(code, names)) for claim, names in (ran or {}).items()}
    compiled, always = functions.pop("compiled", set()), functions.get("", set())
    anywhere = frozenset().union(*functions.values()) if functions else frozenset()
    for claim in claims:
        if mine := functions.get(claim["id"]):
            places[claim["id"]] = code.ran(mine, anywhere, mine & compiled) | always
    table = sorted(set().union(*places.values())) if places else []
    numbers = {place: number for number, place in enumerate(table)}
    for claim in claims:
        if claim["id"] in places:
            claim["ran"] = packed(numbers[place] for place in places[claim["id"]])
            claim["key"] = code.key(places[claim["id"]])
        else:
            claim["key"] = room.key(claim["id"])
    return {f"{file}:{name}": code.definitions[file, name].digest for file, name in table}


def _places(code: Code, names: Iterable[str]) -> Iterator[Place]:
    for file, _, name in (text.partition(":") for text in names):
        if place := code.place(file, name):
            yield place


def commit_of(root: Path) -> str:
    """The commit whose smoke_tests/ this is, shortened; "" where there is none, as between commits."""
    git = ("git", "-C", str(root))
    asked = (
        ("rev-parse", "--short=12", "HEAD"),
        ("status", "--porcelain", "--", "smoke_tests/*.py", "smoke_tests/*.ini"),
    )
    answers = [
        subprocess.run([*git, *words], env=git_variables(), capture_output=True, text=True, check=False)
        for words in asked
    ]
    return answers[0].stdout.strip() if not any(one.returncode for one in answers) and not answers[1].stdout else ""


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
            raise Refusal(
                f"{path} is missing: bring it from where the smoke tests ran (docs/use/elsewhere.md says how)."
            )
    described = brought(Manifest, manifest)
    keep(plan, outcomes, 0, log.read_text(encoding="utf-8", errors="replace"), described)


def promote(plan: Plan) -> list[Path]:
    """Copy the evidence of a target's smoke runs to smoke_tests/evidence/, one file per hardware: what was copied.

    What changed after a run is shown as such. Refused: outcomes that the raw log does not hold, and tests of no commit.
    """
    folder = environment.folder(plan.root, plan.target) / "evidence"
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise Refusal(f'{folder} holds no evidence: run `nox -s "smoke({plan.target.name})"` first.')
    promoted = []
    for path, run in [(path, _promotable(plan, path)) for path in paths]:
        final = plan.root / "smoke_tests" / "evidence" / path.name
        if final.exists() and read(final)["started"] > run["started"]:
            continue  # another checkout's run is newer
        write_json(final, run)
        shutil.copyfile(path.with_suffix(".log"), final.with_suffix(".log"))
        promoted += [final.relative_to(plan.root), final.with_suffix(".log").relative_to(plan.root)]
    _built_path(plan.root, plan.target.name).unlink(missing_ok=True)  # that claims ran in it says more
    return promoted


def _promotable(plan: Plan, path: Path) -> dict[str, Any]:
    """Evidence that its raw log holds line by line, with the commit of its tests."""
    run = read(path)
    runs = compare_log(path.with_suffix(".log"), run["claims"])
    commit = run["commit"] or ("" if Room(plan.root).others_than(run["files"]) else commit_of(plan.root))
    if not commit:
        raise Refusal(f"{path} is of tests that are in no commit: commit smoke_tests/, and promote again.")
    return {**run, "commit": commit, **({"runs_in_log": runs} if runs > 1 else {})}


def compare_log(log: Path, claims: Iterable[Mapping[str, Any]]) -> int:
    """How many runs a raw log holds; refused where none of them printed exactly these claims."""
    printed = imported("printed")
    wanted = collections.Counter(_parts(printed.line(claim)) for claim in claims)
    runs: list[collections.Counter[tuple[str, ...]]] = [collections.Counter()]
    for line in log.read_text(encoding="utf-8").splitlines():
        if re.match(r"(proved|refuted|unproven) +\S+ .* \(\d+\.\d s\)$", line):
            runs[-1][_parts(line)] += 1
        elif re.match(r"target \S+ on .*: \d+ proved, \d+ refuted, \d+ unproven", line):
            runs.append(collections.Counter())
    runs = [lines for lines in runs if lines]
    if wanted not in runs:
        apart = (wanted - (runs or [wanted])[-1]) or ((runs or [wanted])[-1] - wanted)
        example = ", ".join(next(iter(apart), ("no claim at all",)))
        raise Refusal(f"{log} does not hold the outcomes beside it (such as {example!r}): bring both from one run.")
    return len(runs)


def _parts(line: str) -> tuple[str, ...]:
    """A printed line without its order: JSON keeps numbers by their names, the log in the order of measuring."""
    text, _, seconds = line.rpartition(" (")
    return (*sorted(re.split("[;,] ", text)), seconds)


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


# What programs of smoke_tests/ write, kept in smoke_tests/evidence/: the files, and the program.
PROGRAMS = {
    "bench/*.jsonl": "bench/__main__.py",
    "training/guard*.json": "training/guard_proof.py",
    "training/kills*.json": "training/kills.py",
    "training/*--*--*.json": "training/parity.py",
}


@dataclass(frozen=True)
class Record:
    """A file that a program of smoke_tests/ wrote, and whether the program is still what it was."""

    file: str
    program: str
    commit: str
    changed: bool


def record(root: Path, path: Path) -> str:
    """Note with which commit's program a file of smoke_tests/evidence/ was made: this one's."""
    folder = root / "smoke_tests" / "evidence"
    try:
        name = path.resolve().relative_to(folder.resolve()).as_posix()
    except ValueError:
        name = str(path)
    if not (program := program_of(name)) or not (folder / name).is_file():
        known = ", ".join(PROGRAMS)
        raise Refusal(f"{path} is no record below {folder} ({known}): put it there under such a name.")
    if not (commit := commit_of(root)):
        raise Refusal(f"{path} would be of tests that are in no commit: commit smoke_tests/, and record it again.")
    noted = {"commit": commit, "key": _key_of_program(Room(root).code, program)}
    write_json(folder / "records.json", {**_noted(root), name: noted})
    return name


def records(root: Path) -> list[Record]:
    """Every record that is kept; one of which no commit is known has changed."""
    code, noted = Room(root).code, _noted(root)
    found = []
    for pattern, program in PROGRAMS.items():
        for path in sorted((root / "smoke_tests" / "evidence").glob(pattern)):
            name = path.relative_to(root / "smoke_tests" / "evidence").as_posix()
            made = noted.get(name, {"commit": "", "key": ""})
            found.append(Record(name, program, made["commit"], made["key"] != _key_of_program(code, program)))
    return found


def program_of(name: str) -> str | None:
    """The program that writes a file of this name."""
    return next((program for pattern, program in PROGRAMS.items() if fnmatch(name, pattern)), None)


def _noted(root: Path) -> dict[str, dict[str, str]]:
    path = root / "smoke_tests" / "evidence" / "records.json"
    return read_json(path) if path.exists() else {}


def _key_of_program(code: Code, program: str) -> str | None:
    """The key of all that a program can reach; None if it is gone."""
    module = code.modules.get(program)
    return code.key(code.floor(one.place for one in module.definitions.values())) if module else None


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
            word = state(ran_as, room, run, row)
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


def state(plan: Plan, room: Room, evidence: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    """Of a row: proved, refuted, unproven, or changed when the stack or what it ran changed after the run."""
    fresh = evidence["stack"] == plan.stack and room.key_of(evidence, row) == row["key"]
    return str(row["outcome"]) if fresh else CHANGED


def states(plan: Plan, room: Room, evidence: Mapping[str, Any], rows: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """How many of some rows are in which state, the best first."""
    counts = collections.Counter(state(plan, room, evidence, row) for row in rows)
    return {word: counts[word] for word in ("proved", CHANGED, "unproven", "refuted") if counts[word]}


def changes(plan: Plan, room: Room, run: Mapping[str, Any]) -> dict[str, list[str]]:
    """What changed since a run (a definition, or "the stack"), and the rows that it concerns."""
    found: dict[str, list[str]] = {}
    for row in run["claims"]:
        if state(plan, room, run, row) != CHANGED:
            continue
        whole = "the stack" if run["stack"] != plan.stack else "what it can reach" if "ran" not in row else ""
        names = [f"{file}:{name}" for file, name in room.code.changed(recorded(run, row))] if not whole else [whole]
        for name in names or ["what its names stand for"]:
            found.setdefault(name, []).append(row["id"])
    return found
