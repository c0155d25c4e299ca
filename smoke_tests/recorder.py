"""Record which functions of smoke_tests each claim runs: in this process, in pytest's workers, and in their children.

Python 3.12 and newer report this through `sys.monitoring`, in every thread; older ones through coverage.py, with a
context per claim. coverage.py slows imports by a third, so it is suspended while a package from elsewhere is imported.
Before 7.13 it does not start in other processes by itself, and nothing is recorded.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import hashlib
import importlib.machinery
import inspect
import os
import re
import resource
import sys
import tempfile
from pathlib import Path
from typing import Any, Dict, Iterator, List, Set, Tuple
from unittest import mock

ROOM = Path(__file__).resolve().parent
FOLDER, CLAIM = "FUSEBOX_RECORD", "FUSEBOX_CLAIM"  # the folder of the records; the claim that runs now
BESIDE = ("recorder.py", "printed.py")  # files that affect no outcome
COMPILED = "compiled"  # stands in place of a claim: the functions that torch.compile has compiled
DATA = "data"  # in place of a claim: the files of this room that hold settings and tables, as NAME:SHA256
TOOL = 4  # an id of sys.monitoring that no debugger, no profiler and not coverage.py uses
MONITORED = sys.version_info >= (3, 12)
SETTINGS = """\
[run]
data_file = {folder}/coverage
source = {room}
parallel = true
context = ${{FUSEBOX_CLAIM-}}
patch = _exit
sigterm = true
disable_warnings = no-data-collected, module-not-measured, module-not-imported, already-imported
"""
RUNNING: List[Any] = []  # the recorders of this process


class Monitor:
    """Notes each function when a claim first calls it, in a file of this process."""

    def __init__(self, folder: Path) -> None:
        self.file = os.open(str(folder / "{}.ran".format(os.getpid())), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.noted: Set[Tuple[str, str, str]] = set()
        monitoring = sys.monitoring  # type: ignore[attr-defined,unused-ignore]
        monitoring.use_tool_id(TOOL, "fusebox")
        monitoring.register_callback(TOOL, monitoring.events.PY_START, self.note)
        monitoring.set_events(TOOL, monitoring.events.PY_START)
        monitoring.restart_events()  # an earlier monitor of this process has disabled them

    def note(self, code: Any, _: int) -> Any:
        path = os.path.abspath(code.co_filename)
        # The body of a class runs where its module is imported, whatever the claim.
        if path.startswith(str(ROOM)) and code.co_flags & inspect.CO_OPTIMIZED:
            # A lambda or a comprehension is part of the function that it stands in.
            name = re.sub(r"(\.?<locals>)?\.?<(?!locals).*", "", code.co_qualname)
            noted = os.environ.get(CLAIM, ""), path, name
            if name and noted not in self.noted:
                self.noted.add(noted)
                self.write(*noted)
        return sys.monitoring.DISABLE  # type: ignore[attr-defined,unused-ignore]

    def write(self, claim: str, path: str, name: str) -> None:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limits[1], limits[1]))  # a claim may simulate a full disk
        try:
            os.write(self.file, "{}\t{}\t{}\n".format(claim, path, name).encode())
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    def switch(self) -> None:
        sys.monitoring.restart_events()  # type: ignore[attr-defined,unused-ignore]

    def stop(self) -> None:
        monitoring = sys.monitoring  # type: ignore[attr-defined,unused-ignore]
        monitoring.set_events(TOOL, 0)
        monitoring.free_tool_id(TOOL)
        for path, name in compiled():
            self.write(COMPILED, path, name)
        os.close(self.file)


class Coverage:
    """coverage.py, which its own .pth file has already started in child processes."""

    def __init__(self, folder: Path) -> None:
        import coverage

        self.folder = folder
        self.running = coverage.Coverage.current() or coverage.Coverage(
            config_file=os.environ["COVERAGE_PROCESS_START"]
        )
        self.running.start()

    def switch(self) -> None:
        self.running.switch_context(os.environ[CLAIM])

    def stop(self) -> None:
        self.running.stop()
        self.running.save()
        with open(str(self.folder / "{}.ran".format(os.getpid())), "w", encoding="utf-8") as file:
            file.writelines("{}\t{}\t{}\n".format(COMPILED, *code) for code in compiled())


def suspend_in_imports() -> None:
    """Suspend coverage.py while Python runs a module that is not of this folder, with all that the module imports."""
    loader: Any = importlib.machinery.SourceFileLoader
    run = loader.exec_module

    def run_unseen(self: Any, module: Any) -> None:
        trace = sys.gettrace()
        if trace is None or module.__name__.partition(".")[0] == ROOM.name:
            run(self, module)
            return
        sys.settrace(None)
        try:
            run(self, module)
        finally:
            sys.settrace(trace)

    # A warning about an import is attributed to the code that imports: Python skips frames of importlib, by their file.
    run_unseen.__code__ = run_unseen.__code__.replace(co_filename="<frozen importlib._bootstrap>")
    loader.exec_module = run_unseen


def compiled() -> Iterator[Tuple[str, str]]:
    """The functions of this folder that torch.compile has compiled in this process; they call others unseen."""
    tracker = getattr(sys.modules.get("torch._dynamo.convert_frame"), "input_codes", None)
    for reference in getattr(tracker, "seen", ()):
        code = reference() if callable(reference) else reference
        if code is not None and os.path.abspath(code.co_filename).startswith(str(ROOM)):
            yield os.path.abspath(code.co_filename), getattr(code, "co_qualname", code.co_name)


def is_possible() -> bool:
    """Whether this Python can record what runs."""
    if MONITORED:
        return True
    try:
        import coverage
    except ImportError:
        return False
    return coverage.version_info >= (7, 13)


def begin(folder: Path) -> None:
    """Record this process and all that it starts from now on into an empty folder."""
    os.environ[FOLDER], os.environ[CLAIM] = str(folder), ""
    beside = str(ROOM / "recorded")  # Python imports its sitecustomize.py when it starts
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (beside, os.environ.get("PYTHONPATH", ""))))
    if not MONITORED:
        settings = folder / "coveragerc"
        settings.write_text(SETTINGS.format(folder=folder, room=ROOM), encoding="utf-8")
        os.environ["COVERAGE_PROCESS_START"] = str(settings)
        suspend_in_imports()
    join()


def begin_child() -> None:
    """Record a process that has just started; before Python 3.12 coverage.py already does."""
    if MONITORED:
        join()
    elif os.environ.get(FOLDER):
        suspend_in_imports()


def join() -> None:
    """Record this process, if the one that started it is recorded."""
    if os.environ.get(FOLDER) and not RUNNING:
        RUNNING.append((Monitor if MONITORED else Coverage)(Path(os.environ[FOLDER])))
        if MONITORED:
            atexit.unregister(end)
            atexit.register(end)


def switch(claim: str) -> None:
    """From now on, record what runs for this claim; for no claim if empty."""
    if RUNNING:
        os.environ[CLAIM] = claim
        RUNNING[0].switch()


def end() -> None:
    """Stop recording this process."""
    while RUNNING:
        RUNNING.pop().stop()


@contextlib.contextmanager
def recording() -> Iterator[Dict[str, List[str]]]:
    """Record what runs in this context; at its end, the dictionary has what `collected` returns.

    It stays empty before Python 3.12: coverage.py does not record where another tracer of Python runs.
    """
    ran: Dict[str, List[str]] = {}
    if not MONITORED:
        yield ran
        return
    with tempfile.TemporaryDirectory(prefix="fusebox-record-") as folder, mock.patch.dict(os.environ):
        begin(Path(folder))
        try:
            yield ran
        finally:
            end()
            ran.update(collected(Path(folder)))


def collected(folder: Path) -> Dict[str, List[str]]:
    """Claim -> the functions that it ran, as FILE:QUALIFIED.NAME; under "" what ran for no claim; under DATA files."""
    functions: Dict[str, Set[str]] = {DATA: set(_data())}
    for claim, path, name in {*_noted(folder), *(() if MONITORED else _covered(folder))}:
        file = Path(path).relative_to(ROOM).as_posix()
        if file not in BESIDE:
            functions.setdefault(claim, set()).add(f"{file}:{name}")
    return {claim: sorted(names) for claim, names in functions.items()}


def _data() -> Iterator[str]:
    for path in sorted(ROOM.rglob("*")):
        if path.suffix in (".ini", ".toml") and path.is_file():
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            yield "{}:{}".format(path.relative_to(ROOM).as_posix(), digest)


def _noted(folder: Path) -> Iterator[Tuple[str, str, str]]:
    for path in sorted(folder.glob("*.ran")):
        for line in path.read_text(encoding="utf-8").splitlines():
            claim, file, name = line.split("\t")
            yield claim, file, name


def _covered(folder: Path) -> Iterator[Tuple[str, str, str]]:
    import coverage

    lines: Dict[str, Dict[int, str]] = {}
    for path in sorted(folder.glob("coverage.*")):
        data = coverage.CoverageData(str(path))
        data.read()
        for file in data.measured_files():
            names = lines[file] if file in lines else lines.setdefault(file, _functions(Path(file)))
            for line, contexts in data.contexts_by_lineno(file).items():
                if line in names:
                    yield from ((claim, file, names[line]) for claim in contexts)


def _functions(path: Path) -> Dict[int, str]:
    """Line -> the innermost function whose body it is in: a `def` and its decorators run where the function is made."""
    lines: Dict[int, str] = {}

    def walk(node: ast.AST, name: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                inner = name + child.name
                body = child.body[1:] if ast.get_docstring(child) is not None else child.body
                lines.update((line, inner) for part in body for line in range(part.lineno, (part.end_lineno or 0) + 1))
                walk(child, inner + ".<locals>.")
            elif isinstance(child, ast.ClassDef):
                walk(child, name + child.name + ".")
            else:
                walk(child, name)

    walk(ast.parse(path.read_text(encoding="utf-8")), "")
    return lines
