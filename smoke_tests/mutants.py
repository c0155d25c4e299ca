"""The power of the tests themselves: faults planted on purpose, each of which a claim has to catch.

    ENV/bin/python -m smoke_tests.mutants [--out FILE.json] [--only WORDS] [--seeds 100] [--compiled FOLDER]
                                          [--claims FILE.json]

A mutant counts if what people usually test still passes under it (shapes, finite numbers, a loss that falls) and a
claim about what it touches runs. It is caught if such a claim, which passes without it, fails by an assertion of this
room and not by a crash. Those of faults/ and training/faults.py are chosen, and so are those of compiled_faults.toml,
which upstream's own code has when it is compiled. The others are made by a rule that changes every constant, sign,
comparison, transpose and order of the adapters in operators/, and of what decides a number in training, one at a time.
The same claims run on correct code as well, with one seed after another, all in one process: there each failure is a
false alarm.
"""

from __future__ import annotations

import argparse
import ast
import collections
import contextlib
import copy
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import types
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import (
    Any,
    Callable,
    ContextManager,
    Dict,
    Iterator,
    List,
    NamedTuple,
    NoReturn,
    Optional,
    Sequence,
    Set,
    Tuple,
)
from unittest import mock

import pytest
import torch

from smoke_tests import hardware, recorder
from smoke_tests.claims import claim_of
from smoke_tests.conftest import files_of_the_room, read_manifest, write_whole
from smoke_tests.faults.environment import EVERY
from smoke_tests.faults.planting import FAULTS, in_table, loaded
from smoke_tests.faults.survivors import WHY
from smoke_tests.operators import bounds, kernels
from smoke_tests.operators import table as fused_ops
from smoke_tests.operators.samples import sample_for, scaled_mm, scaled_mm_arguments
from smoke_tests.operators.torch_adapter import version_of_torch
from smoke_tests.training import faults as of_training
from smoke_tests.training.models import Shape
from smoke_tests.training.options import Options
from smoke_tests.training.short_training import train
from smoke_tests.training.trainer import Run

# Each process compiles by itself: torch's compile workers would delay its end by up to five minutes.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
ROOM = Path(__file__).resolve().parent
TABLE = ROOM / "operators" / "table.py"
THIS = [sys.executable, "-m", "smoke_tests.mutants", *sys.argv[1:]]  # this program, as started
MANIFEST = read_manifest(Path(sys.prefix, "fusebox", "manifest.json"))
VERSIONS = {name: entry["version"] for name, entry in MANIFEST["packages"].items()}
CUDA = MANIFEST["cuda"] != "none"
DEVICE = "cuda" if CUDA else "cpu"
SHAPE = Shape(layers=1, head_size=64, hidden=832) if CUDA else Shape(layers=1)
# 100 seeds leave out claims about the bytes of files and the names of kernels (*_ran*), which no seed changes, about
# training, which takes minutes, and those marked as long in other files.
LONG = {"test_environment.py", "test_training.py", "test_torchtitan.py", "test_two_hosts.py"}
CLEAN: Dict[str, Any] = {"seeds": 0, "claims": 0, "alarms": []}  # before the first seed
ALARM = 1  # the exit code of a whole run with a false alarm
LONGEST = 120.0  # seconds of CPU time for a mutant in training: a loop that never ends can fill the memory
NUMERIC = sorted({path.name for path in ROOM.glob("test_*.py")} - LONG)


class Mutant(NamedTuple):
    """A fault in one implementation; the claims are pytest's arguments, of which one has to fail."""

    name: str
    kind: str
    origin: str  # "chosen", "compiled", or "rule"
    operator: str
    column: str
    claims: Tuple[str, ...]
    plant: Callable[[], ContextManager[Any]]
    lines: Tuple[int, int] = (0, 0)  # of the file, where the rule changed it


# --- running claims in this process ---


