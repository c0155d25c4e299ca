"""Commands that a run starts, and how they end together with it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

# git without the user's settings and attributes, which would change what it writes (core.autocrlf).
GIT_ALONE = {
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_COUNT": "0",
    "GIT_CONFIG_PARAMETERS": "",
    "GIT_ATTR_NOSYSTEM": "1",
}
GRACE = 5  # seconds
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
def group(
    command: list[str], folder: Path, variables: Mapping[str, str], *, bound: bool = False
) -> Iterator[subprocess.Popen[str]]:
    """A process in a group of its own, with both outputs in one pipe; none of it outlives us when we stop early.

    It inherits the cache's lock (`close_fds`): if we are killed, the next run waits for it. `bound`: it is then ended.
    """
    process = subprocess.Popen(
        command, cwd=folder, env=dict(variables), encoding="utf-8", errors="replace", stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True, close_fds=False,
        preexec_fn=ends_with_us if bound else None,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            try:
                _send(process, signal.SIGINT)  # it may have started other processes, which it then ends
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE)
            finally:  # also if a second Ctrl-C ends the wait
                _send(process, signal.SIGKILL)
                process.wait()


def _send(process: subprocess.Popen[str], number: signal.Signals) -> None:
    """Signal what is left of a process's group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
