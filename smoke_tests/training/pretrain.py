"""Pre-train a Llama: `python -m smoke_tests.training.pretrain --model hare-1.1b --precision fp8 --ops fused`.

Writes to --out: log.jsonl (a line per step), events.jsonl (checkpoints, stops, what the guard saw), loss.svg, and the
checkpoints, step-*.pt. --resume goes on with what is there; SIGINT and SIGTERM end a run after the step and save it,
SIGUSR1 only saves it. No second run may use the folder meanwhile (folder.py).
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Sequence, Tuple

from smoke_tests.training import checkpoint, deepspeed_config, folder, observers
from smoke_tests.training.documents import TextError
from smoke_tests.training.logs import printed
from smoke_tests.training.options import Options, Refused, model_name, out_of_bounds, parse
from smoke_tests.training.trainer import Run, train


def start(options: Options) -> Tuple[Run, str]:
    """The run that these options ask for, at its first step or where it was left, and a note about that."""
    if options.deepspeed:
        asked, options = options.deepspeed, deepspeed_config.applied(options.deepspeed, options)
        if wrong := out_of_bounds(options):
            raise Refused(f"--deepspeed {asked}: {wrong}")
    name = "config" if options.config else options.model
    out = Path(options.out or f"runs/{name}-{options.precision}-{options.seed}")
    options.out = str(out)
    observers.refuse(options)
    with folder.taken(out) as lock:
        last = checkpoint.newest(out)
        if options.resume and last is None:
            raise Refused(f"--resume: {out} holds no checkpoint")
        if last is not None and not options.resume:
            raise Refused(f"{out} holds a run already, up to {last.name}: go on with --resume, or name another --out")
        run = Run(options)
        run.lock = lock
        return run, run.load(last) if last else ""


def main(arguments: Sequence[str]) -> int:
    """The command; its exit code."""
    options = parse(arguments)
    try:
        run, note = start(options)
        options = run.options
        columns = ", ".join(f"{name} {column}" for name, column in run.columns.items())
        where = f"{options.out}, from step {run.step}" + (f", {note}" if note else "")
        size = f"{run.data.parameters:,} parameters"
        printed(f"{model_name(options)}, {size}, {options.precision}; {columns}; to {where}")
        return train(run)
    except (Refused, TextError, checkpoint.CheckpointError, deepspeed_config.Unmapped) as error:
        sys.exit(f"fusebox: {error}")
    except BrokenPipeError:  # before the first step
        return 128 + signal.SIGPIPE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