class Watch:
    """Keeps to the claims about one implementation (or to all), and notes what fails."""

    def __init__(self, operator: str = "", column: str = "") -> None:
        self.operator, self.column = operator, column
        self.ran: List[str] = []
        self.assertions: Dict[str, str] = {}  # claim -> the message of its assertion
        self.crashes: Dict[str, str] = {}

    def concerns(self, item: pytest.Item) -> bool:
        row = item.callspec.params if hasattr(item, "callspec") else {}
        operators = {name for mark in item.iter_markers("every") for name in mark.args}
        if operators and self.operator:
            asked = row.get("name", self.operator), row.get("column")
            return self.operator in operators and asked == (self.operator, self.column)
        package, _, variant = self.column.partition(".")
        if package == of_training.TRAINING:
            return True
        return package in ("", claim_of(item, MANIFEST).package) and row.get("recipe", variant) == variant

    def pytest_collection_modifyitems(self, items: List[pytest.Item]) -> None:
        items[:] = [item for item in items if self.concerns(item)]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        identity = "{}::{}".format(item.path.relative_to(ROOM).as_posix(), item.name)
        if call.when == "call":
            self.ran.append(identity)
        if call.excinfo is None or call.excinfo.errisinstance(pytest.skip.Exception):
            return
        message = call.excinfo.exconly(tryshort=True).splitlines()[0]
        if asserted(call.excinfo):
            self.assertions[identity] = message
            item.session.shouldstop = "one is enough" if self.column else False
        else:
            self.crashes[identity] = message


def asserted(failure: pytest.ExceptionInfo[BaseException]) -> bool:
    """Whether a claim failed by an assertion of this room: assert, or what pytest or a testing module checks for it."""
    paths = [Path(str(entry.path)) for entry in failure.traceback]
    while paths and {"_pytest", "testing"} & set(paths[-1].parts):
        paths.pop()
    ours = bool(paths) and ROOM in paths[-1].parents
    return ours and failure.errisinstance((AssertionError, pytest.fail.Exception))


def run(watch: Watch, *claims: str, marked: str = "", named: str = "") -> Watch:
    """Run claims of this room under what is planted; a claim that is not about this target does not run."""
    printed = io.StringIO()
    which = ["-m", marked, "-k", named, *[str(ROOM / claim) for claim in claims]]
    arguments = ["--rootdir", str(ROOM), "-n0", "--tb=no", *which]
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        code = pytest.main(arguments, [watch])
    ended = (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.INTERNAL_ERROR)
    assert code not in ended or "no claim is about" in printed.getvalue(), printed.getvalue()
    return watch


# --- what ordinary tests would notice ---


def columns_of(operator: str, dtype: str = "") -> List[str]:
    """The implementations of an operator that this target has, each once, or those of them proved with a dtype."""
    rows = fused_ops.rows(operator, VERSIONS, cuda=CUDA)
    return list(dict.fromkeys(row.column for row in rows if dtype in str(row.dtype)))


LLAMA = ("attention", "rms_norm", "rope", "swiglu", "cross_entropy", "adamw")


def noticed_by_anybody(operator: str, column: str) -> Optional[str]:
    """What ordinary tests would notice: a crash, another shape, a number that is not finite, a loss that stays."""
    torch.manual_seed(0)
    try:
        visible = noticed_in_a_call(operator, column)
        losses = [] if visible else losses_with(operator, column)
    except Exception as error:
        return "{}: {}".format(type(error).__name__, (str(error).splitlines() or [""])[0])
    if visible or losses[-1] < losses[0]:
        return visible
    return "the loss goes from {:.3g} to {:.3g}".format(losses[0], losses[-1])


def noticed_in_a_call(operator: str, column: str) -> Optional[str]:
    """What is wrong with an operator's result: another shape, or a number that is not finite."""
    if operator in ("", "adamw", "linear", "rope"):
        return None
    if operator == "scaled_mm":
        product = scaled_mm(scaled_mm_arguments(False)[2:], torch.bfloat16, DEVICE)
        return None if product.shape == (165, 144) and product.isfinite().all() else "shape, or not finite"
    given = sample_for(operator, column, torch.bfloat16 if CUDA else torch.float32)
    call = given.bind(fused_ops.operator(operator, column), DEVICE)
    output, *gradients = bounds.forward_and_backward(call, given.inputs, given.gradient, DEVICE)
    if output.shape != given.gradient.shape:
        return "shape {}".format(tuple(output.shape))
    finite = all(tensor.isfinite().all() for tensor in (output, *gradients))
    return None if finite else "numbers that are not finite"


