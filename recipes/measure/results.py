"""Rows of numbers: read and judged, and the committed files of rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

from packaging.version import Version
from pydantic import Field, ValidationError

from recipes.errors import Refusal
from recipes.prove.evidence import Brought, Hardware, fault_of, imported

Row = dict[str, Any]
Number = tuple[float, float, float]  # the median over pairs, and the ends of its 95 % interval
FEWEST = 5  # the fewest samples for which a number has an interval
PICTURES = ("block", "ablation", "crossover", "scaling")  # those of docs/status/numbers.md


class Run(Brought):
    """The row that precedes the rows of one run."""

    shard: str
    target: str
    releases: dict[str, str]
    machine: Hardware
    limits: dict[str, float]


class Lost(Brought):
    """A row, or an arm of a row, without a number."""

    error: str


class Timed(Brought):
    """An arm with numbers; times in ms."""

    precision: str
    ms: float
    gpu_ms: float
    samples_ms: list[float]
    state_mib: float


class Cell(Brought):
    """A row of numbers."""

    key: Annotated[str, Field(pattern="^(scaling|linear|block|ablation|models|operators)/")]
    facts: dict[str, Any]
    quick: bool
    arms: dict[str, Timed | Lost]


def room(name: str) -> ModuleType:
    """A module of this checkout's smoke_tests/bench/ that needs the standard library only: rows, recommend."""
    return imported(f"bench.{name}")


def read(path: Path) -> tuple[list[Row], list[Row]]:
    """The runs in a file of rows, and the last row of each cell, judged, with its "run"; refused if there is none."""
    rows = room("rows")
    try:
        measured = rows.read(path)
        for row in measured:
            (Run if row["key"] == "shard" else Cell if "arms" in row else Lost).model_validate(row)
        cells = list(rows.latest(measured).values())
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        fault = fault_of(error) if isinstance(error, ValidationError) else repr(error)
        raise Refusal(f"{path} is not a file of rows ({fault}): bring the rows.jsonl of a run.") from None
    if not cells:
        raise Refusal(f'{path} holds no measured row: run `nox -s "bench(TARGET)"` first.')
    runs = {row["shard"]: row for row in measured if row["key"] == "shard"}
    used = {row["shard"] for row in cells}
    return [run for shard, run in runs.items() if shard in used], [{**row, "run": runs[row["shard"]]} for row in cells]


def without_verdict(row: Row) -> Row:
    """A row as it was measured, without the verdict, which is made each time the row is read."""
    if "arms" not in row:
        return row
    verdict = ("invalid", "launch_bound")
    arms = {name: {key: value for key, value in arm.items() if key not in verdict} for name, arm in row["arms"].items()}
    return {**without_run(row), "arms": arms}


def without_run(row: Row) -> Row:
    """A row without its run, as files contain them."""
    return {key: value for key, value in row.items() if key != "run"}


def committed_path(root: Path, target: str, machine: str) -> Path:
    return root / "smoke_tests" / "evidence" / "bench" / f"{target}--{machine}.jsonl"


def committed(root: Path) -> list[Path]:
    """The committed rows, one file per target and hardware."""
    return sorted((root / "smoke_tests" / "evidence" / "bench").glob("*.jsonl"))


def newest_committed(root: Path) -> Path:
    """The committed rows of a GPU with a sweep of Linear layers, from the newest torch; refused unless it is one."""
    by_torch: dict[Version, list[Path]] = {}
    for path in committed(root):
        runs, cells = read(path)
        if runs[0]["machine"].get("gpus") and of(cells, "linear/sweep/"):
            by_torch.setdefault(Version(Version(runs[0]["releases"]["torch"]).public), []).append(path)
    newest = by_torch[max(by_torch)] if by_torch else []
    if len(newest) != 1:
        names = ", ".join(path.name for path in newest) or "none"
        raise Refusal(
            f"No single file of rows has the newest torch's sweep of Linear layers ({names}): name one with --rows."
        )
    return newest[0]


def measured_runs(cells: Iterable[Row]) -> Iterator[tuple[str, str, str]]:
    """The runs of recipes/runs.toml that were measured unchanged: cell, name, fastest speeds by precision, GPUs."""
    for row in of(cells, "scaling/"):
        as_described = [arm for arm in valid(row).values() if not arm["recomputed"] and not arm["more"]]
        for name in dict.fromkeys(arm["run"] for arm in as_described):
            speeds: dict[str, float] = {}
            for arm in as_described:
                if arm["run"] == name:
                    speeds[arm["precision"]] = max(speeds.get(arm["precision"], 0.0), arm["tokens_per_second"])
            listed = ", ".join(f"{precision} {speed:,.0f}" for precision, speed in speeds.items())
            yield row["key"], name, f"{listed}: {row['facts']['gpus']} × {row['run']['machine']['name']}"


def valid(row: Mapping[str, Any]) -> dict[str, Row]:
    """The arms of a row that were measured and break no limit."""
    return {name: arm for name, arm in row["arms"].items() if "ms" in arm and not arm["invalid"]}


# --- derived numbers ---


def of(cells: Iterable[Row], prefix: str) -> list[Row]:
    return [row for row in cells if row["key"].startswith(prefix)]


def share(arm: Row, row: Row) -> float | None:
    """The share of its ceiling that an arm reaches; None without a ceiling, or if launches set the GPU's time."""
    if arm["launch_bound"] and arm["gpu_ms"] >= arm.get("host_ms", 0.0):
        return None
    limits = row["run"]["limits"]
    if "bytes" in arm:
        return float(arm["bytes_per_second"] / limits["copy"])
    ceiling = limits.get(arm["precision"])
    return float(arm["flops_per_second"] / ceiling) if ceiling and "flops_per_second" in arm else None


def shares(row: Row) -> dict[str, float]:
    """Arm -> the share of its ceiling that it reaches, for the valid arms that have one."""
    shares = {name: share(arm, row) for name, arm in valid(row).items()}
    return {name: reached for name, reached in shares.items() if reached is not None}


def waited(arm: Row) -> list[float]:
    """What a user waits for in each call, ms: the longer of GPU and host time."""
    gpu: list[float] = arm["samples_ms"]
    return [max(pair) for pair in zip(gpu, arm.get("host_samples_ms", gpu), strict=True)]


def times(base: Row, arm: Row) -> Number:
    """How many times as fast an arm is as another arm of its cell, pair by pair."""
    number: Number = room("rows").ratio(waited(base), waited(arm))
    return number


# FLOP per token by convention, as rows name them: the one shown first; all parameters (nanoGPT's and the article's).
COUNTS = ("without input embedding", "nanogpt", "causal, products only")


def mfu_of(arm: Row, row: Row, count: str) -> float:
    """Model FLOP/s, by a count, over the bf16 peak: the datasheet's, or else the measured one."""
    peak = imported("hardware").PEAK.get(row["run"]["machine"]["name"], row["run"]["limits"]["bf16"])
    return float(row["facts"][count] * row["facts"]["tokens"] / arm["ms"] * 1e3 / peak)


def mfu(arm: Row, row: Row, *counts: str) -> str:
    return " / ".join(f"{mfu_of(arm, row, count):.1%}" for count in counts)
