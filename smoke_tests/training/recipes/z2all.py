"""Z2all's ablation: what each fused operator is worth in its 1.26B model, a run of pretrain for each row.

    python -m smoke_tests.training.recipes.z2all --data data/corpus --out runs/z2all [--rows naive use_all] [--compile]

A row is a process of its own, so that it meets no memory of another. Flags that are not this program's go to pretrain
in every row, such as --precision fp8. Batch 2, 16 accumulated micro-batches and windows of 2,048 tokens are the
article's; beside each row stands what it measured on an A800 (B20 to B27, with --compile B29 to B35).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple, Optional, Sequence, Tuple

import torch

from smoke_tests.training.command import Parser
from smoke_tests.training.distributed.jobs import CHECKOUT
from smoke_tests.training.logs import read_log
from smoke_tests.training.models import MODELS

FIRST = 5  # the article takes iteration 5, counted from 0; here it is the median from that one on


class Ablation(NamedTuple):
    """A row: --ops of pretrain, and the article's seconds of a step and GB, without and with torch.compile."""

    ops: str
    plain: Tuple[float, float]
    compiled: Tuple[float, float]


# "w/o swiglu" ended in an error behind torch.compile.
ROWS = {
    "naive": Ablation("naive", (9.72, 72.85), (5.47, 64.97)),
    "use_all": Ablation("fused", (3.49, 27.95), (3.60, 32.46)),
    "sdpa": Ablation("attention=torch", (3.85, 28.89), (3.95, 33.46)),
    "w/o flash-attn": Ablation("attention=naive", (8.75, 65.47), (5.60, 65.92)),
    "w/o rope": Ablation("rope=naive", (3.68, 27.96), (3.51, 31.58)),
    "w/o cross_entropy": Ablation("cross_entropy=naive", (3.55, 29.89), (3.64, 33.65)),
    "w/o rmsnorm": Ablation("rms_norm=naive", (4.00, 32.15), (3.45, 32.41)),
    "w/o swiglu": Ablation("swiglu=naive", (3.60, 29.86), (float("nan"), float("nan"))),
}


class Measured(NamedTuple):
    """What a row took: seconds of a step, the share of the GPU's peak (0 if unknown), and GB of GPU memory at most."""

    seconds: float
    mfu: float
    gigabytes: float
    loss: float


def alone(words: Sequence[str]) -> int:
    """Run pretrain in this process, then write beside its log how much memory of the GPU it took."""
    from smoke_tests.training import pretrain
    from smoke_tests.training.options import parse

    code = pretrain.main(words)
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    Path(parse(words).out, "memory.json").write_text(json.dumps({"peak": peak}), encoding="utf-8")
    return code


def run(row: str, words: Sequence[str], out: Path) -> Measured:
    """Run a row in a process of its own; RuntimeError with the last line that it printed if it fails."""
    program = [sys.executable, "-m", "smoke_tests.training.recipes.z2all", "--alone"]
    flags = [*words, "--ops", ROWS[row].ops, "--out", str(out), "--checkpoint-every", "0"]
    path = os.pathsep.join(filter(None, (str(CHECKOUT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [*program, *flags],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError((done.stdout.strip() or f"it ended with code {done.returncode}").splitlines()[-1])
    steps = read_log(out / "log.jsonl")
    later = steps[FIRST:]
    peak = json.loads((out / "memory.json").read_text(encoding="utf-8"))["peak"]
    return Measured(
        statistics.median(step["seconds"] for step in later),
        statistics.median(step.get("mfu", 0.0) for step in later),
        peak / 1e9,
        steps[-1]["loss"],
    )


def line(row: str, measured: Measured, naive: Optional[Measured], compiled: bool) -> str:
    """A line of the table: what was measured, how many times as fast as naive, and the article's."""
    seconds, gigabytes = ROWS[row].compiled if compiled else ROWS[row].plain
    times = f"{naive.seconds / measured.seconds:5.2f}" if naive else "     "
    mfu = f"{measured.mfu:6.1%}" if measured.mfu else "      "
    mine = f"{measured.seconds:8.3f} {mfu} {measured.gigabytes:6.1f} {times} {measured.loss:7.3f}"
    return f"{row:18}{mine}   {seconds:5.2f} {gigabytes:6.2f}"


def main(words: Sequence[str]) -> int:
    """Run the rows and print them as a table; 1 if one of them failed."""
    if words[:1] == ["--alone"]:
        return alone(words[1:])
    parser = Parser(prog="z2all", description=__doc__.splitlines()[0], allow_abbrev=False, epilog="Others: pretrain's.")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS), help="which rows (all)")
    parser.add_argument("--model", choices=list(MODELS), default="z2all-1.26b", help="name of the model (%(default)s)")
    parser.add_argument("--steps", type=int, default=10, help=f"steps of a row, more than {FIRST} (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=2, help="windows per forward pass (%(default)s)")
    parser.add_argument("--gradient-accumulation-steps", type=int, default=16, help="of a step (%(default)s)")
    parser.add_argument("--compile", action="store_true", help="compile each block, as in the article's last table")
    parser.add_argument("--out", type=Path, default=Path("runs", "z2all"), help="a new folder (%(default)s)")
    options, others = parser.parse_known_args(words)
    if options.steps <= FIRST:
        parser.error(f"--steps is {options.steps}, and the steps before the sixth warm up: name at least {FIRST + 1}")
    if options.out.exists():
        parser.error(f"--out {options.out} exists: name a new folder")
    flags = [*others, "--model", options.model, "--steps", str(options.steps), *(["--compile"] * options.compile)]
    flags += ["--batch-size", str(options.batch_size)]
    flags += ["--gradient-accumulation-steps", str(options.gradient_accumulation_steps)]
    print(f"{'':18}{'s/step':>8} {'MFU':>6} {'GB':>6} {'times':>5} {'loss':>7}   A800: s     GB", flush=True)
    naive, failed = None, 0
    for number, row in enumerate(options.rows):
        try:
            measured = run(row, flags, options.out / str(number))
        except RuntimeError as error:
            failed = 1
            print(f"{row:18}{error}", flush=True)
            continue
        naive = measured if row == "naive" else naive
        print(line(row, measured, naive, options.compile), flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
