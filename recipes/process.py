"""Commands that a run starts, how they end together with it, and folders that it alone uses."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TextIO

from recipes.errors import Refusal
from recipes.files import disk_named

# git without the user's settings and attributes, which would change what it writes (core.autocrlf).
GIT_ALONE = {
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_COUNT": "0",
    "GIT_CONFIG_PARAMETERS": "",
    "GIT_ATTR_NOSYSTEM": "1",
}
GRACE = 5  # seconds
SUPERVISOR = Path(__file__).with_name("supervisor.py")
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)
_libc = ctypes.CDLL(None)


def ends_with_us() -> None:
    """For `preexec_fn`: the process gets SIGTERM when the tool ends in any way, also by kill -9."""
    _libc.prctl(_SET_PARENT_DEATH_SIGNAL, int(signal.SIGTERM))


def git_variables() -> dict[str, str]:
    """The environment without the repository that a git hook, or the user, may have named in it."""
    named = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_COMMON_DIR")
    return {key: value for key, value in os.environ.items() if key not in named}


def commit_of(root: Path, *files: str) -> str:
    """The commit of a checkout, shortened; "" where there is none, or where one of these files (globs) differs."""
    asked = (("rev-parse", "--short=12", "HEAD"), ("status", "--porcelain", "--", *files))
    git = ("git", "-C", str(root))
    answers = [
        subprocess.run([*git, *words], env=git_variables(), capture_output=True, text=True, check=False)
        for words in asked
    ]
    return answers[0].stdout.strip() if not any(done.returncode for done in answers) and not answers[1].stdout else ""


@contextlib.contextmanager
def group(command: list[str], folder: Path, variables: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A process and everything that it starts, with both outputs in one pipe; none outlives the block or the tool.

    A supervisor (recipes/supervisor.py) runs the command, and also ends everything if we are killed. Until then, the
    processes inherit the locks that we hold (`close_fds`).
    """
    supervised, ours = os.pipe()
    command = [sys.executable, "-I", "-S", str(SUPERVISOR), *command]
    try:
        process = subprocess.Popen(
            command, cwd=folder, env=dict(variables), encoding="utf-8", errors="replace", stdin=supervised,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True, close_fds=False,
        )  # fmt: skip
    except BaseException:
        os.close(ours)
        raise
    finally:
        os.close(supervised)
    try:
        yield process
    finally:
        try:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGINT)  # so that the process ends those that it started
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE)
        finally:  # also if a second Ctrl-C ends the wait
            os.close(ours)
            process.wait()


@contextlib.contextmanager
def held(folder: Path, waiting: Callable[[str], None]) -> Iterator[None]:
    """Use a folder alone, by a lock on FOLDER/lock; while another run uses it, wait and say once for which process.

    All that we start inherits the lock. Where the run that took it has ended and something of it still runs, that is
    refused: it may write there, and nobody knows when it ends.
    """
    path, is_ours = folder / "lock", False
    while not is_ours:
        with disk_named(folder):
            folder.mkdir(parents=True, exist_ok=True)
            lock = path.open("a+")
        with lock:
            os.set_inheritable(lock.fileno(), True)
            _acquire(lock, folder, waiting)
            is_ours = path.exists() and os.path.samestat(path.stat(), os.fstat(lock.fileno()))
            if is_ours:  # otherwise the run that used the folder has removed it
                lock.seek(0)
                lock.truncate()
                lock.write(f"{os.getpid()}\n")
                lock.flush()
                yield


def _acquire(lock: TextIO, folder: Path, waiting: Callable[[str], None]) -> None:
    """Wait for the lock of a folder, as long as the process that took it runs."""
    announced, patient_until = False, time.monotonic() + GRACE
    while True:
        with contextlib.suppress(BlockingIOError):
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        lock.seek(0)
        holder, users = lock.read().strip() or "?", _users(lock)
        if not users or holder in users:  # the holder may be in a container and not visible here
            patient_until = time.monotonic() + GRACE
        elif time.monotonic() > patient_until:
            listed = ", ".join(f"{number} ({name})" for number, name in users.items())
            raise Refusal(
                f"{folder} is in use by processes that the killed process {holder} started: "
                f"end {listed} with `kill`, and run again."
            )
        if not announced and (not users or holder in users):
            waiting(f"waiting for process {holder}, which is using {folder}")
            announced = True
        time.sleep(0.2)


def _users(lock: TextIO) -> dict[str, str]:
    """Number and name of the visible processes that hold that lock, without those that wait for it."""
    ours, users = os.fstat(lock.fileno()), {}
    for process in Path("/proc").glob("[0-9]*"):
        opened: list[Path] = []
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            opened = list((process / "fd").iterdir())
        for file in opened:
            with contextlib.suppress(OSError):
                is_same = os.path.samestat(file.stat(), ours)
                if is_same and "FLOCK" in (process / "fdinfo" / file.name).read_text():
                    users[process.name] = (process / "comm").read_text().strip()
    return users
