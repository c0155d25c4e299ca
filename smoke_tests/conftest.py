"""The rules of smoke_tests: a test makes one claim, the hardware selects it, and its outcome goes into the evidence."""

from __future__ import annotations

import ast
import datetime
import hashlib
import json
import math
import os
import random
import shutil
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any, Dict, Generator, Iterator, List, Optional, Tuple

import pytest

from smoke_tests import claims, hardware, printed, recorder

ROOM = Path(__file__).resolve().parent
MANIFEST = pytest.StashKey[Dict[str, Any]]()
RECORD = pytest.StashKey[Dict[str, Any]]()
WORKERS = 14  # on a GPU
# Triton stores its tuning results with its kernels, so that not every process measures them again.
os.environ.setdefault("TRITON_CACHE_AUTOTUNING", "1")
if "PYTEST_XDIST_WORKER" in os.environ:  # before torch is imported: processes that share the cores use one core each
    os.environ.setdefault("OMP_NUM_THREADS", "1")


# --- which claims there are ---


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("claims")
    described = Path(sys.prefix, "fusebox", "manifest.json")
    group.addoption("--manifest", type=Path, default=described, help="what the environment is made of (%(default)s)")
    group.addoption("--evidence", type=Path, help="write the outcome of every claim to this JSON file")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "proves(sentence, seed, package, since): the claim of this test")
    config.addinivalue_line("markers", "every(operators, only, seen, once): a row per implementation and dtype")
    config.addinivalue_line("markers", "long: a claim that takes long, and begins first")
    config.addinivalue_line("markers", "needs(cuda, sm, gpus, isa): the hardware that it needs")
    config.option.loadscopereorder = False  # long ones begin first; Python 3.8's pytest-xdist lacks the option for it
    config.stash[MANIFEST] = read_manifest(config.getoption("--manifest"))
    config.pluginmanager.register(Ledger(config), "ledger")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """How many processes run the claims: on a GPU the host limits them, on a CPU the longest claim does."""
    cuda, cores = read_manifest(config.getoption("--manifest"))["cuda"] != "none", len(os.sched_getaffinity(0))
    return min(WORKERS, max(1, cores - 2)) if cuda else min(2, cores)


def read_manifest(path: Path) -> Dict[str, Any]:
    """The manifest at `path`, with its own path under "path"; UsageError if it cannot be used."""
    try:
        manifest: Dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        missing = {"target", "stack", "cuda", "proves_on", "packages"} - set(manifest)
        if missing:
            raise ValueError("it lacks " + ", ".join(sorted(missing)))
    except (OSError, ValueError) as error:
        raise pytest.UsageError(f"the manifest {path} cannot be used: {error}") from None
    return {**manifest, "path": path}


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    file: pytest.Module = ClaimFile.from_parent(parent, path=module_path)
    return file


