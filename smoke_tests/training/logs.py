"""What a run writes while it trains: lines of JSON in files, and a line of progress."""

from __future__ import annotations

import json
import os
import resource
import signal
import statistics
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence

import torch

from smoke_tests import hardware
from smoke_tests.training import checkpoint, plot
from smoke_tests.training.models import operations_per_token
from smoke_tests.training.observers import Observer
from smoke_tests.training.options import Refused, model_name
from smoke_tests.training.schedule import spikes


def printed(line: str) -> None:
    """Print a line at once, also into a pipe; BrokenPipeError if nobody reads it, and then prints nothing more."""
    try:
        print(line, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes again as it ends
        raise
    except OSError:  # a full disk behind the output costs the line, not the run
        pass


class Log:
    """Lines of JSON, appended to a file; a part of a line that a killed process left is dropped."""

    def __init__(
        self, path: Path, before: Optional[int] = None, say: Callable[[str], None] = printed, active: bool = True
    ) -> None:
        """before: keep only the lines of steps before this one, because later steps will be done again.

        say: takes one sentence about a file that cannot be written. active: whether to write; only rank 0 does.
        """
        self.path, self._say, self._waiting, self._failed, self._active = path, say, b"", False, active
        if not active:
            return
        rows = [row for row in read_log(path) if before is None or row.get("step", 0) < before]
        partial = path.with_name(path.name + checkpoint.PARTIAL)
        try:
            with open(partial, "w", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
            os.replace(partial, path)
        except OSError as error:
            raise Refused(f"{path} cannot be written: {error.strerror}") from None

    def write(self, **row: Any) -> None:
        """Append a line. While the disk is full, lines wait in memory; the next write tries again."""
        if not self._active:
            return
        self._waiting += json.dumps(row).encode() + b"\n"
        self.whole()

    def whole(self) -> bool:
        """Whether every line is in the file, or can be written now."""
        if not self._active:
            return True
        try:
            append(self.path, self._waiting)
            self._waiting, self._failed = b"", False
        except OSError as error:
            if not self._failed:
                self._say(f"fusebox: {self.path} cannot be written ({error.strerror}); the next step tries again")
            self._failed = True
        return not self._failed


def append(path: Path, text: bytes) -> None:
    """Append to a file all of this or, with the OSError, none of it."""
    with open(path, "ab", buffering=0) as file:
        size = file.tell()
        try:
            while text:
                text = text[file.write(text) :]
        except OSError:
            file.truncate(size)  # needs no space
            raise


def read_log(path: Path) -> List[Dict[str, Any]]:
    """The complete lines of a log; none if the file does not exist."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:  # the line that a killed process was writing
            break
    return rows


class Journal:
    """All that a run writes beside its checkpoints: log.jsonl, events.jsonl, loss.svg, and its lines of output.

    Every rank has one and calls its methods; that of rank 0 alone writes.
    """

    def __init__(
        self, run: Any, say: Callable[[str], None], signals: List[int], observers: Sequence[Observer] = ()
    ) -> None:
        """say: prints a line. signals: takes SIGPIPE when nobody reads the output. observers: get what the log gets."""
        self.run, self._say, self._signals, self._observers = run, say, signals, list(observers)
        self.out, self.first = Path(run.options.out), run.ranks.first
        with run.ranks.together(Refused):
            self.log = Log(self.out / "log.jsonl", run.step, self.tell, self.first)
            self.events = Log(self.out / "events.jsonl", say=self.tell, active=self.first)
        self.losses = [row["loss"] for row in read_log(self.log.path)] if self.first else []
        self.losses = run.losses = run.ranks.agreed(self.losses)
        self.progress = Progress(run, self.tell, terminal=say is printed and sys.stdout.isatty())

    def tell(self, line: str) -> None:
        """Say a line."""
        if not self.first:
            return
        try:
            self._say(line)
        except BrokenPipeError:
            self._signals.append(signal.SIGPIPE)

    def note(self, step: int, seconds: float, row: Dict[str, float]) -> None:
        """Log what a step returned and how long it took, and say so where that is due."""
        row = {"seconds": seconds, **row, **self.progress.rates(step, seconds)}
        self.log.write(step=step, **row)
        self._observe(step, row)
        self.losses.append(row["loss"])
        if spikes(self.losses[-33:]):
            text = f"step {step}: the loss jumps to {row['loss']:.3f}; the largest gradient is {self.run.loudest()}"
            text += "; the weights stay as they were" if "skipped" in row else ""
            self.events.write(event="skip" if "skipped" in row else "spike", step=step, text=text)
            self.tell(f"fusebox: {text}")
        self.progress.show(step, row["loss"], seconds)

    def _observe(self, step: int, row: Dict[str, float]) -> None:
        """Give the observers a row; one that fails is named, and gets no more."""
        for observer in list(self._observers):
            try:
                observer(step, row)
            except Exception as error:  # raised by a third-party package, over a network or a disk
                self._observers.remove(observer)
                text = f"step {step}: an observer (--tensorboard or --wandb) fails and gets no more: {error!r}"
                self.events.write(event="observer failed", step=step, text=text)
                self.tell(f"fusebox: {text}")

    def finish(self) -> bool:
        """Draw the loss; whether that and every line of the logs is in its file."""
        if not self.first:
            return True
        options = self.run.options
        title = f"{model_name(options)}, {options.precision}: loss (nats per token)"
        path = self.out / "loss.svg"
        try:
            path.write_text(plot.figure({title: {"loss": list(enumerate(self.losses))}}), encoding="utf-8")
        except OSError as error:
            self.tell(f"fusebox: {path} cannot be written: {error.strerror}")
            return False
        return self.log.whole() and self.events.whole()


class Progress:
    """A line of loss, tokens per second, MFU, memory and time left; on a terminal each step rewrites it."""

    def __init__(self, run: Any, tell: Callable[[str], None], terminal: bool) -> None:
        self.run, self.tell, self.terminal = run, tell, terminal
        self.tokens = run.windows * run.text.length
        self.operations = operations_per_token(run.data.shape)
        name = hardware.short_name(torch.cuda.get_device_name()) if run.on_gpu else ""
        self.peak = hardware.PEAK.get(name, 0.0) * run.ranks.world
        self.times: List[float] = []

    def rates(self, step: int, seconds: float) -> Dict[str, float]:
        """For the log: the tokens of the run so far, tokens per second, and on a GPU of known peak the MFU (0 to 1)."""
        rate = self.tokens / seconds
        mfu = {"mfu": rate * self.operations / self.peak} if self.peak else {}
        return {"tokens": (step + 1) * self.tokens, "tokens_per_second": rate, **mfu}

    def show(self, step: int, loss: float, seconds: float) -> None:
        self.times = [*self.times[-19:], seconds]
        options = self.run.options
        last = step + 1 == options.steps
        if not (self.terminal or last or step % options.log_every == 0):
            return
        typical = statistics.median(self.times)
        rates = self.rates(step, typical)
        parts = [f"step {step + 1}/{options.steps}", f"loss {loss:.3f}"]
        parts.append("{:,.0f} tokens/s".format(rates["tokens_per_second"]))
        if "mfu" in rates:
            parts.append("MFU {:.1%} of the bfloat16 peak".format(rates["mfu"]))
        parts.append(f"{memory_gib(self.run.on_gpu):.1f} GiB")
        parts.append(f"{(options.steps - step - 1) * typical / 60:.1f} min left")
        line = "  ".join(parts)
        if self.terminal:
            sys.stdout.write("\r" + line + "\x1b[K" + ("\n" if last else ""))
            sys.stdout.flush()
        else:
            self.tell(line)


def memory_gib(on_gpu: bool) -> float:
    """Peak memory so far in GiB: of tensors on the GPU, or of this process without a GPU."""
    if on_gpu:
        return float(torch.cuda.max_memory_allocated()) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
