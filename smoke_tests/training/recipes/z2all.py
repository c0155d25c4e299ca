"""Z2all's ablation: what each fused operator is worth in its 1.26B model, a run of pretrain for each row.

    python -m smoke_tests.training.recipes.z2all --data data/corpus --out runs/z2all [--rows naive use_all] [--compile]

A row is a process of its own, so that it meets no memory of another. Every other flag is pretrain's, such as
--precision fp8, and is for all rows. Batch 2, 16 accumulated micro-batches and windows of 2,048 tokens are the
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
from smoke_tests.training.options import parse

# The article's model and step, ten times; flags of the user's that follow replace these.
ARTICLE = "--model z2all-1.26b --batch-size 2 --gradient-accumulation-steps 16 --steps 10 --out runs/z2all"
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


def alone(out: str, words: Sequence[str]) -> int:
    """Run pretrain in this process, then write beside its log how much memory of the GPU it took."""
    from smoke_tests.training import checkpoint, pretrain

    code = pretrain.main([*words, "--out", out])
    if last := checkpoint.newest(Path(out)):  # 15 GB of the 1.26B model, for each row
        last.unlink()
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    Path(out, "memory.json").write_text(json.dumps({"peak": peak}), encoding="utf-8")
    return code


def run(row: str, words: Sequence[str], out: Path) -> Measured:
    """Run a row in a process of its own; RuntimeError with the last line that it printed if it fails."""
    program = [sys.executable, "-m", "smoke_tests.training.recipes.z2all", "--alone", str(out)]
    path = os.pathsep.join(filter(None, (str(CHECKOUT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [*program, *words, "--ops", ROWS[row].ops, "--checkpoint-every", "0"],
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
        return alone(words[1], words[2:])
    about = f"All other flags are pretrain's; by default {ARTICLE}"
    parser = Parser(prog="z2all", description=__doc__.splitlines()[0], allow_abbrev=False, epilog=about)
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS), help="which rows (all)")
    asked, others = parser.parse_known_args(words)
    flags = [*ARTICLE.split(), *others]
    options = parse(flags)
    out = Path(options.out)
    if options.steps <= FIRST:
        parser.error(f"--steps is {options.steps}, and the steps before the sixth warm up: name at least {FIRST + 1}")
    if out.exists():
        parser.error(f"--out {out} exists: name a new folder")
    print(f"{'':18}{'s/step':>8} {'MFU':>6} {'GB':>6} {'times':>5} {'loss':>7}   A800: s     GB", flush=True)
    naive, failed = None, 0
    for number, row in enumerate(asked.rows):
        try:
            measured = run(row, flags, out / str(number))
        except RuntimeError as error:
            failed = 1
            print(f"{row:18}{error}", flush=True)
            continue
        naive = measured if row == "naive" else naive
        print(line(row, measured, naive, options.compile), flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
