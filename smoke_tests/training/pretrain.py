"""Pre-train a Llama: `python -m smoke_tests.training.pretrain --model hare-1.1b --precision fp8 --ops fused`.

Writes to --out: log.jsonl (a line per step), events.jsonl (checkpoints, stops, what the guard saw), loss.svg, and the
checkpoints, step-*.pt. --resume goes on with what is there; SIGINT and SIGTERM end a run after the step and save it,
SIGUSR1 only saves it. No second run may use the folder meanwhile (folder.py).
`torchrun --nproc-per-node 8 -m smoke_tests.training.pretrain` trains on eight GPUs (parallel.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import sys
from pathlib import Path
from typing import Optional, Sequence, Tuple

from smoke_tests.training import checkpoint, deepspeed_config, folder, observers, parallel
from smoke_tests.training.documents import TextError
from smoke_tests.training.logs import printed
from smoke_tests.training.options import Options, Refused, flag_name, model_name, out_of_bounds, parse
from smoke_tests.training.parallel import ALONE, Ranks
from smoke_tests.training.trainer import Run, train

REFUSALS = (Refused, TextError, checkpoint.CheckpointError, deepspeed_config.Unmapped)


def start(options: Options, ranks: Ranks = ALONE) -> Tuple[Run, str]:
    """The run that these options ask for, at its first step or where it was left, and a note about that.

    Every rank calls it; what refuses the run on one refuses it on all. Rank 0 locks the folder for all.
    """
    with contextlib.ExitStack() as stack:
        with ranks.together(*REFUSALS):
            options, lock, last = completed(options, ranks), None, None
            if ranks.first:
                lock = stack.enter_context(folder.taken(Path(options.out)))
                last = continued(options)
        last = ranks.agreed(last)  # which another host may not see yet
        with ranks.together(*REFUSALS):
            run = Run(options, ranks)
        if ranks.world > 1:
            flags = {flag_name(field): getattr(options, field.name) for field in dataclasses.fields(options)}
            parallel.refuse_unlike({**flags, "--data": run.text.identity(), "--tokenizer": ""}, ranks)
        run.share()
        run.lock = lock
        return run, run.load(last) if last else ""


def completed(options: Options, ranks: Ranks) -> Options:
    """The options with those of --deepspeed and with the folder; Refused if they name what is not there."""
    if options.deepspeed:
        asked, options = options.deepspeed, deepspeed_config.applied(options.deepspeed, options, ranks.world)
        if wrong := out_of_bounds(options):
            raise Refused(f"--deepspeed {asked}: {wrong}")
    name = "config" if options.config else options.model
    options.out = str(Path(options.out or f"runs/{name}-{options.precision}-{options.seed}"))
    observers.refuse(options)
    return options


def continued(options: Options) -> Optional[Path]:
    """The checkpoint from which a run goes on, or None; Refused if that is not what --resume says."""
    last = checkpoint.newest(Path(options.out))
    if options.resume and last is None:
        raise Refused(f"--resume: {options.out} holds no checkpoint")
    if last is not None and not options.resume:
        raise Refused(
            f"{options.out} holds a run already, up to {last.name}: go on with --resume, or name another --out"
        )
    return last


def main(arguments: Sequence[str]) -> int:
    """The command; its exit code."""
    with parallel.first_speaks():
        options = parse(arguments)
        with parallel.joined(options) as ranks:
            try:
                run, note = start(options, ranks)
                introduce(run, note)
                return train(run)
            except REFUSALS as error:
                sys.exit(f"fusebox: {error}")
            except BrokenPipeError:  # before the first step
                return 128 + signal.SIGPIPE


def introduce(run: Run, note: str) -> None:
    """Print a line about what is trained, how, and from where."""
    options, ranks = run.options, run.ranks
    columns = ", ".join(f"{name} {column}" for name, column in run.columns.items())
    shared = f"{ranks.way} on {ranks.world} processes, {run.windows} windows a step; " if ranks.way else ""
    where = f"{options.out}, from step {run.step}" + (f", {note}" if note else "")
    size = f"{run.data.parameters:,} parameters"
    printed(f"{model_name(options)}, {size}, {options.precision}; {columns}; {shared}to {where}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
