"""Run a command, and end every process that it started: when it ends, or when standard input closes.

    python -I -S supervisor.py COMMAND ...

Whoever starts this holds the other end of the pipe that is standard input here. The kernel closes that end when its
holder ends, however it was killed. A process that has lost its parent becomes a child of this one (prctl(2),
PR_SET_CHILD_SUBREAPER), so that those in a group or a session of their own are found too. The exit code is that of the
command, or 128 and the number of the signal that killed it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of <linux/prctl.h>
GRACE = 3  # seconds
NOT_FOUND = 127  # what a shell returns for a command that it cannot run


def main(command: list[str]) -> int:
    """Run the command and return the exit code, when nothing that it started runs any more."""
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    for sent in (signal.SIGINT, signal.SIGTERM):  # the command gets them too, with their default action again
        signal.signal(sent, lambda *_: None)
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, close_fds=False)
    except OSError as error:
        print(f"{command[0]} cannot be run: {error.strerror}", flush=True)
        return NOT_FOUND
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    code = _reap_until(process.pid)
    while _kill_children():
        os.wait()
    return code


def _end_with_stdin() -> None:
    """Wait until standard input closes, then end children until this process ends.

    Each gets SIGTERM first: `docker start --attach` passes that on to its container, which a killed client leaves.
    """
    while os.read(0, 1):
        pass
    asked = set[int]()
    for _ in range(GRACE * 100):
        for child in set(_children()) - asked:
            _send(child, signal.SIGTERM)
            asked.add(child)
        time.sleep(0.01)
    while True:
        _kill_children()
        time.sleep(0.01)


def _reap_until(last: int) -> int:
    """Wait for children, adopted ones among them, until that one ends; return its exit code."""
    while True:
        ended, status = os.wait()
        if ended == last:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _kill_children() -> int:
    """Kill the children of this process, and return how many it has; their own children become its children."""
    children = list(_children())
    for child in children:
        _send(child, signal.SIGKILL)
    return len(children)


def _children() -> Iterator[int]:
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # a process that ends meanwhile
            if _parent_of(folder) == os.getpid():
                yield int(folder.name)


def _send(process: int, what: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, what)


def _parent_of(folder: Path) -> int:
    """The parent's number, of a process's folder in /proc; in stat, a name in brackets comes before it (proc(5))."""
    text = (folder / "stat").read_text(encoding="utf-8", errors="replace")
    return int(text.rpartition(")")[2].split()[1])


if __name__ == "__main__":
    code = main(sys.argv[1:])
    os._exit(code)  # the thread may still wait
