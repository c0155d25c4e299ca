"""Does a run survive SIGKILL? `python -m training.kills OUT.json [--kills 20]`, from smoke_tests/.

A deterministic run is killed at a random moment and resumed to its end, again and again; its losses have to be those
of the run that nobody killed, to the last bit. Every other kill waits for a checkpoint that is being written.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, List

from training.checkpoint import PARTIAL, newest
from training.pretrain import read_log

STEPS = 40
ROOM = Path(__file__).resolve().parents[1]


def command(out: Path, steps: int, *more: str) -> List[str]:
    """The run: tiny, deterministic, a checkpoint every other step."""
    flags = ["--model", "tiny", "--precision", "torchao.tensorwise", "--deterministic", "--device", "cpu"]
    flags += ["--steps", str(steps), "--checkpoint-every", "2", "--out", str(out), *more]
    return [sys.executable, "-m", "training.pretrain", *flags]


def finish(out: Path, steps: int, *more: str) -> List[float]:
    """Run to the end; the losses, one per step."""
    code = subprocess.call(command(out, steps, *more), cwd=str(ROOM), stdout=subprocess.DEVNULL)
    assert code == 0, f"a run that nobody killed ended with {code}"
    rows = read_log(out / "log.jsonl")
    assert [row["step"] for row in rows] == list(range(steps)), "the log has not each step once"
    return [row["loss"] for row in rows]


def killed(out: Path, steps: int, inside: bool, draw: random.Random) -> Dict[str, Any]:
    """Start a run and kill it; when that was, after which step, and whether a checkpoint was being written.

    inside: wait for one of the checkpoints to be begun; otherwise for a random time after the first.
    """
    process = subprocess.Popen(command(out, steps), cwd=str(ROOM), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    began = time.monotonic()
    wanted = draw.randrange(2, steps - 2)
    while process.poll() is None and (newest(out) is None or (inside and len(read_log(out / "log.jsonl")) < wanted)):
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


def trial(folder: Path, reference: List[float], inside: bool, draw: random.Random) -> Dict[str, Any]:
    """Kill a run, resume it, and compare."""
    death = killed(folder, len(reference), inside, draw)
    losses = finish(folder, len(reference), "--resume")
    return {**death, "bit-equal": losses == reference}


def main(arguments: List[str]) -> int:
    """All trials; 1 if one of them differs."""
    parser = argparse.ArgumentParser(prog="kills")
    parser.add_argument("out", type=Path)
    parser.add_argument("--kills", type=int, default=20)
    asked = parser.parse_args(arguments)
    draw = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        reference = finish(Path(folder, "whole"), STEPS)
        trials: List[Dict[str, Any]] = []
        while len(trials) < asked.kills:
            row = trial(Path(folder, str(len(trials))), reference, bool(len(trials) % 2), draw)
            trials.append(row)
            print(row, flush=True)
    inside = sum(bool(row["inside a write"]) for row in trials)
    result = {"steps": STEPS, "inside a write": inside, "bit-equal": sum(row["bit-equal"] for row in trials)}
    whole = {**result, "losses": reference, "trials": trials}
    asked.out.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    print(result)
    return 0 if result["bit-equal"] == len(trials) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
