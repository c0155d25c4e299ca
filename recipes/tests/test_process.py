"""Nothing that a run started outlives it, however impatiently it is stopped."""

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
        run.wait(4)  # less than the time that it has after one
    assert not Path("/proc", str(child)).exists()


def test_a_bound_process_ends_when_the_tool_is_killed() -> None:
    bound = RUN.replace("os.environ)", "os.environ, bound=True)")
    command, root = [sys.executable, "-c", bound], Path(__file__).parents[2]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as run:
        assert run.stdout
        child = Path("/proc", run.stdout.readline().strip())
        run.kill()
        run.wait(4)
    end = time.monotonic() + 10
    while child.exists() and "\nState:\tZ" not in (child / "status").read_text():
        assert time.monotonic() < end, "it outlives the tool"
        time.sleep(0.1)
