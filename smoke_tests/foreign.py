"""The pytest plugin that runs the claims in an environment that Fusebox did not build.

Several processes run the claims, without pytest-xdist: each collects all of them and takes the next group that no other
process has taken. `python -m smoke_tests` starts them and reads what they note.
"""

from __future__ import annotations

import importlib.util
import json
import os
import traceback
from pathlib import Path
from typing import Any, Dict, Generator, Iterable, List, Optional, Set

import pytest

from smoke_tests import claims
from smoke_tests.distributions import MODULES, UNPINNED

# Claims that compare the environment with its manifest, which does not exist here.
IDENTITY = (
    "test_version_is_pinned",
    "test_module_is_inside_the_environment",
    "test_files_are_the_pinned_bytes",
    "test_patch_is_installed",
    "test_libraries_are_loaded_once",
)
IS_UNPINNED = UNPINNED + ": no manifest says which one belongs here"
ROOM = Path(__file__).resolve().parent
LOADERS = ("importlib", "metadata", "assertion")  # folders of the code that imports modules: Python's and pytest's
LONG = "takes long: --long runs it"


class WithoutXdist:
    """The hooks of pytest-xdist that conftest.py implements: pytest refuses a hook that it does not know."""

    def pytest_xdist_auto_num_workers(self, config: Any) -> None: ...

    def pytest_xdist_make_scheduler(self, config: Any, log: Any) -> None: ...


def pytest_addhooks(pluginmanager: Any) -> None:
    pluginmanager.add_hookspecs(WithoutXdist)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("foreign")
    group.addoption("--shared", type=Path, help="the folder in which the processes share the claims")
    group.addoption("--about", action="append", default=[], help="only claims about this package")
    group.addoption("--long", action="store_true", help="run claims that take long, too")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "xdist_group(name): claims that share something made once per process")
    config.pluginmanager.register(Share(config), "share")


class Share:
    """This process's share of the claims: it takes one group after another, and notes each claim that begins or ends.

    In the folder: taken-NUMBER (an empty file per group that is taken), claims.json (all of them, by the first process
    that has collected), PID.jsonl (a line per claim that began or ended), and stop (from then on, nothing is begun).
    """

    def __init__(self, config: pytest.Config) -> None:
        self.folder: Path = config.getoption("--shared")
        self.about: Set[str] = set(config.getoption("--about"))
        self.long = bool(config.getoption("--long"))
        self.groups: Dict[str, str] = {}
        self.mine: Set[str] = set()
        self.ledger: Any = None

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: List[pytest.Item]) -> None:
        """Leave out packages that nobody asked about, number the groups, and list all claims."""
        self.ledger = config.pluginmanager.get_plugin("ledger")
        if self.about:
            manifest = self.ledger.manifest
            items[:] = [item for item in items if claims.claim_of(item, manifest).package in self.about]
        numbers: Dict[str, str] = {}
        for item in items:
            together = item.get_closest_marker("xdist_group")
            group = together.args[0] if together else item.nodeid
            self.groups[item.nodeid] = numbers.setdefault(group, str(len(numbers)))
        # What takes longest begins first, so that no process is left alone with it.
        items.sort(key=lambda item: item.get_closest_marker("long") is None)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        records = [self.ledger.records[item.nodeid] for item in session.items]
        if _made(self.folder / "claims.made"):
            partial = self.folder / "claims.partial"
            partial.write_text(json.dumps(records), encoding="utf-8")
            os.replace(str(partial), str(self.folder / "claims.json"))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Optional[bool]:
        """Run the groups that this process takes."""
        if session.config.option.collectonly or session.testsfailed:
            return None  # as pytest does it
        for item, following in zip(session.items, [*session.items[1:], None]):
            if not self.takes(item):
                continue
            self.note({"began": self.ledger.records[item.nodeid]["id"]})
            # The next claim here is not known before it is taken, so everything else is torn down.
            shares = following is not None and self.groups[following.nodeid] in self.mine
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=following if shares else None)
        return True

    def takes(self, item: pytest.Item) -> bool:
        """Whether the claim's group is this process's, or becomes so now."""
        group = self.groups[item.nodeid]
        if group not in self.mine:
            if (self.folder / "stop").exists() or not _made(self.folder / ("taken-" + group)):
                return False
            self.mine.add(group)
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        test = item.name.split("[")[0]
        if test in IDENTITY:
            pytest.skip(IS_UNPINNED)
        if test == "test_requirements_are_met" and importlib.util.find_spec("pip") is None:
            pytest.skip("needs pip, which is not installed here")
        if not self.long and item.get_closest_marker("long") is not None:
            pytest.skip(LONG)

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """A claim that itself imports what is not installed is unproven; a package that does so is refuted."""
        report = yield
        error = call.excinfo.value if call.excinfo else None
        if report.failed and isinstance(error, ModuleNotFoundError):
            lacking = needed(error, self.ledger.manifest["packages"])
            if lacking:
                report.outcome, report.longrepr = "skipped", (str(item.path), 0, lacking)
                error.msg = lacking  # str(error) returns this, and thus it is the reason in the evidence
        return report

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            self.note({"ended": self.ledger.records[report.nodeid]})

    def note(self, line: Dict[str, Any]) -> None:
        with open(str(self.folder / "{}.jsonl".format(os.getpid())), "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def needed(error: ModuleNotFoundError, packages: Iterable[str]) -> Optional[str]:
    """What a claim needs and the environment lacks, in words; None if the error is a package's own."""
    if not error.name:
        return None
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    files = [file for file in files if not file.startswith("<frozen") and Path(file).parent.name not in LOADERS]
    module = error.name.partition(".")[0]
    if not files or ROOM not in Path(files[-1]).resolve().parents or module in {MODULES[name] for name in packages}:
        return None
    return "needs {}, which is not installed here".format(error.name)


def _made(path: Path) -> bool:
    """Make an empty file; false if another process has made it."""
    try:
        os.close(os.open(str(path), os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return False
    return True
