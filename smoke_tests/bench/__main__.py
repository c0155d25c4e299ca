"""Measure what this machine does with FP8 and fused operators, cell by cell; rows are appended to a file.

    ENV/bin/python -m smoke_tests.bench --out FILE.jsonl [--only linear/seed] [--seconds 400] [--quick] [--list]

A cell whose row is in the file (same machine, same releases) is not run again; one that failed is, after all others.
Ctrl-C keeps what was measured.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Tuple

import torch

from smoke_tests import hardware
from smoke_tests.bench import ablation, block, linear, machine, models, operators, scaling
from smoke_tests.bench.method import QUICK, Cell, Effort, Timer, measure, one_line
from smoke_tests.bench.rows import Row, append, judge, read

SECTIONS = (scaling, linear, block, ablation, models, operators)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m smoke_tests.bench", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="rows are appended to this file")
    parser.add_argument(
        "--only", action="append", default=[], metavar="KEY", help="cells whose key starts so, in this order"
    )
    parser.add_argument("--seconds", type=float, help="start no cell that would not end within this time")
    parser.add_argument("--quick", action="store_true", help="few cells, 10 pairs each: under 3 minutes")
    parser.add_argument("--list", action="store_true", help="list the cells and what is known of them, run none")
    described = Path(sys.prefix, "fusebox", "manifest.json")
    parser.add_argument("--manifest", type=Path, default=described, help="what the environment is made of")
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a process started in the background would ignore Ctrl-C
    start = time.monotonic()
    try:
        return run(options, start)
    except Refused as refused:
        print(f"bench: {refused}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("bench: stopped; what was measured is kept, run again to go on.", file=sys.stderr)
        return 130


class Refused(Exception):
    """One sentence: why nothing is measured."""


def run(options: argparse.Namespace, start: float) -> int:
    """Measure the selected cells that are missing; 0 if none is left, 4 if the time was over before that."""
    try:
        described = machine.manifest(options.manifest)
        cuda, _ = described["cuda"] != "none", machine.releases(described)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Refused(
            f"{options.manifest} cannot be read ({one_line(error)}): run inside a target's environment."
        ) from None
    if cuda and not torch.cuda.is_available():
        raise Refused(f"{described['target']} needs a GPU, and torch sees none here: run on a machine with one.")
    every = cells(described, cuda, options.quick)
    chosen = [cell for start in options.only or [""] for cell in every if cell.key.startswith(start)]
    chosen = list({cell.key: cell for cell in chosen}.values())
    if not chosen:
        raise Refused(f"no cell starts with {' or '.join(options.only)}: --list shows their keys.")
    known = of_this_machine(read(options.out), described, options.quick)
    failed = [cell for cell in chosen if failures(known.get(cell.key, {}), cell)]
    missing = [cell for cell in chosen if cell not in failed and not whole(known.get(cell.key, {}), cell)] + failed
    if options.list:
        for cell in chosen:
            print(f"{'to run' if cell in missing else 'there':<8}{cell.key}  {cell.seconds:.0f} s, {cell.gib:.0f} GiB")
        return 0
    if cuda and missing:
        occupied = machine.busy(torch.cuda.device_count() if any(cell.jobs for cell in missing) else 1)
        if occupied:
            raise Refused(occupied)
    return measured(missing, known, described, options, start) if missing else 0


def cells(described: Dict[str, Any], cuda: bool, quick: bool) -> List[Cell]:
    """Every cell that this environment can have, the most telling of each section first."""
    listed = [cell for section in SECTIONS for cell in section.cells(machine.releases(described), cuda, quick)]
    assert len({cell.key for cell in listed}) == len(listed), "two cells have one key"
    return listed


def of_this_machine(rows: List[Row], described: Dict[str, Any], quick: bool) -> Dict[str, Row]:
    """The last row of each cell that was made here, with these releases."""
    name = hardware.probe().name(described["cuda"] != "none")
    same = (name, machine.releases(described))
    shards = {
        row["shard"] for row in rows if row["key"] == "shard" and (row["machine"]["name"], row["releases"]) == same
    }
    return {row["key"]: row for row in rows if row["shard"] in shards and (quick or not row.get("quick"))}


def failures(row: Row, cell: Cell) -> bool:
    """Whether all of a cell was tried and it, or one of its jobs, failed."""
    return "error" in row or (whole(row, cell) and any("error" in row["arms"][name] for name in cell.jobs))


def whole(row: Row, cell: Cell) -> bool:
    """Whether a row is complete: the row of a cell of jobs is written after each job."""
    return bool(row) and all(name in row.get("arms", {}) for name in cell.jobs)


def measured(
    todo: List[Cell], known: Dict[str, Row], described: Dict[str, Any], options: argparse.Namespace, start: float
) -> int:
    """Measure these cells, as many as fit; each is a row and a line."""
    cuda = described["cuda"] != "none"
    if not cuda:
        torch.set_num_threads(1)  # several threads would wait for each other whenever something else runs
    timer, effort = Timer("cuda" if cuda else "cpu"), QUICK if options.quick else Effort()
    say(f"measuring the ceilings of this machine ({len(todo)} cells to do)")
    ceilings = machine.limits(timer, described)
    head = machine.shard(described, ceilings, datetime.datetime.now(datetime.timezone.utc))
    append(options.out, head)
    say("copy {:.4g} GB/s; ".format(ceilings["copy"] / 1e9) + ", ".join(
        f"{name} {value / 1e12:.4g} TFLOP/s" for name, value in ceilings.items() if name != "copy"
    ))  # fmt: skip
    total = torch.cuda.get_device_properties(0).total_memory / 2**30 if cuda else float("inf")
    pace = spent = expected = 0.0
    for number, cell in enumerate(todo, 1):
        pace = max(spent / expected, 0.1) if expected else 1.0
        left = sum(other.seconds for other in todo[number - 1 :]) * pace
        for attempt, seconds in attempts(cell, timer, effort, known.get(cell.key, {}), total):
            if options.seconds and time.monotonic() - start + seconds * pace > options.seconds:
                say(f"the time is over; {len(todo) - number + 1} cells are left: run again to go on.")
                return 4
            begun = time.monotonic()
            row = attempt()
            took = time.monotonic() - begun
            row.update(shard=head["shard"], quick=options.quick, seconds=round(took, 2))
            append(options.out, row)
            spent, expected = spent + took, expected + seconds
        result = f"{summary(row, ceilings)}  {took:.1f} s, about {left / 60:.0f} min left"
        say(f"[{number}/{len(todo)}] {cell.key}  {result}")
        if cuda and broken():
            raise Refused(f"the GPU is in error after {cell.key}: run again, that cell comes last then.")
    return 0


def attempts(
    cell: Cell, timer: Timer, effort: Effort, known: Row, total: float
) -> Iterator[Tuple[Callable[[], Row], float]]:
    """The functions that make the row of a cell, and how long each should take; each job adds to the row."""
    if cell.gib > 0.95 * total:
        yield lambda: {"key": cell.key, "error": f"needs {cell.gib:.0f} GiB, and this GPU has {total:.0f}"}, 0.0
    elif cell.jobs:
        row: Row = {"key": cell.key, "facts": cell.facts, "pairs": 0, "throttled": known.get("throttled", [])}
        arms = known.get("arms", {})
        row["arms"] = {name: arms[name] for name in cell.jobs if "error" not in arms.get(name, {"error": ""})}
        reset(timer.cuda)  # the jobs want the memory
        for name in cell.jobs:
            if name not in row["arms"]:
                yield partial(one_job, row, name, cell), cell.seconds / len(cell.jobs)
    else:
        yield partial(attempt, cell, timer, effort), cell.seconds


def one_job(row: Row, name: str, cell: Cell) -> Row:
    """Run one job and put it into the row; "unfinished" says that others are still to come."""
    try:
        row["arms"][name] = cell.jobs[name]()
    except Exception as error:
        row["arms"][name] = {"error": one_line(error)}
    if cell.compare:
        cell.compare(row["arms"])
    slowed = {text for gpu in range(torch.cuda.device_count()) for text in machine.slowed(gpu)}
    row["throttled"] = sorted({*row["throttled"], *slowed})
    return {**row, **({} if whole(row, cell) else {"unfinished": True})}


def attempt(cell: Cell, timer: Timer, effort: Effort) -> Row:
    """The row of a cell, or the reason why there is none, with the state of the GPU."""
    try:
        row = measure(cell, timer, effort)
    except Exception as error:
        row = {"key": cell.key, "facts": cell.facts, "error": one_line(error)}
    if timer.cuda:
        row["state"] = machine.state()
        row["throttled"] = machine.slowed()
    gc.collect()
    reset(timer.cuda)
    return row


def reset(cuda: bool) -> None:
    """Release what a cell left: compiled code, and the layers that Transformer Engine keeps in a list."""
    if hasattr(torch, "_dynamo"):
        torch._dynamo.reset()
    for name in ("transformer_engine.pytorch.quantization", "transformer_engine.pytorch.fp8"):
        if hasattr(sys.modules.get(name), "FP8GlobalStateManager"):
            sys.modules[name].FP8GlobalStateManager.reset()
            break
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()


def broken() -> bool:
    """Whether the GPU of this process no longer works."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def summary(row: Row, ceilings: Dict[str, float]) -> str:
    """A row for the terminal: the fastest arm, or what is wrong."""
    if "error" in row:
        return str(row["error"])
    arms = judge(row, ceilings)["arms"]
    valid = {name: arm for name, arm in arms.items() if "ms" in arm and not arm["invalid"]}
    bad = "".join(
        f"; {name}: {arm.get('error') or arm['invalid'][0]}" for name, arm in arms.items() if name not in valid
    )
    if not valid:
        return "no arm is valid" + bad
    best = min(valid, key=lambda name: valid[name]["ms"])
    gain = " {ratio:.2f}x ({low:.2f} to {high:.2f}) of {base}".format(**valid[best]) if "ratio" in valid[best] else ""
    bound = ", launch-bound" if valid[best].get("launch_bound") else ""
    return f"{best} {valid[best]['ms']:.4g} ms{gain}{bound}{bad}"


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
