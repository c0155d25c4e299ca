"""Does a run survive SIGKILL? `python -m smoke_tests.training.kills OUT.json [--kills 20] [-- FLAGS OF PRETRAIN]`.

A deterministic run is killed at a random moment and resumed to its end, again and again; its losses
have to be those of the run that nobody killed, to the last bit. Every other kill waits for a checkpoint that is being
written. With --default the run is not deterministic, and how far the losses are apart is noted.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, List, Sequence

from smoke_tests.training.checkpoint import PARTIAL, newest
from smoke_tests.training.logs import read_log

STEPS = 40
CHECKOUT = Path(__file__).resolve().parents[2]  # the folder from which `python -m smoke_tests...` starts
ON_CPU = ("--model", "tiny", "--precision", "torchao.tensorwise", "--deterministic", "--device", "cpu")


def command(out: Path, steps: int, *flags: str) -> List[str]:
    """The run: with a checkpoint every other step."""
    every = ["--steps", str(steps), "--checkpoint-every", "2", "--out", str(out)]
    return [sys.executable, "-m", "smoke_tests.training.pretrain", *flags, *every]


def finish(out: Path, steps: int, *flags: str) -> List[float]:
    """Run to the end and return the losses, one per step."""
    code = subprocess.call(command(out, steps, *flags), cwd=str(CHECKOUT), stdout=subprocess.DEVNULL)
    assert code == 0, f"a run that nobody killed ended with {code}"
    rows = read_log(out / "log.jsonl")
    assert [row["step"] for row in rows] == list(range(steps)), "the log has not each step once"
    return [row["loss"] for row in rows]


def killed(out: Path, steps: int, inside: bool, draw: random.Random, flags: Sequence[str] = ON_CPU) -> Dict[str, Any]:
    """Start a run and kill it; return when, after which step, and whether a checkpoint was being written.

    inside: wait for one of the checkpoints to be begun; otherwise for a random time after the first.
    """
    process = subprocess.Popen(
        command(out, steps, *flags), cwd=str(CHECKOUT), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    began = time.monotonic()
    least = draw.randrange(2, steps - 2)
    while process.poll() is None and (newest(out) is None or (inside and len(read_log(out / "log.jsonl")) < least)):
        time.sleep(0.001)
    if inside:
        while process.poll() is None and not any(out.glob("*" + PARTIAL)):
            pass
        time.sleep(draw.uniform(0, 0.002))
    else:
        time.sleep(draw.uniform(0, 0.5))
    process.send_signal(signal.SIGKILL)
    process.wait()
    rows = read_log(out / "log.jsonl")
    half = [path.name for path in out.glob("step-*" + PARTIAL)]
    return {
        "seconds": round(time.monotonic() - began, 4),
        "steps": len(rows),
        "whole": newest(out).name if newest(out) else None,  # type: ignore[union-attr]
        "inside a write": half,
        "had ended": process.returncode != -signal.SIGKILL,
    }


def trial(
    folder: Path, reference: List[float], inside: bool, draw: random.Random, flags: Sequence[str]
) -> Dict[str, Any]:
    """Kill a run, resume it, and compare."""
    death = killed(folder, len(reference), inside, draw, flags)
    losses = finish(folder, len(reference), *flags, "--resume")
    shutil.rmtree(folder)  # its checkpoints
    apart = max(abs(loss - other) for loss, other in zip(losses, reference))
    return {**death, "bit-equal": losses == reference, "apart": apart}


def main(arguments: List[str]) -> int:
    """Run all trials; 1 if one of them differs but must not."""
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(prog="kills")
    parser.add_argument("out", type=Path)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--default", action="store_true", help="the run is not deterministic")
    asked, flags = parser.parse_args(arguments[:split]), arguments[split + 1 :] or list(ON_CPU)
    flags = [flag for flag in flags if flag != "--deterministic"] + ([] if asked.default else ["--deterministic"])
    draw = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        reference = finish(Path(folder, "whole"), STEPS, *flags)
        trials: List[Dict[str, Any]] = []
        while len(trials) < asked.kills:
            row = trial(Path(folder, str(len(trials))), reference, bool(len(trials) % 2), draw, flags)
            trials.append(row)
            print(row, flush=True)
    inside = sum(bool(row["inside a write"]) for row in trials)
    equal, apart = sum(row["bit-equal"] for row in trials), max((row["apart"] for row in trials), default=0.0)
    result = {"steps": STEPS, "flags": flags, "inside a write": inside, "bit-equal": equal, "apart": apart}
    whole = {**result, "losses": reference, "trials": trials}
    asked.out.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    print(result)
    return 0 if asked.default or equal == len(trials) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
