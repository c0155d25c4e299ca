"""A document's table of training on several GPUs: each row is a job of torchtitan on all GPUs of this machine.

The runs are those of recipes/runs.toml, and every other flag is the engine's, for all rows, such as
--training.dataset_path data/corpus.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Dict, List, Mapping, NamedTuple, Sequence

import torch

from smoke_tests.training.command import Parser
from smoke_tests.training.distributed import jobs
from smoke_tests.training.distributed.engine_arguments import ARGUMENTS, FLOAT8, ON_ONE_HOST, RUNS

FIRST = 5  # the steps before it compile and warm up


class Row(NamedTuple):
    """A run, its float8 recipe, and what the document measured: tokens/s of a GPU, and how many times as fast."""

    run: str
    float8: str
    document: str


class Measured(NamedTuple):
    """What a row took: tokens/s of a GPU (median over steps), GiB of its memory at most, and the last loss."""

    tokens_per_second: float
    gib: float
    loss: float


def processes_of(run: str, cpu: bool) -> int:
    """How many processes a run gets here: one for each GPU of this machine, or on a CPU as many as the run has GPUs."""
    return RUNS[run]["gpus"] if cpu else torch.cuda.device_count()


def arguments_of(row: Row, cpu: bool) -> List[str]:
    """The engine's arguments for a row; RuntimeError if its layout does not fit this machine's GPUs."""
    processes = processes_of(row.run, cpu)
    arguments = ARGUMENTS[row.run] if cpu else ON_ONE_HOST.get((row.run, processes), "")
    if not arguments:
        fitting = " or ".join(str(gpus) for name, gpus in sorted(ON_ONE_HOST) if name == row.run)
        raise RuntimeError(
            f"{row.run} is laid out for {fitting} GPUs of one machine, and this one has {processes}: name other --rows"
        )
    return [*(["--cpu"] if cpu else []), *arguments.split(), *FLOAT8[row.float8].split()]


def measured(row: Row, out: Path, steps: int, cpu: bool, flags: Sequence[str]) -> Measured:
    """Train a row to its end; RuntimeError with the first error that a process printed if it fails."""
    processes = processes_of(row.run, cpu)
    more = ["--job.dump_folder", str(out), "--training.steps", str(steps), "--checkpoint.no-enable", *flags]
    command = jobs.torchrun("engine.py", [*arguments_of(row, cpu), *more], processes)
    out.mkdir(parents=True)
    with jobs.Job(command, out / "log", alone=not cpu) as job:  # on a CPU, nothing is timed
        if (code := job.process.wait()) != 0:
            raise RuntimeError(jobs.error_in(job.printed()) or f"it ended with code {code}; its output is in {out}/log")
    ranks = [jobs.noted(out, rank) for rank in range(processes)]
    losses = jobs.of_the_loss(ranks)
    if not losses or len(ranks[0]) <= FIRST:
        raise RuntimeError(f"it logged {len(ranks[0])} steps with a loss, and needs {FIRST + 1}: see {out}/log")
    rate = statistics.median(line["tokens_per_second"] for line in ranks[0][FIRST:])
    return Measured(rate, max(line["active_gib"] for lines in ranks for line in lines), losses[-1]["loss"])


def main(name: str, about: str, rows: Mapping[str, Row], column: str, words: Sequence[str]) -> int:
    """Train the rows in the order of the table and print them, each beside the document's; 1 if one of them failed."""
    parser = Parser(prog=name, description=about, allow_abbrev=False, epilog="All other flags are torchtitan's.")
    parser.add_argument("--out", type=Path, default=Path("runs", name), help="a new folder (runs/%(prog)s)")
    parser.add_argument("--rows", nargs="+", choices=list(rows), default=list(rows), help="which rows (all)")
    parser.add_argument("--steps", type=int, default=20, help="steps of each row (20)")
    parser.add_argument("--cpu", action="store_true", help="train on the CPU, to see that a layout is right")
    asked, flags = parser.parse_known_args(words)
    if asked.steps <= FIRST:
        parser.error(f"--steps is {asked.steps}, and the steps before the sixth warm up: name at least {FIRST + 1}")
    if asked.out.exists():
        parser.error(f"--out {asked.out} exists: name a new folder")
    if not asked.cpu and not torch.cuda.is_available():
        parser.error("torch sees no GPU here: add --cpu to train on the CPU")
    wide = max(map(len, rows)) + 2
    print(f"{'':{wide}}{'tokens/s/GPU':>12} {'times':>5} {'GiB':>6} {'loss':>7}   {column}", flush=True)
    done: Dict[str, Measured] = {}
    chosen = [key for key in rows if key in asked.rows]
    for number, key in enumerate(chosen):
        try:
            done[key] = now = measured(rows[key], asked.out / str(number), asked.steps, asked.cpu, flags)
        except RuntimeError as error:
            print(f"{key:{wide}}{error}", flush=True)
            continue
        base = done.get(next(iter(rows)))
        times = f"{now.tokens_per_second / base.tokens_per_second:5.2f}" if base else ""
        numbers = f"{now.tokens_per_second:12,.0f} {times:5} {now.gib:6.1f} {now.loss:7.3f}"
        print(f"{key:{wide}}{numbers}   {rows[key].document}".rstrip(), flush=True)
    return 0 if len(done) == len(chosen) else 1