def losses_with(operator: str, column: str) -> List[float]:
    """The losses of twenty steps of training with this implementation."""
    if column == of_training.TRAINING:  # its claims run on a CPU
        with adamw_on_a_cpu():
            ours = Run(Options(precision="float32", ops="naive", batch_size=2, warmup=2, device="cpu"))
            return [ours.update(step)["loss"] for step in range(20)]
    columns = {**{name: columns_of(name)[0] for name in LLAMA}, "linear": "torch"}
    return train({**columns, operator: column}, 0, DEVICE, SHAPE, steps=20)


def adamw_on_a_cpu() -> ContextManager[Any]:
    """The context in which torch's AdamW runs on a CPU: before torch 2.4 only the unfused one does."""
    if version_of_torch() >= (2, 4):
        return contextlib.nullcontext()
    return in_table("adamw", lambda _: torch.optim.AdamW)("torch")


# --- the mutants ---


def chosen() -> Iterator[Mutant]:
    """Every fault of faults/ and training/faults.py, in each implementation that it is for and that this target has."""
    for fault in FAULTS:
        for claim in fault.claims:
            file, _, test = claim.partition("::")
            assert f"def {test}(" in (ROOM / file).read_text(encoding="utf-8"), claim
        if fault.column == EVERY:
            columns = [name for name, entry in MANIFEST["packages"].items() if entry.get("record_sha256")]
        elif fault.operator:
            available = columns_of(fault.operator, fault.dtype)
            columns = [column for column in available if fault.column in ("", column, column.partition(".")[0])]
        else:
            columns = [fault.column] if fault.column in (*VERSIONS, of_training.TRAINING) else []
        for column in columns:
            plant = partial(fault.plant, column)
            yield Mutant(fault.name, fault.kind, "chosen", fault.operator, column, fault.claims, plant)


def compiled(folder: Optional[Path]) -> Iterator[Mutant]:
    """Every fault that was compiled into a library of the folder, if this target has the implementation.

    An extension cannot be loaded twice, so each fault is planted in a process of its own, before everything else.
    """
    for fault in json.loads((folder / "faults.json").read_text(encoding="utf-8")) if folder else []:
        if fault["column"] in columns_of(fault["operator"]):
            named = {name: fault[name] for name in ("name", "kind", "operator", "column")}
            assert folder
            plant = partial(loaded, fault["extension"], folder / fault["library"])
            yield Mutant(origin="compiled", claims=tuple(fault["claims"]), plant=plant, **named)


class Site(NamedTuple):
    """A place in a syntax tree, and what the rule puts there."""

    node: Any
    field: str
    value: Any
    what: str


OPPOSITE: Dict[type, Callable[[], ast.AST]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.Pow: ast.Mult,
    ast.USub: ast.UAdd,
    ast.Gt: ast.LtE,
    ast.GtE: ast.Lt,
    ast.Lt: ast.GtE,
}
METHODS = {"t": "clone", "cos": "sin", "sin": "cos"}  # clone: the transpose is left out
SYMMETRIC = ("transpose",)  # functions whose two arguments can be swapped
MACHINERY = ("version_of_torch", "compiled")  # in an adapter, but not part of an implementation


def sites(node: Any) -> Iterator[Site]:
    """Every place below a node that the rule changes: constants, signs, comparisons, transposes and orders."""
    if isinstance(node, ast.arguments):
        return
    value = getattr(node, "value", None)
    if isinstance(node, ast.Constant) and isinstance(value, bool):
        yield Site(node, "value", not value, f"{value} becomes {not value}")
    elif isinstance(node, ast.Constant) and isinstance(value, (int, float)):
        yield from (Site(node, "value", other, f"{value} becomes {other}") for other in (value + 1, value - 1))
    elif isinstance(node, (ast.BinOp, ast.UnaryOp)) and type(node.op) in OPPOSITE:
        yield Site(node, "op", OPPOSITE[type(node.op)](), "{} turned".format(type(node.op).__name__))
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in OPPOSITE:
        yield Site(node, "ops", [OPPOSITE[type(node.ops[0])]()], "{} turned".format(type(node.ops[0]).__name__))
    elif isinstance(node, ast.Attribute) and node.attr in METHODS:
        yield Site(node, "attr", METHODS[node.attr], f"{node.attr} becomes {METHODS[node.attr]}")
    for field in ("args", "elts") if getattr(getattr(node, "func", None), "attr", "") not in SYMMETRIC else ():
        items = getattr(node, field, [])
        for at in range(len(items) - 1 if isinstance(items, list) else 0):
            swapped = [*items[:at], items[at + 1], items[at], *items[at + 2 :]]
            yield Site(node, field, swapped, f"{at + 1} swapped with {at + 2}")
    for child in ast.iter_child_nodes(node):
        if child not in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            yield from sites(child)


