"""What the user sees: a line per step as it ends, and in a terminal a live line with package, step, bytes, seconds."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

if sys.stdout is None:  # it is closed (>&-)
    sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115, since it stays open
if isinstance(sys.stdout, io.TextIOWrapper):
    sys.stdout.reconfigure(errors="backslashreplace")  # as stderr does with characters that the terminal lacks
LOG_WIDTH = 160  # columns, if there is no terminal to ask


class _Output(Console):
    def on_broken_pipe(self) -> NoReturn:
        """rich would end the program with 1, as if it had failed; `__main__` ends it as the signal does."""
        raise BrokenPipeError


console = _Output(highlight=False, emoji=False, width=None if sys.stdout.isatty() else LOG_WIDTH)
errors = Console(stderr=True, highlight=False, emoji=False)


def size(count: float) -> str:
    """Bytes for a reader: 183 MiB."""
    for unit, step in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= step:
            return f"{count / step:.3g} {unit}"
    return f"{count:.0f} B"


class Step:
    """One step under way; `note` is what its closing line adds."""

    def __init__(self, progress: Progress, verb: str, subject: str) -> None:
        self._progress = progress
        self._verb, self._subject = verb, subject
        self._task = progress.add_task(subject, total=None, verb=verb, note="", bytes=False)
        self._told = self.started = time.monotonic()
        self.note = ""

    def advance(self, count: int) -> None:
        """Report that `count` more bytes have arrived."""
        self._progress.advance(self._task, count)
        task = self._progress.tasks[self._progress.task_ids.index(self._task)]
        self._tell(f"{size(task.completed)} of {size(task.total) if task.total else '?'}")

    def expect(self, total: int | None) -> None:
        """Set the number of bytes to expect, once a server has given it."""
        self._progress.reset(self._task, total=total, bytes=True)

    def show(self, note: str) -> None:
        """Show the current activity beside the step, such as the last line of a compiler."""
        self._progress.update(self._task, note=note.strip()[:60])
        self._tell(note.strip()[:100])

    def _tell(self, note: str) -> None:
        """Where there is no live line (a log), a line every ten seconds."""
        now = time.monotonic()
        if not self._progress.console.is_terminal and now - self._told > 10:
            self._told = now
            _print(self._progress.console, self._verb, self._subject, f"{now - self.started:.0f} s: {note}")


def say(line: str | Text) -> None:
    """A line on stdout, whole and as it is: neither wrapped nor read as rich's markup."""
    console.print(line, soft_wrap=True, markup=False)


def _print(to: Console, verb: str, subject: str, note: str) -> None:
    to.print(Text.assemble(f"{verb:<8}{subject}  ", (note, "dim")), soft_wrap=True)


class _Bytes(DownloadColumn):
    """Bytes done of all bytes, for the steps that count bytes."""

    def render(self, task: Task) -> Text:
        return super().render(task) if task.fields["bytes"] else Text("")


class Steps:
    """The live display of one run, on stdout or another console. Steps may run in threads."""

    def __init__(self, to: Console = console) -> None:
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.fields[verb]:<8}[bold]{task.description}"),
            BarColumn(bar_width=20),
            _Bytes(binary_units=True),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}", style="dim", markup=False),
            console=to,
            transient=True,
        )

    def __enter__(self) -> Steps:
        if self._progress.console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress.console.is_terminal:
            self._progress.stop()

    def say(self, verb: str, subject: str, note: str = "") -> None:
        """A line that stays."""
        _print(self._progress.console, verb, subject, note)

    def wait(self, note: str) -> None:
        """Say what the run is waiting for."""
        self.say("wait", note)

    @contextlib.contextmanager
    def step(self, verb: str, subject: str) -> Iterator[Step]:
        """A step that takes time: live while it runs, one line with its seconds when it is done."""
        step = Step(self._progress, verb, subject)
        try:
            yield step
            self.say(verb, subject, f"{step.note + '  ' if step.note else ''}{time.monotonic() - step.started:.1f} s")
        finally:
            self._progress.remove_task(step._task)
