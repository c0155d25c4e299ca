"""Nothing that a run started outlives it, however impatiently it is stopped, or killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

STUBBORN = """
import signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(60)
"""
RUN = f"""
import os, signal, sys
from pathlib import Path
from recipes.process import group

signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it is ignored
signal.signal(signal.SIGTERM, signal.default_int_handler)  # as recipes.__main__ does
with group([sys.executable, "-c", {STUBBORN!r}], Path("."), os.environ) as process:
    process.stdout.readline()
    print(process.pid, flush=True)
    process.wait()
"""


def test_a_second_signal_does_not_spare_what_ignores_the_first() -> None:
    command, root = [sys.executable, "-c", RUN], Path(__file__).parents[2]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as run:
        assert run.stdout
        child = int(run.stdout.readline())
        run.send_signal(signal.SIGINT)
        time.sleep(0.5)
        run.send_signal(signal.SIGTERM)
        run.wait(4)  # less than the time that it has after a single signal
    assert not Path("/proc", str(child)).exists()


FAMILY = """
import subprocess, sys
sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
apart = subprocess.Popen(sleeper, start_new_session=True)
orphan = "import subprocess; print(subprocess.Popen(%r, start_new_session=True, stdout=2).pid)" % sleeper
left = subprocess.run([sys.executable, "-c", orphan], stdout=subprocess.PIPE, text=True, check=True).stdout
print(apart.pid, left.strip(), flush=True)
"""
WATCH = """
import os, sys
from pathlib import Path
from recipes.process import group

with group([sys.executable, "-c", sys.argv[1]], Path("."), os.environ) as process:
    print(process.pid, process.stdout.readline(), flush=True)
    print("code", process.wait(), flush=True)
"""


def running(process: int) -> bool:
    """Whether a process is there and is no zombie."""
    try:
        return Path("/proc", str(process), "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def started(script: str, killed: bool) -> tuple[list[int], str]:
    """Run that script in a group, and kill who runs it; the processes that it named, and the last line."""
    command, root = [sys.executable, "-c", WATCH, script], Path(__file__).parents[2]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout
        processes = [int(word) for word in run.stdout.readline().split()]
        assert len(processes) == 3
        if killed:
            assert all(map(running, processes))
            run.kill()
        return processes, run.stdout.read()


def test_what_a_killed_run_started_ends_with_it() -> None:
    """Also what has a session of its own, and what has lost its parent."""
    processes, _ = started(FAMILY + "apart.wait()", killed=True)
    until = time.monotonic() + 5
    while any(map(running, processes)) and time.monotonic() < until:
        time.sleep(0.02)
    assert not list(filter(running, processes))


def test_what_a_command_leaves_running_ends_with_it() -> None:
    processes, output = started(FAMILY + "sys.exit(3)", killed=False)
    assert output.split() == ["code", "3"]
    assert not list(filter(running, processes))


def test_a_signal_that_ends_a_command_is_in_its_exit_code() -> None:
    _, output = started(FAMILY + "import os; os.kill(os.getpid(), 9)", killed=False)
    assert output.split() == ["code", "137"]