class ClaimFile(pytest.Module):
    """A test file that states its claims even when its import fails: each claim then raises the error of the import."""

    def collect(self) -> Any:
        try:
            _ = self.obj  # imports the file
        except (Exception, pytest.skip.Exception) as error:
            return list(self._unproved(error.__cause__ or error))
        return super().collect()

    def _unproved(self, error: BaseException) -> Iterator[pytest.Item]:
        for node in ast.parse(self.path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
                item: pytest.Item = FailedImport.from_parent(self, name=node.name, error=error)
                for call in node.decorator_list:
                    if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
                        item.add_marker(_evaluate(call, getattr(claims, call.func.id)))
                yield item


def _evaluate(call: ast.Call, decorator: Any) -> pytest.MarkDecorator:
    """The mark that a decorator with literal arguments stands for."""
    named = {str(pair.arg): ast.literal_eval(pair.value) for pair in call.keywords}
    mark: pytest.MarkDecorator = decorator(*[ast.literal_eval(value) for value in call.args], **named)
    return mark


class FailedImport(pytest.Item):
    """A claim whose file could not be imported."""

    def __init__(self, *, error: BaseException, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.error = error

    def runtest(self) -> None:
        raise self.error


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes `package` runs once per wheel of the manifest, one that takes `patch` once per patched file.

    One marked `every` runs once per implementation and dtype.
    """
    manifest = metafunc.config.stash[MANIFEST]
    packages = manifest["packages"]
    for mark in metafunc.definition.iter_markers("every"):
        of_each_operator(metafunc, mark, manifest)
    if "patch" in metafunc.fixturenames:
        patches = [(name, patch) for name, entry in packages.items() for patch in entry["patches"]]
        rows = {"{}-{}".format(name, Path(patch["file"]).stem): (name, patch) for name, patch in patches}
        # A patch of the build leaves no file behind to look at.
        rows = {title: row for title, row in rows.items() if row[1]["installed"]}
        metafunc.parametrize(("package", "patch"), list(rows.values()), ids=list(rows))
    elif "package" in metafunc.fixturenames:
        metafunc.parametrize("package", [name for name, entry in packages.items() if entry.get("record_sha256")])


def of_each_operator(metafunc: pytest.Metafunc, mark: pytest.Mark, manifest: Dict[str, Any]) -> None:
    """The rows of a test marked `every`; the table is imported here because torch may fail to import."""
    from smoke_tests.operators import table as fused_ops

    only, seen, once = (mark.kwargs[name] for name in ("only", "seen", "once"))
    cuda = manifest["cuda"] != "none"
    versions = {name: entry["version"] for name, entry in manifest["packages"].items() if only in ("", name)}
    taken = [argument for argument in fused_ops.Row._fields if argument in metafunc.fixturenames]
    chosen: Dict[str, Any] = {}
    for operator in mark.args:
        columns = set()
        for row in fused_ops.rows(operator, versions, cuda):
            entry = fused_ops.OPERATORS[operator][row.column]
            if (seen and not entry.forward) or (once and cuda and row.column in columns):
                continue
            columns.add(row.column)
            values = [getattr(row, argument) for argument in taken]
            title = "-".join(str(value) for value in values).replace("torch.bf", "bf").replace("torch.float", "float")
            chosen[title] = pytest.param(*values, id=title, marks=[claims.needs(isa=entry.isa)])
    metafunc.parametrize(taken, list(chosen.values()))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: List[pytest.Item]) -> None:
    manifest = config.stash[MANIFEST]
    refuse_unclaimed(items)
    selected = [item for item in items if is_for(item, manifest)]
    if not selected:
        raise pytest.UsageError("no claim is about target {}, so nothing would be proved".format(manifest["target"]))
    config.hook.pytest_deselected(items=[item for item in items if item not in set(selected)])
    order = list(manifest["packages"])

    def turn(item: pytest.Item) -> Tuple[bool, int, bool]:
        """Sort by package, its environment first: numbers of a package that is not the pinned one mean nothing.

        If several processes share the claims, the longest begin first.
        """
        package = claims.claim_of(item, manifest).package
        alone = not hasattr(config, "workerinput") and not config.pluginmanager.has_plugin("dsession")
        later = alone or item.get_closest_marker("long") is None
        return later, order.index(package), item.path.name != "test_environment.py"

    items[:] = sorted(selected, key=turn)
    for item in items:
        if group := in_one_process(item, manifest):
            item.add_marker(pytest.mark.xdist_group(group))


def in_one_process(item: pytest.Item, manifest: Dict[str, Any]) -> str:
    """The group of claims that share something made once per process; "" for no group.

    On a CPU the trainings of a package share two runs; a GPU repeats those faster than other claims would wait for
    them. Implementations that compile when they are called share the compiled kernels of an operator.
    """
    if item.path.name == "test_training.py" and manifest["cuda"] == "none":
        return "training " + claims.claim_of(item, manifest).package
    row = item.callspec.params if hasattr(item, "callspec") else {}
    operators = [row.get("name", name) for mark in item.iter_markers("every") for name in mark.args]
    return "{} {}".format(operators[0], row["column"]) if operators and isinstance(row.get("column"), str) else ""


def refuse_unclaimed(items: List[pytest.Item]) -> None:
    """Refuse a test without a claim, and a claim made by two tests."""
    made_by: Dict[str, str] = {}
    for item in items:
        test = item.nodeid.split("[")[0]
        mark = item.get_closest_marker("proves")
        if mark is None:
            raise pytest.UsageError(f"{test} makes no claim: give it @proves(...)")
        if made_by.setdefault(mark.args[0], test) != test:
            raise pytest.UsageError(f"{made_by[mark.args[0]]} and {test} make the same claim")


def is_for(item: pytest.Item, manifest: Dict[str, Any]) -> bool:
    """Whether a claim is about this target: a package of it, and no CUDA where the target has none."""
    without_cuda = manifest["cuda"] == "none" and claims.needs_of(item)["cuda"]
    return claims.claim_of(item, manifest).is_about(manifest["packages"]) and not without_cuda


# --- how a claim runs ---


def pytest_runtest_setup(item: pytest.Item) -> None:
    needs, machine = claims.needs_of(item), hardware.probe()
    unmet = machine.unmet(**{**needs, "gpus": 0})
    if unmet:
        pytest.skip(unmet)
    too_few = machine.unmet(**needs)
    if too_few:
        raise claims.Elsewhere(too_few)


@pytest.fixture
def seed() -> int:
    """The seed of all randomness: the environment variable FUSEBOX_SEED, by default 0."""
    return int(os.environ.get("FUSEBOX_SEED", "0"))


@pytest.fixture(autouse=True)
def same_numbers_each_run(request: pytest.FixtureRequest, seed: int) -> None:
    """Seed every generator with the seed and the test's name, so that the order of tests does not matter."""
    own = seed * 1_000_003 + zlib.crc32(request.node.name.encode())
    random.seed(own)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(own % 2**32)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(own)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Run torch on one thread, which repeats to the last bit; with small products several threads would be slower."""
    import torch  # imported here, so that claims are reported even if torch cannot be imported

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def device(manifest: Dict[str, Any]) -> Iterator[str]:
    """Where operators run: "cuda" if the target has CUDA (skipped on a machine without it), else "cpu".

    Afterwards no CUDA error may be pending, because it would appear in the next test.
    """
    if manifest["cuda"] == "none":
        yield "cpu"
        return
    machine = hardware.probe()
    unmet = machine.unmet(cuda=True, sm=(0, 0), gpus=0, isa="") or machine.outdated(manifest.get("driver"))
    if unmet:
        pytest.skip(unmet)
    yield "cuda"
    from smoke_tests.operators import kernels

    left = kernels.cuda_errors()
    assert not left, f"it leaves a CUDA error behind: {left[0]}"


@pytest.fixture
def manifest(pytestconfig: pytest.Config) -> Dict[str, Any]:
    """The manifest of the environment, which describes it."""
    return pytestconfig.stash[MANIFEST]


@pytest.fixture
def measured(request: pytest.FixtureRequest) -> Dict[str, Any]:
    """Numbers (or short strings) that the claim measured, for the evidence: measured["slope"] = 0.9997."""
    numbers: Dict[str, Any] = request.node.stash[RECORD]["measured"]
    return numbers


# --- outcomes ---


class Ledger:
    """Keeps the outcome of every claim, prints a line per claim as it ends, and writes the evidence.

    Outcomes: proved, refuted, unproven. On hardware that the target declares, a skip is refuted, because only what
    claims.Elsewhere names may be missing. A claim that was selected and never ran is unproven, and a claim whose
    process died is refuted. Where several processes run the claims, each judges its own, and pytest's first process
    keeps the records of all.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.manifest = config.stash[MANIFEST]
        self.evidence = None if hasattr(config, "workerinput") else config.getoption("--evidence")
        self.hardware = hardware.probe().describe(cuda=self.manifest["cuda"] != "none")
        self.declared = self.hardware["name"] in self.manifest["proves_on"]
        self.records: Dict[str, Dict[str, Any]] = {}
        self.groups: Dict[str, str] = {}
        self.started = datetime.datetime.now(datetime.timezone.utc)
        self.clock = time.perf_counter()
        self._forget_last_run()
        self.record = self._begin_recording()

    def _begin_recording(self) -> Optional[Path]:
        """The folder in which processes note what they run; None without evidence, or if Python cannot tell."""
        if self.evidence is None or not recorder.is_possible():
            recorder.join()  # one of several processes
            return None
        folder = Path(tempfile.mkdtemp(prefix="fusebox-record-"))
        recorder.begin(folder)
        return folder

    def _forget_last_run(self) -> None:
        """Remove older outcomes, which a run that dies would otherwise seem to have written."""
        if self.evidence is None:
            return
        try:
            self.evidence.parent.mkdir(parents=True, exist_ok=True)
            if self.evidence.exists():
                self.evidence.unlink()
        except OSError as error:
            raise pytest.UsageError(f"cannot write evidence to {self.evidence}: {error}") from None

    def pytest_report_header(self) -> str:
        rule = "which it declares: a skip is a failure" if self.declared else "which it does not declare"
        return "target {} on {}, {}".format(self.manifest["target"], self.hardware["name"], rule)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> None:
        """Collect in the first process too, although pytest-xdist leaves that to the others."""
        if self.config.pluginmanager.has_plugin("dsession"):
            session.perform_collect()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: List[pytest.Item]) -> None:
        """Open a record for every claim that is still selected after all hooks."""
        for item in items:
            claim = claims.claim_of(item, self.manifest)
            file = item.path.resolve().relative_to(ROOM).as_posix()
            item.stash[RECORD] = {
                "id": f"{file}::{item.name}",
                "claim": claim.sentence,
                "seed": list(claim.seed),
                "package": claim.package,
                "outcome": "unproven",
                "reason": "not run",
                "measured": {},
                "seconds": 0.0,
            }
            self.records[item.nodeid] = item.stash[RECORD]
            if together := item.get_closest_marker("xdist_group"):
                self.groups[item.nodeid] = together.args[0]

    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        """Give all claims of a group to the same process, and the others to any.

        pytest-xdist's own --dist loadgroup (3.8.0) writes the group into node ids, which pytest 9.2 no longer allows.
        """
        from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

        groups = self.groups

        class ByGroup(LoadScopeScheduling):  # type: ignore[misc]
            def _split_scope(self, nodeid: str) -> str:
                return groups.get(nodeid, nodeid)

        return ByGroup(config, log)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Record all that runs from setup to teardown for this claim."""
        recorder.switch(item.stash[RECORD]["id"])
        try:
            return (yield)
        finally:
            recorder.switch("")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        record = item.stash[RECORD]
        record["seconds"] += call.duration
        outcome, reason = self._judge(report, call)
        if outcome == "refuted" and not report.failed:
            report.outcome, report.longrepr = "failed", reason
            report.__dict__.pop("wasxfail", None)
        if outcome != "proved" or (report.when == "call" and record["reason"] == "not run"):
            record["outcome"], record["reason"] = outcome, reason
        if report.when == "teardown":
            record["measured"] = {name: plain(value) for name, value in record["measured"].items()}
            report.user_properties.append(("record", record))
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note and print the claim that ended, in this process or in another."""
        record = self.records[report.nodeid]
        if report.when in ("setup", "call"):
            return
        if report.when == "teardown":
            ended: Any = dict(report.user_properties)["record"]
            record.update(ended)
        else:  # this is how pytest-xdist reports a claim whose process died
            record.update(outcome="refuted", reason="the process that ran it died")
        self._print(record)

    def _judge(self, report: pytest.TestReport, call: pytest.CallInfo[None]) -> Tuple[str, str]:
        """Outcome and reason of one phase (setup, call or teardown) of a test."""
        if hasattr(report, "wasxfail"):
            return "refuted", f"known to fail: {report.wasxfail}"
        if report.passed:
            return "proved", ""
        assert call.excinfo is not None
        text = call.excinfo.exconly(tryshort=True).splitlines()[0]
        if report.failed:
            return "refuted", text
        skip = str(call.excinfo.value)
        if self.declared and not isinstance(call.excinfo.value, claims.Elsewhere):
            target, name = self.manifest["target"], self.hardware["name"]
            return "refuted", f"skipped on declared hardware ({name}, target {target}): {skip}"
        return "unproven", skip

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> Tuple[str, str, str]:
        """Count as pytest does, but print no dot, because each claim has its own line."""
        quiet = report.passed and report.when != "call"
        category = "error" if report.failed and report.when != "call" else report.outcome
        return ("", "", "") if quiet else (category, "", category.upper())

    def _print(self, record: Dict[str, Any]) -> None:
        terminal = self.config.pluginmanager.get_plugin("terminalreporter")
        if terminal is None:
            return
        colour = {"proved": "green", "refuted": "red", "unproven": "yellow"}[record["outcome"]]
        terminal.ensure_newline()
        text = printed.line(record)
        terminal.write(text[: printed.OUTCOME], **{colour: True})
        terminal.write_line(text[printed.OUTCOME :])

    @pytest.hookimpl(trylast=True)
    def pytest_sessionstart(self) -> None:
        terminal = self.config.pluginmanager.get_plugin("terminalreporter")
        if terminal is not None:
            terminal.showfspath = False

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        """Write the evidence, once every other process has ended."""
        recorder.end()
        if self.evidence is None or not self.records:
            return
        outcomes = {
            "target": self.manifest["target"],
            "stack": self.manifest["stack"],
            "hardware": self.hardware,
            "python": sys.version.split()[0],
            "files": files_of_the_room(),
            "started": self.started.isoformat(timespec="seconds"),
            "seconds": time.perf_counter() - self.clock,
            "ran": self._ran(),
            "claims": list(self.records.values()),
        }
        try:
            write_whole(self.evidence, json.dumps(outcomes, indent=1, allow_nan=False) + "\n")
        except OSError as error:
            pytest.exit(f"cannot write evidence to {self.evidence}: {error}", returncode=1)

    def _ran(self) -> Optional[Dict[str, List[str]]]:
        """Claim -> the functions of this folder that it ran; None if that was not recorded."""
        if self.record is None:
            return None
        functions = recorder.collected(self.record)
        shutil.rmtree(self.record)
        return functions

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self.records:
            return
        counts = {word: sum(record["outcome"] == word for record in self.records.values()) for word in OUTCOMES}
        summary = ", ".join(f"{count} {word}" for word, count in counts.items())
        place = f"; outcomes in {self.evidence}" if self.evidence else ""
        where = "target {} on {}".format(self.manifest["target"], self.hardware["name"])
        terminalreporter.write_line(f"{where}: {summary}{place}")


OUTCOMES = ("proved", "refuted", "unproven")


def plain(value: Any) -> Any:
    """A measured value for JSON: integers and strings unchanged, other numbers finite or as text."""
    if isinstance(value, (str, int)):
        return value
    return float(value) if math.isfinite(value) else str(float(value))


def files_of_the_room() -> Dict[str, str]:
    """All code of smoke_tests, name -> sha256."""
    paths = sorted((path.relative_to(ROOM).as_posix(), path) for path in ROOM.rglob("*.py"))
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in paths}


def write_whole(path: Path, text: str) -> None:
    """Write a file that gets its name only once it is complete."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError:
        if partial.exists():
            partial.unlink()
        raise
