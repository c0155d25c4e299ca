"""What a run of the tests will take, estimated from a kept run: the plugin of pytest that `nox -s tests` loads.

durations.json has the number of tests and their seconds, by test file, and for each test function that is slow by its
own name. A second is one of a process of the kept run, which shared the cores with the run's other processes. The
functions with rows of their own get the mark `slow`.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

TABLE = Path(__file__).with_name("durations.json")
OPTION = "--keep-durations"
SLOW = "slow"
SLOW_FROM = 2.0  # seconds of a test: with those below, `nox -s tests` takes less than six minutes on two cores


def function_of(test: str) -> str:
    """A test's name without its parameters."""
    return test.partition("[")[0]


def file_of(test: str) -> str:
    """The file that a test is in."""
    return test.partition("::")[0]


def load(path: Path = TABLE) -> dict[str, Any]:
    """The kept table: the cores that the run had, and its groups; no group where none is kept."""
    if not path.exists():
        return {"cores": 0, "groups": {}}
    table: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return table


def mean_of(test: str, groups: dict[str, dict[str, float]]) -> float | None:
    """The seconds that a test took in the mean of its group; None of a test in no group."""
    group = groups.get(function_of(test)) or groups.get(file_of(test))
    return group["seconds"] / group["tests"] if group else None


def estimate(tests: Iterable[str], processes: int, table: dict[str, Any]) -> str:
    """How many tests will run and how long they will take, in a line."""
    means = [mean_of(test, table["groups"]) for test in tests]
    known = [mean for mean in means if mean is not None]
    if not known:
        return f"{len(means)} tests; no earlier run says how long they take"
    seconds = sum(known) / len(known) * len(means) / processes
    length = f"{seconds / 60:.0f} min" if seconds >= 90 else f"{max(seconds, 1):.0f} s"
    return f"{len(means)} tests, about {length}, as the last kept run took on {table['cores']} cores"


def written(table: dict[str, Any], tests: dict[str, set[str]], seconds: dict[str, float]) -> dict[str, Any]:
    """The table with what a run took in the place of what it has of the same functions, and of the same files' others.

    tests, seconds: by test function.
    """
    files = {file_of(function) for function in tests}
    groups = {name: group for name, group in table["groups"].items() if name not in tests and name not in files}
    for function, names in tests.items():
        is_slow = seconds[function] >= SLOW_FROM * len(names)
        group = groups.setdefault(function if is_slow else file_of(function), {"tests": 0, "seconds": 0.0})
        group["tests"] += len(names)
        group["seconds"] += seconds[function]
    rounded = {name: {**group, "seconds": round(group["seconds"], 1)} for name, group in sorted(groups.items())}
    return {"cores": len(os.sched_getaffinity(0)), "groups": rounded}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(OPTION, action="store_true", help=f"write what the tests take to {TABLE.name}, if all pass")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # a process that pytest-xdist started reports to the first one
        config.pluginmanager.register(Timing(config), "timing of this run")


@pytest.hookimpl(tryfirst=True)  # before pytest selects by mark
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark slow tests, and start them first, the longest before all others: none is left to run alone at the end."""
    groups = load()["groups"]
    for item in items:
        if function_of(item.nodeid) in groups:
            item.add_marker(SLOW)

    def order(item: pytest.Item) -> float:
        return -(mean_of(item.nodeid, groups) or 1.0) if item.get_closest_marker(SLOW) else 0.0

    items.sort(key=order)


class Timing:
    """Says what a run will take before it starts, and sums up what it took."""

    def __init__(self, config: pytest.Config) -> None:
        self.config, self.is_said = config, False
        self.tests, self.seconds = defaultdict[str, set[str]](set), defaultdict[str, float](float)

    def say(self, tests: list[str]) -> None:
        """Print the estimate, once."""
        if self.is_said or self.config.option.collectonly:
            return
        self.is_said = True
        processes = len(getattr(self.config.option, "tx", None) or ["one"])
        reporter: Any = self.config.pluginmanager.get_plugin("terminalreporter")
        reporter.write_line(estimate(tests, processes, load()))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.items:  # with pytest-xdist, the first process has none
            self.say([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self.say(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        function = function_of(report.nodeid)
        self.tests[function].add(report.nodeid)
        self.seconds[function] += report.duration

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if self.config.getoption(OPTION) and exitstatus == 0 and self.tests:
            table = written(load(), self.tests, self.seconds)
            lines = [f"  {json.dumps(name)}: {json.dumps(group)}" for name, group in table["groups"].items()]
            text = f'{{"cores": {table["cores"]}, "groups": {{\n' + ",\n".join(lines) + "\n}}\n"
            TABLE.write_text(text, encoding="utf-8")