def by_rule() -> Iterator[Mutant]:
    """Every change that the rule makes in an adapter, for the first implementation of this target that runs it."""
    for path in sorted((ROOM / "operators").glob("*_adapter.py")):
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
        for definition, (operator, column) in implementing(tree):
            for site in sites(definition):
                first, last = site.node.lineno, site.node.end_lineno
                text = " ".join((ast.get_source_segment(source, site.node) or "").split())
                name = f"{definition.name} {first}:{site.node.col_offset}: {text}: {site.what}"
                if isinstance(definition, ast.FunctionDef):  # the tests call some of them, too
                    plant = partial(recoded, tree, site, f"operators.{path.stem}", definition.name)
                else:
                    plant = partial(rebuilt, path.stem, tree, site, operator, column)
                yield Mutant(name, definition.name, "rule", operator, column, tuple(NUMERIC), plant, (first, last))


def implementing(adapter: ast.Module) -> Iterator[Tuple[Any, Tuple[str, str]]]:
    """The functions and classes of an adapter that this target's implementations run, with the first of these."""
    defined: Dict[str, Any] = {}
    for node in adapter.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        defined[getattr(target, "id", getattr(node, "name", ""))] = node
    first: Dict[str, Tuple[str, str]] = {}
    for place, entry in entries():
        pending = [entry]
        while pending:
            names = {part.id for part in ast.walk(pending.pop()) if isinstance(part, ast.Name)}
            new = [name for name in sorted(names & set(defined)) if name not in first and name not in MACHINERY]
            first.update(dict.fromkeys(new, place))
            pending += [defined[name] for name in new]
    kinds = (ast.FunctionDef, ast.ClassDef)
    yield from ((defined[name], place) for name, place in first.items() if isinstance(defined[name], kinds))


def entries() -> Iterator[Tuple[Tuple[str, str], ast.expr]]:
    """The entries of the table that this target has, as syntax, by operator and column."""
    body = ast.parse(TABLE.read_text(encoding="utf-8")).body
    table: Any = next(node.value for node in body if isinstance(node, ast.AnnAssign))
    for operator, columns in zip(map(ast.literal_eval, table.keys), table.values):
        available = columns_of(operator)
        for column, entry in zip(map(ast.literal_eval, columns.keys), columns.values):
            if column in available:
                yield (operator, column), entry


def by_rule_in_training() -> Iterator[Mutant]:
    """Every change that the rule makes in what decides a number in training.

    faults/ruled.json lists that code and the claims that judge it. An experiment's choices (short_training's settings,
    a start's deviation) are no formulas, and a wrong size of a layer ends in a crash.
    """
    for listed in json.loads((ROOM / "faults" / "ruled.json").read_text(encoding="utf-8")):
        module, claims = listed["module"], tuple(listed["claims"])
        source = (ROOM / "training" / f"{module}.py").read_text(encoding="utf-8")
        tree = ast.parse(source)
        for name in listed["names"]:
            body: Any = tree
            for part in name.split("."):
                body = next(inner for inner in body.body if getattr(inner, "name", "") == part)
            for site in sites(body):
                first, last = site.node.lineno, site.node.end_lineno
                text = " ".join((ast.get_source_segment(source, site.node) or "").split())
                title = f"{module}.{name} {first}:{site.node.col_offset}: {text}: {site.what}"
                plant = partial(recoded, tree, site, f"training.{module}", name)
                yield Mutant(title, name, "rule", "", of_training.TRAINING, claims, plant, (first, last))


REBUILT = "a file of this room, changed"


def changed(tree: ast.Module, site: Site) -> types.CodeType:
    """The code of a file with one site changed."""
    before = getattr(site.node, site.field)
    setattr(site.node, site.field, site.value)
    try:
        return compile(tree, REBUILT, "exec")
    finally:
        setattr(site.node, site.field, before)


