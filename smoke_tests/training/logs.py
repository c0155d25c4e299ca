"""What a run writes while it trains: lines of JSON in files, and a line of progress."""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

import torch

from smoke_tests import hardware
from smoke_tests.training import checkpoint
from smoke_tests.training.models import operations_per_token


class Log:
    """Lines of JSON, appended to a file; a part of a line that a killed process left is dropped."""

    def __init__(self, path: Path, before: Optional[int] = None) -> None:
        """before: keep only the lines of steps before this one, because later steps will be done again."""
        self.path = path
        rows = [row for row in read_log(path) if before is None or row.get("step", 0) < before]
        partial = path.with_name(path.name + checkpoint.PARTIAL)
        with open(partial, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        os.replace(partial, path)

    def write(self, **row: Any) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def read_log(path: Path) -> List[Dict[str, Any]]:
    """The complete lines of a log; none if the file does not exist."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:  # the line that a killed process was writing
            break
    return rows


class Progress:
    """A line of loss, tokens per second, MFU, memory and time left; on a terminal each step rewrites it."""

    def __init__(self, run: Any, say: Callable[[str], None]) -> None:
        options = run.options
        self.run, self.say, self.terminal = run, say, sys.stdout.isatty() and say is print
        self.tokens = options.batch_size * options.gradient_accumulation_steps * run.text.length
        self.operations = operations_per_token(run.data.shape)
        name = hardware.short_name(torch.cuda.get_device_name()) if run.on_gpu else ""
        self.peak = hardware.PEAK.get(name, 0.0)
        self.times: List[float] = []

    def show(self, step: int, loss: float, seconds: float) -> None:
        self.times = [*self.times[-19:], seconds]
        options = self.run.options
        last = step + 1 == options.steps
        if not (self.terminal or last or step % options.log_every == 0):
            return
        typical = statistics.median(self.times)
        rate = self.tokens / typical
        parts = [f"step {step + 1}/{options.steps}", f"loss {loss:.3f}", f"{rate:,.0f} tokens/s"]
        if self.peak:
            parts.append(f"MFU {rate * self.operations / self.peak:.1%} of the bfloat16 peak")
        parts.append(f"{memory_gib(self.run.on_gpu):.1f} GiB")
        parts.append(f"{(options.steps - step - 1) * typical / 60:.1f} min left")
        line = "  ".join(parts)
        if self.terminal:
            sys.stdout.write("\r" + line + "\x1b[K" + ("\n" if last else ""))
            sys.stdout.flush()
        else:
            self.say(line)


def memory_gib(on_gpu: bool) -> float:
    """Peak memory so far in GiB: of tensors on the GPU, or of this process without a GPU."""
    if on_gpu:
        return float(torch.cuda.max_memory_allocated()) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
