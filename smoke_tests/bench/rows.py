"""Rows of numbers: how they are stored, and which of them are valid. Needs the standard library only."""

from __future__ import annotations

import json
import math
import os
import random
import statistics
from pathlib import Path
from typing import Any, Dict, Iterable, List, Sequence, Tuple

Row = Dict[str, Any]
Limits = Dict[str, float]

HARDWARE = {("fp8", "bf16"): 2.0, ("bf16", "tf32"): 2.0}  # the most that one precision can gain over the other
SLACK = 1.03  # factor allowed above a measured ceiling
LAUNCHED = 0.95  # if launching its kernels takes at least this share of a call's time, the host sets that time
GAPS = 1.15  # a call slower than its CUDA graph by more than this factor leaves the GPU waiting for launches


def append(path: Path, row: Row) -> None:
    """Add a row as one line, in one write, so that a run that is stopped leaves whole rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = not path.exists() or path.read_bytes()[-1:] in (b"\n", b"")
    line = ("" if whole else "\n") + json.dumps(row) + "\n"
    file = os.open(str(path), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)


def read(path: Path) -> List[Row]:
    """Every whole row of a file, in order; a line that a dying machine cut off does not count. No file: no rows."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def latest(rows: Iterable[Row]) -> Dict[str, Row]:
    """The last row of each cell, by key, judged by the limits that its own shard measured."""
    shards: Dict[str, Row] = {}
    cells: Dict[str, Row] = {}
    for row in rows:
        if row["key"] == "shard":
            shards[row["shard"]] = row
        elif "arms" in row and row["shard"] in shards:
            shard = shards[row["shard"]]
            limits = dict(shard["limits"])
            if not shard["machine"].get("gpus"):
                limits.pop("copy", None)  # a CPU's copy also reads what it writes: other work moves bytes faster
            cells.pop(row["key"], None)
            cells[row["key"]] = judge(row, limits)
    return cells


def ratio(base: Sequence[float], arm: Sequence[float]) -> Tuple[float, float, float]:
    """How many times as fast as its base an arm is: the median over pairs, and its 95 % bootstrap interval."""
    pairs = [slow / fast for slow, fast in zip(base, arm)]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(pairs, k=len(pairs))) for _ in range(2000))
    return statistics.median(pairs), medians[49], medians[1949]


def judge(row: Row, limits: Limits) -> Row:
    """The row with each arm's `invalid`: the physical limits and bounds that its numbers break.

    Also `launch_bound`: whether the host, not the GPU, sets its time. It is false for a whole step, where the host may
    also wait for the GPU to accept the next of a thousand launches.

    limits: bytes/s of the measured copy ("copy"), FLOP/s of the measured product of each precision.
    """
    arms: Dict[str, Row] = {name: {**arm, "invalid": []} for name, arm in row["arms"].items()}
    for name, arm in arms.items():
        if "error" not in arm:
            arm["launch_bound"] = not row["key"].startswith("ablation/step/") and _launched(name, arms)
            arm["invalid"] += _broken(arm, limits) + [f"the GPU was {text}" for text in row.get("throttled", [])]
    for arm in arms.values():
        base = arms.get(arm.get("base", ""))
        if base is None or "error" in arm:
            continue
        most = HARDWARE.get((arm["precision"], base["precision"]), math.inf) if arm["comparable"] else math.inf
        if arm["ratio"] > most:
            arm["invalid"].append(
                f"{arm['ratio']:.2f} times its base, where {arm['precision']} is at most {most:g} times "
                f"{base['precision']}"
            )
        if base["invalid"]:
            arm["invalid"].append(f"its base, {arm['base']}, is invalid")
    return {**row, "arms": arms}


def _launched(name: str, arms: Dict[str, Row]) -> bool:
    """Whether the host takes as long as the GPU, or the GPU much longer than for the same work in a CUDA graph."""
    graph = arms.get(f"{name} graph", {}).get("gpu_ms", math.inf)
    gpu = arms[name]["gpu_ms"]
    return bool(arms[name].get("host_ms", 0.0) >= LAUNCHED * gpu or gpu > GAPS * graph)


def _broken(arm: Row, limits: Limits) -> List[str]:
    """The limits that an arm breaks on its own."""
    broken = []
    speed, peak = arm.get("flops_per_second", 0.0), limits.get(arm["precision"], math.inf)
    if speed > SLACK * peak:
        broken.append(
            f"{speed / 1e12:.4g} TFLOP/s, where the measured {arm['precision']} product has {peak / 1e12:.4g}"
        )
    moved, copied = arm.get("bytes_per_second", 0.0), limits.get("copy", math.inf)
    if moved > SLACK * copied:
        broken.append(f"{moved / 1e9:.4g} GB/s, where the measured copy has {copied / 1e9:.4g}")
    if arm["precision"] == "fp8" and not arm["fp8_kernels"]:
        broken.append("no FP8 product kernel ran")
    for error, floor, ceiling in arm["checks"]:
        if not floor <= error <= ceiling:  # NaN is outside
            broken.append(f"relative error {error:.3g}, outside {floor:.3g} to {ceiling:.3g}")
    return broken
