"""The folder of a run: made and locked before anything else, and removed again if the run is refused."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from typing import IO, Iterator

from smoke_tests.training.options import Refused

LOCK = "lock"  # holds the process that has the folder; the kernel releases it however that process ends


@contextlib.contextmanager
def taken(out: Path) -> Iterator[IO[str]]:
    """The context in which a run is made in a folder that no other process trains in; yields the lock, an open file.

    The folder is Refused if it cannot be written or another run has it. If the run is not made, the lock is released,
    and what did not exist before is removed.
    """
    made = [path for path in (out / LOCK, out, *out.parents) if not path.exists()]
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = open(out / LOCK, "a+", encoding="utf-8")  # noqa: SIM115  (a run keeps it)
    except OSError as error:
        raise Refused(f"--out {out} cannot be written: {error.strerror}") from None
    try:
        _lock(out, lock)
    except Refused:
        lock.close()
        raise
    try:
        yield lock
    except BaseException:
        with contextlib.suppress(OSError):  # a folder that is not empty stays
            for path in made:
                path.unlink() if path.name == LOCK else path.rmdir()
        lock.close()
        raise


def _lock(out: Path, lock: IO[str]) -> None:
    """Lock a folder and note this process, or refuse it by the process that has it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        process = lock.read().strip()
        raise Refused(f"--out {out} is in use by process {process}: end that run, or name another --out") from None
    except OSError as error:
        raise Refused(f"--out {out} cannot be locked: {error.strerror}; name a folder of another file system") from None
    lock.truncate(0)
    lock.write(f"{os.getpid()}\n")
    lock.flush()
