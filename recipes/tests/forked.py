"""Runs verbs of a checkout in forked processes, which have the libraries of the tool imported already.

A process of its own for each verb, as a user's; what is saved is the start of Python and the import of libraries. The
checkout's own modules are always imported anew, from its own files.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

LIBRARIES = [
    "docker", "elftools.elf.elffile", "httpx2", "jinja2", "packaging.requirements", "pydantic", "rich.console",
    "rich.progress", "rich.table", "unearth",
]  # fmt: skip
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(LIBRARIES)


def run(root: Path, arguments: list[str], variables: Mapping[str, str], seconds: float) -> tuple[int, str, str]:
    """Run `python -m recipes ARGUMENTS` in a checkout with these variables alone; exit code, stdout, stderr."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, name) for name in ("stdout", "stderr")]
        process = FORKS.Process(target=_verb, args=(root, arguments, dict(variables), outputs))
        process.start()
        try:
            process.join(seconds)
            if process.is_alive():
                raise subprocess.TimeoutExpired(arguments, seconds)
        finally:
            process.kill()
            process.join()
        code = process.exitcode
        assert code is not None
        stdout, stderr = (path.read_text(encoding="utf-8") if path.exists() else "" for path in outputs)
        process.close()
        return code, stdout, stderr


def _verb(root: Path, arguments: list[str], variables: dict[str, str], outputs: list[Path]) -> None:
    """What the forked process does: become what `python -m recipes` would be, and run it."""
    for number, path in enumerate([Path(os.devnull), *outputs]):
        with path.open("r+b" if number == 0 else "wb") as file:
            os.dup2(file.fileno(), number)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background process ignores it
    os.environ.clear()
    os.environ.update(variables)
    tempfile.tempdir = None
    os.chdir(root)
    ours = os.path.realpath(Path(__file__).parents[2])
    sys.path[:] = [str(root), *(path for path in sys.path if path and os.path.realpath(path) != ours)]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("recipes", "smoke_tests", "patches")]:
        del sys.modules[name]
    sys.argv = ["recipes", *arguments]
    runpy.run_module("recipes", run_name="__main__", alter_sys=True)