def recoded(tree: ast.Module, site: Site, module: str, name: str) -> ContextManager[Any]:
    """A function of a module with one site changed, wherever it is called from."""
    return of_training.recoded(of_training.function_of(module, name), of_training.code_of(changed(tree, site), name))


def rebuilt(adapter: str, tree: ast.Module, site: Site, operator: str, column: str) -> ContextManager[Any]:
    """A class of an adapter with one site changed, in one implementation: the table is made of that adapter anew."""
    module, table = types.ModuleType(adapter), types.ModuleType("table")
    exec(changed(tree, site), module.__dict__)
    with mock.patch.dict(sys.modules, {f"smoke_tests.operators.{adapter}": module}):
        exec(compile(TABLE.read_text(encoding="utf-8"), str(TABLE), "exec"), table.__dict__)
    return in_table(operator, lambda _: table.OPERATORS[operator][column].call)(column)


# --- outcomes ---


@contextlib.contextmanager
def lines_run() -> Iterator[Set[int]]:
    """Collects the lines of the changed file that run."""
    lines: Set[int] = set()

    def trace(frame: types.FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != REBUILT:
            return None
        lines.add(frame.f_lineno)
        return trace

    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(None)


@contextlib.contextmanager
def no_longer_than(seconds: float) -> Iterator[None]:
    """Raises TimeoutError after so many seconds of this process's own CPU time, whatever else the machine does."""

    def end(*_: Any) -> NoReturn:
        raise TimeoutError(f"it did not end within {seconds:g} seconds")

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def outcome_of(mutant: Mutant, failing: Set[str]) -> Dict[str, Any]:
    """The outcome of a mutant: caught, survived, crashed, too loud, or left out if it changes nothing that runs.

    failing: claims that fail without it.
    """
    watch = Watch(mutant.operator, mutant.column)
    with ExitStack() as stack:
        of_table = mutant.column != of_training.TRAINING  # a run in training would take minutes line by line
        lines: Set[int] = stack.enter_context(lines_run()) if of_table else set()
        try:
            stack.enter_context(mutant.plant())
        except StopIteration:  # the package has no such file
            return judged(mutant, "left out")
        except Exception as error:
            return judged(mutant, "too loud", message=repr(error))
        if not of_table:
            stack.enter_context(no_longer_than(LONGEST))
        noticed = noticed_by_anybody(mutant.operator, mutant.column)
        if noticed:
            return judged(mutant, "too loud", message=noticed)
        run(watch, *mutant.claims)
    for outcome, failures in (("caught", watch.assertions), ("crashed", watch.crashes)):
        for claim in sorted(set(failures) - failing):
            return judged(mutant, outcome, claim, failures[claim])
    runs = not of_table or mutant.origin != "rule" or lines & set(range(mutant.lines[0], mutant.lines[1] + 1))
    return judged(mutant, "survived" if runs and set(watch.ran) - failing else "left out")


def judged(mutant: Mutant, outcome: str, by: str = "", message: str = "") -> Dict[str, Any]:
    """The record of a mutant; `by` is the claim that caught it, `message` the message of its assertion."""
    reasons = (reason for reason in WHY if outcome == "survived" and re.search(reason.pattern, mutant.name))
    why = next((reason.words for reason in reasons if reason.holds()), "")
    named = {name: getattr(mutant, name) for name in Mutant._fields[:5]}
    return {**named, "claims": list(mutant.claims), "outcome": outcome, "by": by, "said": message, "why": why}


def deciding(ran: Dict[str, List[str]], by: str) -> Dict[str, List[str]]:
    """The functions of this room that decided an outcome, and those of them that torch.compile has compiled.

    A mutant is decided by the claim that caught it, or else by all that ran. Nothing if that was not recorded.
    """
    if not ran:
        return {}
    claims = {by} if by else set(ran) - {recorder.COMPILED, recorder.DATA}
    functions = {name for claim in {"", *claims} for name in ran.get(claim, [])}
    return {"functions": sorted(functions), "compiled": sorted(functions.intersection(ran.get(recorder.COMPILED, [])))}


def try_seeds(outcomes: Dict[str, Any], seeds: Sequence[int], out: Optional[Path]) -> None:
    """Run every numeric claim on correct code, seed after seed in this process; each failure is a false alarm."""
    clean = outcomes.setdefault("clean", {**copy.deepcopy(CLEAN), "processes": 1})
    keep(out, outcomes)
    for seed in seeds[clean["seeds"] :]:
        with mock.patch.dict(os.environ, {"FUSEBOX_SEED": str(seed)}):
            watch = run(Watch(), *NUMERIC, marked="not long", named="not _ran")
        failed = {**watch.assertions, **watch.crashes}
        clean["alarms"] += [{"seed": seed, "claim": claim, "said": message} for claim, message in failed.items()]
        clean["seeds"], clean["claims"] = clean["seeds"] + 1, clean["claims"] + len(watch.ran)
        print(f"seed {seed}: {len(watch.ran)} claims, {len(failed)} false alarms", *failed.items(), flush=True)
        keep(out, outcomes)


def try_mutants(outcomes: Dict[str, Any], mutants: List[Mutant], options: argparse.Namespace) -> None:
    """Plant one mutant after another, except those whose outcome is known."""
    known = [[row[key] for key in Mutant._fields[:5]] for row in outcomes["mutants"]]
    for mutant in mutants:
        if list(mutant[:5]) in known:
            continue
        if mutant.origin == "compiled" and mutant.name != options.name:
            assert options.out, "compiled faults are tried in processes of their own, which write to --out"
            alone = ["--processes", "1", "--seeds", "0", "--name", mutant.name]
            code = subprocess.run([*THIS, *alone], check=False).returncode
            outcomes.update(json.loads(options.out.read_text(encoding="utf-8")))
            planted = any(list(mutant[:5]) == [row[key] for key in Mutant._fields[:5]] for row in outcomes["mutants"])
            if code not in (0, ALARM) or not planted:
                stop(f"the process of {mutant.name!r} ended with code {code}: read what it printed, and run again")
            continue
        with recorder.recording() as ran:
            row = outcome_of(mutant, set(outcomes["failing"]))
        row.update(deciding(ran, row["by"]))
        print("{outcome:9} {column:20} {operator:14} {name}: {by} {said}".format(**row), flush=True)
        outcomes["mutants"].append(row)
        keep(options.out, outcomes)
        # The first call clears the errors that can be cleared.
        if options.out and CUDA and kernels.cuda_errors() and kernels.cuda_errors():
            os.execv(sys.executable, THIS)  # the next process goes on


def begun(options: argparse.Namespace) -> Dict[str, Any]:
    """The state that an earlier run of this code left in --out here, or the claims that fail on correct code."""
    outcomes: Dict[str, Any] = {
        "target": MANIFEST["target"],
        "stack": MANIFEST["stack"],
        "hardware": hardware.probe().describe(cuda=CUDA),
        "files": files_of_the_room(),
    }
    if options.out and options.out.exists():
        earlier: Dict[str, Any] = json.loads(options.out.read_text(encoding="utf-8"))
        if all(earlier[key] == value for key, value in outcomes.items()):
            return earlier
    with tempfile.TemporaryDirectory() as folder:
        written = options.claims or Path(folder, "outcomes.json")
        if not options.claims:
            command = [sys.executable, "-m", "pytest", str(ROOM), "--tb=no", "--evidence", str(written)]
            subprocess.run(command, check=False)
        try:
            run = json.loads(written.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            stop(f"{written} holds no outcomes of the claims ({error}): leave --claims out to run them")
    if any(run.get(key) != value for key, value in outcomes.items()):
        stop(f"{written} tells of other tests, packages or hardware: leave --claims out to run the claims")
    claims = run["claims"]
    failing = [claim["id"] for claim in claims if claim["outcome"] == "refuted"]
    print(len(claims), "claims on correct code; without a mutant these fail:", failing, flush=True)
    return {**outcomes, "failing": failing, "mutants": []}


def in_processes(outcomes: Dict[str, Any], options: argparse.Namespace) -> Dict[str, Any]:
    """The outcomes of several processes: some try seeds one after another, since the next meets what one leaves."""
    of = options.processes
    trying = min(options.seeds, -(-of // 4))
    bounds_of = [options.first_seed + options.seeds * part // trying for part in range(trying)]
    seeds = [
        ["--share", "0/0", "--first-seed", str(first), "--seeds", str(end - first)]
        for first, end in zip(bounds_of, [*bounds_of[1:], options.first_seed + options.seeds])
    ]
    sharing = of - len(seeds)
    tasks = seeds + [["--seeds", "0", "--share", f"{share}/{sharing}"] for share in range(sharing)]
    shares = [options.out.with_name(f"{options.out.name}.{number}-of-{of}") for number in range(of)]
    for path in shares:
        if not path.exists():  # another number of processes divides the work differently and starts again
            keep(path, {**{key: value for key, value in outcomes.items() if key != "clean"}, "mutants": []})
    command = [*THIS, "--processes", "1"]
    running = [subprocess.Popen([*command, "--out", str(path), *task]) for path, task in zip(shares, tasks)]
    codes = [process.wait() for process in running]
    if not set(codes) <= {0, ALARM}:
        stop(f"the processes ended with codes {codes}: read what they printed, and run again to continue")
    parts = [json.loads(path.read_text(encoding="utf-8")) for path in shares]
    rows = {tuple(row[key] for key in Mutant._fields[:5]): row for part in parts for row in part["mutants"]}
    order = [tuple(mutant[:5]) for mutant in selected(options)]
    clean = {key: sum((part["clean"][key] for part in parts), start) for key, start in CLEAN.items()}
    clean["processes"] = sum(part["clean"]["seeds"] > 0 for part in parts)
    return {**outcomes, "mutants": [rows[key] for key in order], "clean": clean}


def selected(options: argparse.Namespace) -> List[Mutant]:
    """The mutants that the options ask for."""
    mutants = [*chosen(), *by_rule(), *by_rule_in_training(), *compiled(options.compiled)]
    mutants = [mutant for mutant in mutants if options.only in " ".join(mutant[:5])]
    if options.name:
        return [mutant for mutant in mutants if mutant.name == options.name]
    share, of = map(int, options.share.split("/"))
    return mutants[share::of] if of else []


def main() -> int:
    """Plant and try; 1 if there is a false alarm. A survivor is listed, but is not a failure of this run."""
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the outcomes to this JSON file; a run that was stopped goes on")
    parser.add_argument("--only", default="", help="the mutants with these words in name, kind, origin or column")
    parser.add_argument("--seeds", type=int, default=100, help="how many seeds to try on correct code (%(default)s)")
    parser.add_argument("--first-seed", type=int, default=0, help="the first of them (%(default)s)")
    parser.add_argument("--compiled", type=Path, help="the folder of the compiled faults, with their list faults.json")
    parser.add_argument("--claims", type=Path, help="what a run of the claims wrote, in place of a run before all else")
    parser.add_argument("--processes", type=int, default=min(cores, 12), help="with --out; by default %(default)s")
    parser.add_argument("--share", default="0/1", help=argparse.SUPPRESS)  # one process's part
    parser.add_argument("--name", default="", help=argparse.SUPPRESS)  # the one compiled fault of this process
    options = parser.parse_args()
    if options.compiled and not (options.compiled / "faults.json").is_file():  # before the seeds, which take minutes
        parser.error(f"{options.compiled} holds no faults.json: README.md beside this says what puts it there.")
    if options.name:
        (alone,) = selected(options)
        alone.plant()
    outcomes = begun(options)
    if options.out and options.processes > 1:
        outcomes = in_processes(outcomes, options)
        keep(options.out, outcomes)
    else:
        torch.set_num_threads(1)  # what is computed is too small to share
        run(Watch(column="nothing"), ".")  # imports the tests, so that pytest rewrites their assertions
        first = options.first_seed
        try_seeds(outcomes, range(first, first + options.seeds), options.out)
        try_mutants(outcomes, selected(options), options)
    counts = collections.Counter(row["outcome"] for row in outcomes["mutants"])
    print(", ".join(f"{count} {word}" for word, count in counts.most_common()))
    return ALARM if outcomes.get("clean", {}).get("alarms") else 0


def stop(sentence: str) -> NoReturn:
    """End this process with a sentence that says why."""
    print(f"mutants: {sentence}", file=sys.stderr)
    sys.exit(2)


def keep(path: Optional[Path], outcomes: Dict[str, Any]) -> None:
    """Write the outcomes so far, if a file was named."""
    if path:
        write_whole(path, json.dumps(outcomes, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    sys.exit(main())
