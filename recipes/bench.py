"""Numbers: measure in a target's environment, keep the rows, and show them in one page.

smoke_tests/bench/ measures, inside the environment; here its rows become report.html (with rows.csv and rows.json
beside it), evidence to be committed, and the pictures of docs/status/numbers.md.
"""

from __future__ import annotations

import ast
import csv
import io
import json
import re
import statistics
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, NamedTuple

from packaging.version import Version
from pydantic import Field, ValidationError
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from recipes import environment
from recipes.cache import write_text
from recipes.evidence import Brought, Hardware, fault_of, imported, watched
from recipes.model import Refusal
from recipes.plan import Plan
from recipes.process import group
from recipes.progress import console, say

Row = dict[str, Any]
Number = tuple[float, float, float]  # the median over pairs, and the ends of its interval of 95 %
FEWEST = 5  # samples from which on they have an interval
LAUNCHES = ("eager", "graph", "compiled", "compiled graph")
PICTURES = ("block", "ablation", "crossover", "scaling")  # those of docs/status/numbers.md


class Run(Brought):
    """The row that heads those of one run."""

    shard: str
    target: str
    releases: dict[str, str]
    machine: Hardware
    limits: dict[str, float]


class Lost(Brought):
    """A row, or an arm of one, of which there is no number."""

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


def measure(plan: Plan, env: Path, only: list[str], seconds: float | None, quick: bool) -> Path:
    """Measure what is missing in build/TARGET/bench/rows.jsonl, show how far it is, and return that file."""
    out, command = _command(plan, env, only, quick)
    command += ["--seconds", str(seconds)] if seconds is not None else []
    last = ""
    columns = (TextColumn("bench"), BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn())
    shown = Progress(*columns, TextColumn("{task.description}", markup=False), console=console, transient=True)
    folder = plan.root / "smoke_tests"
    with shown, group(command, folder, environment.run_variables(plan.target, env)) as process:
        task = shown.add_task("", total=None)
        assert process.stdout
        for line in process.stdout:
            last = line.rstrip() or last
            if done := re.match(r"\[(\d+)/(\d+)\] (.*), (about .* left)$", last):
                shown.update(task, completed=int(done[1]), total=int(done[2]), description=done[4])
            say(last)
        code = process.wait()
    if code == 130:
        raise KeyboardInterrupt
    if code not in (0, 4):  # 4: the time was over
        raise _refused(plan, last, code)
    return out


def listed(plan: Plan, env: Path, only: list[str], quick: bool) -> int:
    """Show the cells that this machine can measure, and which of them are there."""
    _, command = _command(plan, env, only, quick)
    code, said = watched([*command, "--list"], plan.root / "smoke_tests", environment.run_variables(plan.target, env))
    if code:
        raise _refused(plan, (said.splitlines() or [""])[-1], code)
    return 0


def _command(plan: Plan, env: Path, only: list[str], quick: bool) -> tuple[Path, list[str]]:
    """The file of rows, and what measures into it."""
    out = folder_of(plan) / "rows.jsonl"
    command = [str(environment.python_of(env)), "-m", "bench", "--out", str(out)]
    return out, [*command, *(text for key in only for text in ("--only", key)), *(["--quick"] if quick else [])]


def _refused(plan: Plan, last: str, code: int) -> Refusal:
    said = last.removeprefix("bench: ") if last.startswith("bench: ") else f"measuring ended with code {code}."
    return Refusal(f"{plan.target.name}: {said}")


def folder_of(plan: Plan) -> Path:
    """Where a target's rows and report are, of this checkout."""
    return environment.folder(plan.root, plan.target) / "bench"


def read(path: Path) -> tuple[list[Row], list[Row]]:
    """The runs that a file of rows tells of, and the last row of each cell, judged, with its "run"; refused without."""
    rows = room("rows")
    try:
        found = rows.read(path)
        for row in found:
            (Run if row["key"] == "shard" else Cell if "arms" in row else Lost).model_validate(row)
        cells = list(rows.latest(found).values())
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        said = fault_of(error) if isinstance(error, ValidationError) else repr(error)
        raise Refusal(f"{path} is no file of rows ({said}): bring the rows.jsonl of a run.") from None
    if not cells:
        raise Refusal(f'{path} holds no measured row: run `nox -s "bench(TARGET)"` first.')
    runs = {row["shard"]: row for row in found if row["key"] == "shard"}
    used = {row["shard"] for row in cells}
    return [run for shard, run in runs.items() if shard in used], [{**row, "run": runs[row["shard"]]} for row in cells]


def promote(plan: Plan, path: Path) -> list[Path]:
    """Keep the last row of each cell in smoke_tests/evidence/bench/, with the pictures of docs/status/numbers.md.

    What is there of the same releases stays, but for the cells that are brought again.
    """
    from recipes import charts

    runs, cells = _read_of(plan, path)
    names = sorted({run["machine"]["name"] for run in runs})
    if len(names) > 1:
        raise Refusal(f"{path} holds rows of {' and '.join(names)}: bring those of one machine.")
    cells = [row for row in cells if not row["quick"]]
    if not cells:
        raise Refusal(f"{path} holds rows of --quick only: run without it.")
    final = committed_path(plan.root, plan.target.name, names[0])
    releases = cells[-1]["run"]["releases"]
    before = read(final)[1] if final.exists() else []
    merged = {row["key"]: row for row in [*before, *cells] if row["run"]["releases"] == releases}
    cells = list(merged.values())
    heads = {row["run"]["shard"]: row["run"] for row in cells}
    kept = [*heads.values(), *cells]
    write_text(final, "".join(json.dumps(without_verdict(row)) + "\n" for row in kept))
    written = [final]
    for name in PICTURES:
        place = final.with_name(f"{final.stem}-{name}.svg")
        if picture := charts.picture(name, cells):
            write_text(place, picture)
            written.append(place)
        else:
            place.unlink(missing_ok=True)
    return [path.relative_to(plan.root) for path in written]


def _read_of(plan: Plan, path: Path) -> tuple[list[Row], list[Row]]:
    """What `read` gives; refused where it is another target's."""
    runs, cells = read(path)
    if others := sorted({run["target"] for run in runs} - {plan.target.name}):
        raise Refusal(f"{path} holds rows of {others[0]}: bring those of {plan.target.name}.")
    return runs, cells


def without_verdict(row: Row) -> Row:
    """A row as it was measured: the verdict is made of it anew each time it is read."""
    if "arms" not in row:
        return row
    verdict = ("invalid", "launch_bound")
    arms = {name: {key: value for key, value in arm.items() if key not in verdict} for name, arm in row["arms"].items()}
    return {**without_run(row), "arms": arms}


def without_run(row: Row) -> Row:
    """A row beside its run, not with it, as files hold them."""
    return {key: value for key, value in row.items() if key != "run"}


def committed_path(root: Path, target: str, machine: str) -> Path:
    return root / "smoke_tests" / "evidence" / "bench" / f"{target}--{machine}.jsonl"


def committed(root: Path) -> list[Path]:
    """The kept rows, one file per target and hardware."""
    return sorted((root / "smoke_tests" / "evidence" / "bench").glob("*.jsonl"))


def newest_committed(root: Path) -> Path:
    """The committed rows of a GPU with a sweep of Linear layers, of the newest torch; refused where that is not one."""
    found: dict[Version, list[Path]] = {}
    for path in committed(root):
        runs, cells = read(path)
        if runs[0]["machine"].get("gpus") and of(cells, "linear/sweep/"):
            found.setdefault(Version(Version(runs[0]["releases"]["torch"]).public), []).append(path)
    newest = found[max(found)] if found else []
    if len(newest) != 1:
        names = ", ".join(path.name for path in newest) or "none"
        raise Refusal(
            f"No single file of rows has the newest torch's sweep of Linear layers ({names}): name one with --rows."
        )
    return newest[0]


def recommend(root: Path, config: str, rows: Path, tokens: int, package: str, launch: str, head: bool) -> Row:
    """What `recommend` says of a config.json, or of a model that smoke_tests/training/models.py names."""
    module = room("recommend")
    _, cells = read(rows)
    models = shapes(root)
    if tokens < 1:
        raise Refusal(f"--tokens {tokens} is no batch: name how many tokens a layer sees at once.")
    arm = module.arm_of(package, launch)
    measured = {name for row in of(cells, "linear/") for name, one in valid(row).items() if one["precision"] == "fp8"}
    if arm not in measured:
        named = ", ".join(sorted(measured)) or "none"
        raise Refusal(
            f"{rows} has no Linear layer in FP8 by {arm!r} (there are: {named}): choose --package, --launch or --rows."
        )
    try:
        if config in models:
            layers = module.layers_of_shape(*models[config])
        else:
            layers = module.layers_of(json.loads(Path(config).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, ArithmeticError, RecursionError) as error:
        raise Refusal(
            f"{config} cannot be used ({error}): give a Llama-like model's config.json, or one of {', '.join(models)}."
        ) from None
    answer: Row = module.recommend(cells, layers, tokens, package, launch, head)
    return {"model": Path(config).name, "rows": rows.name, **answer}


def shapes(root: Path) -> dict[str, list[int]]:
    """The sizes of each model of smoke_tests/training/models.py, which this one cannot import; not "tiny"."""
    tree = ast.parse((root / "smoke_tests" / "training" / "models.py").read_text(encoding="utf-8"))
    (models,) = [
        part.value for part in tree.body if isinstance(part, ast.AnnAssign) and "MODELS" in ast.dump(part.target)
    ]
    assert isinstance(models, ast.Dict)
    found = {}
    for name, model in zip(models.keys, models.values, strict=True):
        assert isinstance(name, ast.Constant)
        assert isinstance(model, ast.Call)
        shape = model.args[0]
        assert isinstance(shape, ast.Call)
        if shape.args:
            found[str(name.value)] = [ast.literal_eval(size) for size in shape.args]
    return found


def table(cells: Iterable[Row]) -> str:
    """All numbers as CSV, one line per arm."""
    lines = []
    for row in cells:
        for name, arm in row["arms"].items():
            plain = {key: value for key, value in arm.items() if not isinstance(value, list)}
            invalid = "; ".join(arm["invalid"])
            lines.append({"key": row["key"], "arm": name, **plain, "invalid": invalid, **row.get("facts", {})})
    fields = list(dict.fromkeys(field for line in lines for field in line))
    text = io.StringIO()
    writer = csv.DictWriter(text, fields, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def report(plan: Plan, path: Path) -> Path:
    """Write report.html, rows.csv and rows.json of a file of rows to build/TARGET/bench/, wherever that file is."""
    from recipes import charts

    runs, cells = _read_of(plan, path)
    page = folder_of(plan) / "report.html"
    known = {row["key"] for row in cells}
    failed = {row["key"]: row["error"] for row in room("rows").read(path) if "error" in row and row["key"] not in known}
    write_text(page, charts.page(plan.root, runs, cells, failed))
    write_text(page.with_name("rows.csv"), table(cells))
    told = {"runs": runs, "cells": [without_run(row) for row in cells]}
    write_text(page.with_name("rows.json"), json.dumps(told, indent=1))
    return page


def text(root: Path) -> str:
    """The block of docs/status/numbers.md: the goals and the pictures of each committed file of rows."""
    parts = []
    for path in committed(root):
        runs, cells = read(path)
        place = path.relative_to(root)
        parts.append(f"## `{runs[0]['target']}` on {runs[0]['machine']['name']}\n\n[All rows]({place})")
        missing = {row["key"] for row in cells if row.get("unfinished")}  # some arms of it
        header = "| Goal | At least | Measured (95 %, samples) | Arm | Cell | Of all alike |"
        lines = [header, "|---|---|---|---|---|---|"]
        wanted = goals(cells)
        for goal in wanted:
            if goal["key"]:
                unfinished = ", unfinished" if goal["key"] in missing else ""
                by = f"{goal['found']} | {goal['arm']} | `{goal['key']}`{unfinished} | {goal['grid']}"
                lines.append(f"| {goal['goal']} | {goal['least']:g} | {by} |")
        parts.append("\n".join(lines))
        parts += [f"Not measured: {goal['goal']} ({goal['arm']})." for goal in wanted if not goal["key"]]
        parts += [
            f"Not reached: {goal['goal']}. Longest kernels, in ms, {goal['profile']}."
            for goal in wanted
            if goal["profile"]
        ]
        for name in PICTURES:
            picture = place.with_name(f"{place.stem}-{name}.svg")
            if (root / picture).exists():
                parts.append(f"![{name}]({picture})")
    return "\n\n".join(parts) or 'Nothing measured on a GPU is committed yet: `nox -s "bench(TARGET)"` measures.'


def measured_runs(root: Path) -> dict[str, str]:
    """The runs of recipes/runs.toml that were measured as they are: name -> the fastest by precision, on which GPUs."""
    found: dict[str, str] = {}
    for path in committed(root):
        for row in of(read(path)[1], "scaling/"):
            as_described = [arm for arm in valid(row).values() if not arm["recomputed"] and not arm["more"]]
            for name in dict.fromkeys(arm["run"] for arm in as_described):
                speeds: dict[str, float] = {}
                for arm in as_described:
                    if arm["run"] == name:
                        speeds[arm["precision"]] = max(speeds.get(arm["precision"], 0.0), arm["tokens_per_second"])
                told = ", ".join(f"{precision} {speed:,.0f}" for precision, speed in speeds.items())
                where = f"{told}: {row['facts']['gpus']} × {row['run']['machine']['name']}"
                found[name] = f"{found[name]}; {where}" if name in found else where
    return found


def valid(row: Mapping[str, Any]) -> dict[str, Row]:
    """The arms of a row that were measured and break no limit."""
    return {name: arm for name, arm in row["arms"].items() if "ms" in arm and not arm["invalid"]}


# --- what the numbers come to ---


def of(cells: Iterable[Row], prefix: str) -> list[Row]:
    return [row for row in cells if row["key"].startswith(prefix)]


def share(arm: Row, row: Row) -> float | None:
    """How much of its ceiling an arm reaches; None without one, or where the GPU's time is that of the launches."""
    if arm["launch_bound"] and arm["gpu_ms"] >= arm.get("host_ms", 0.0):
        return None
    limits = row["run"]["limits"]
    if "bytes" in arm:
        return float(arm["bytes_per_second"] / limits["copy"])
    ceiling = limits.get(arm["precision"])
    return float(arm["flops_per_second"] / ceiling) if ceiling and "flops_per_second" in arm else None


def shares(row: Row) -> dict[str, float]:
    """Arm -> how much of its ceiling it reaches, of the valid ones for which that can be told."""
    found = {name: share(arm, row) for name, arm in valid(row).items()}
    return {name: reached for name, reached in found.items() if reached is not None}


class Goal(NamedTuple):
    """A number that was asked for, and the one cell and arm that answer it, fixed before they are measured.

    of: "time" or "memory" (how many times as fast as `over`, or as little), "mfu" by the count of COUNTS[0], "copy" (a
    share of the copy's speed). over: the arm that it is compared with, else its base. grid: patterns of the cells and
    the arms that are like it, of which the median is shown and how many reach the goal.
    """

    says: str
    least: float
    cell: str
    arm: str
    of: str = "time"
    over: str = ""
    grid: tuple[str, str] = ("", "")


STEP = "a step of the 1.26B model"
NAIVE = "fused over naive, 2 sequences at once in both; fused has bf16 weights and residuals too, naive float32 weights"
STEPS = ("ablation/step/*", "fused* 2")
SEVERAL = (
    Goal("FP8 (weights gathered in it) over bf16, the 8B model, sharded", 1.28, "scaling/fsdp/8B/4", "fp8 gathered"),
    Goal(
        "the same, nothing recomputed in either", 1.28, "scaling/fsdp/8B/4", "fp8 gathered, nothing recomputed",
        over="bf16, nothing recomputed",
    ),
    Goal("two pipeline stages over sharding alone, the 8B model in bf16", 1.0, "scaling/layouts/8B/4", "pp2"),
    Goal("memory of sharding alone over that of two pipeline stages", 1.25, "scaling/layouts/8B/4", "pp2", "memory"),
)  # fmt: skip
SINGLE = (
    Goal(
        "FP8 over bf16, a Linear of 16384 × 8192 × 8192", 1.65, "linear/seed/large/both",
        "transformer-engine.delayed graph",
    ),
    # The block of Transformer Engine's quickstart, by which the article measured.
    Goal("FP8 over bf16, one block", 1.65, "block/core/6.7B/2048x4", "fp8 graph", grid=("block/*", "fp8*")),
    Goal(f"{STEP} in bf16, MFU by torchtitan's count", 0.6, "ablation/step/te", "fused te graph 8", "mfu"),
    Goal(f"`pretrain`: {STEP} in bf16, the same", 0.6, "ablation/step/pretrain-bf16", "pretrain bf16 8", "mfu"),
    Goal(f"time of {STEP}, {NAIVE}", 4.0, "ablation/step/te", "fused te graph 2", over="naive 2", grid=STEPS),
    Goal("memory of the same arm", 3.0, "ablation/step/te", "fused te graph 2", "memory", "naive 2", STEPS),
    Goal(f"FP8 over fused bf16, {STEP}", 1.15, "ablation/step/te-fp8", "fp8 te.delayed graph 8"),
    Goal("`pretrain` in bf16 over `bench`'s own step", 1.0, "ablation/step/pretrain-bf16", "pretrain bf16 8"),
    Goal("`pretrain` in FP8 over `bench`'s own step", 1.0, "ablation/step/pretrain-fp8", "pretrain fp8 8"),
    *(
        Goal(
            f"{name} forward, share of the copy", 0.85, f"operators/{name}/{size}/forward", "flash-attn", "copy",
            grid=(f"operators/{name}/*/forward", "*"),
        )
        for name, size in (
            ("rms_norm", "16384x2048"), ("swiglu", "16384x5632"), ("rope", "8x32x2048x64"),
            ("cross_entropy", "8192x64320"),
        )
    ),
)  # fmt: skip


def goals(cells: list[Row]) -> list[Row]:
    """What a large GPU, or four, should reach, and what the arm that was named for it does; "key" is "" without.

    "profile" says of one that was not reached where the arm's time went, as far as its row tells.
    """
    if not cells[0]["run"]["machine"]["gpus"]:
        return []
    several = of(cells, "scaling/")
    wanted = [*(SEVERAL if several else ()), *(SINGLE if len(cells) > len(several) else ())]
    shown = [_shown(goal, cells) for goal in wanted]
    return shown + (_least_gain(cells) if len(cells) > len(several) else [])


def _shown(goal: Goal, cells: list[Row]) -> Row:
    """A goal beside its number."""
    row = next((row for row in cells if row["key"] == goal.cell), None)
    number = measured(goal, row, goal.arm) if row else None
    line = {"goal": goal.says, "least": goal.least, "arm": goal.arm + (f" over {goal.over}" if goal.over else "")}
    if not row or not number:
        return {**line, "key": "", "found": "not measured", "met": None, "grid": "", "profile": ""}
    arm = row["arms"][goal.arm]
    words, met = verdict(number, goal.least, len(arm["samples_ms"]), exact=goal.of == "memory")
    words += f" ({mfu(arm, row, COUNTS[1])} by nanoGPT's count)" if goal.of == "mfu" else ""
    profile = _profile(arm) if met is False else ""
    return {**line, "key": goal.cell, "found": words, "met": met, "grid": _grid(goal, cells), "profile": profile}


def measured(goal: Goal, row: Row, name: str) -> Number | None:
    """What an arm of a row has for a goal, with its interval; None without."""
    arms = valid(row)
    arm = arms.get(name)
    if arm is None:
        return None
    base = arms.get(goal.over or arm.get("base", ""))
    if goal.of in ("mfu", "copy"):
        value = mfu_of(arm, row, COUNTS[0]) if goal.of == "mfu" else share(arm, row)
        ms, samples = (arm["ms"], waited(arm)) if goal.of == "mfu" else (arm["gpu_ms"], arm["samples_ms"])
        _, low, high = room("rows").ratio([ms] * len(samples), samples)
        return None if value is None else (value, value * low, value * high)
    if base is None:
        return None
    if goal.of == "memory":
        held, less = (side["state_mib"] + side.get("peak_mib", 0) for side in (base, arm))
        return held / less, held / less, held / less
    return times(base, arm) if goal.over else (arm["ratio"], arm["low"], arm["high"])


def verdict(number: Number, least: float, samples: int, exact: bool = False) -> tuple[str, bool | None]:
    """A number with its interval, in words, and whether it reaches a bound; None where that is not told apart."""
    value, low, high = number
    if exact:
        return (f"**{value:.3g}**", True) if value >= least else (f"{value:.3g}, not reached", False)
    if samples < FEWEST:
        return f"{value:.3g} ({samples} samples: no interval), not told apart", None
    words = f"{value:.3g} ({low:.3g} to {high:.3g}, {samples})"
    met = True if low >= least else False if high < least else None
    return f"**{words}**" if met else words + (", not told apart" if met is None else ", not reached"), met


def _grid(goal: Goal, cells: list[Row]) -> str:
    """The median of all cells and arms that are like a goal's, and how many reach it."""
    keys, names = goal.grid
    alike = [(row, name) for row in cells if fnmatch(row["key"], keys) for name in valid(row) if fnmatch(name, names)]
    values = [number[0] for row, name in alike if (number := measured(goal, row, name))]
    if not values:
        return ""
    reached = sum(value >= goal.least for value in values)
    return f"median {statistics.median(values):.3g}, {reached} of {len(values)} reach it"


def waited(arm: Row) -> list[float]:
    """What a user waits for in each call, ms: the longer of GPU and host time."""
    gpu: list[float] = arm["samples_ms"]
    return [max(pair) for pair in zip(gpu, arm.get("host_samples_ms", gpu), strict=True)]


def times(base: Row, arm: Row) -> Number:
    """How many times as fast as another arm of its cell an arm is, pair by pair."""
    number: Number = room("rows").ratio(waited(base), waited(arm))
    return number


def _profile(arm: Row) -> str:
    """Where a call's time on the GPU went: the kernels that took longest, 1 % and more, as a profiler saw one call."""
    if not arm.get("kernels"):
        return ""
    longest = ", ".join(f"`{name}` {ms:.3g}" for name, ms in arm["kernels"] if ms >= 0.01 * arm["gpu_ms"])
    moved = " for {:.3g} GB".format(arm["bytes"] / 1e9) if "bytes" in arm else ""
    return f"of {arm['gpu_ms']:.3g} ms{moved} on the GPU: {longest}"


def _least_gain(cells: list[Row]) -> list[Row]:
    """FP8 over bf16 in the graphed block that gains least of those with a layer that `recommend` gives to FP8."""
    gains, recommend = [], room("recommend").recommend
    for row in of(cells, "block/"):
        wide, tokens = row["facts"]["hidden"], row["facts"]["length"] * row["facts"]["batch"]
        layers = {"qkv": (wide, 3 * wide), "output": (wide, wide), "up": (wide, 4 * wide), "down": (4 * wide, wide)}
        answer = recommend(cells, layers, tokens, "transformer-engine.delayed", "graph")
        if "fp8 graph" in valid(row) and any(layer["fp8"] for layer in answer["layers"].values()):
            gains.append((row["arms"]["fp8 graph"]["ratio"], row["key"]))
    if not gains:
        return []
    least = "the least that a graphed block gains where `recommend` gives FP8 a layer of it"
    goal = Goal(least, 0.97, min(gains)[1], "fp8 graph")
    return [{**_shown(goal, cells), "grid": f"the least of {len(gains)}"}]


# FLOP per token by convention, as rows name them: what is shown first; all parameters (nanoGPT's, and the article's).
COUNTS = ("without input embedding", "nanogpt", "causal, products only")
DATASHEET = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "A800": 312e12}  # dense bf16


def mfu_of(arm: Row, row: Row, count: str) -> float:
    """Model FLOP/s, by a count, over the bf16 peak: the datasheet's, or else the measured one."""
    peak = DATASHEET.get(row["run"]["machine"]["name"], row["run"]["limits"]["bf16"])
    return float(row["facts"][count] * row["facts"]["tokens"] / arm["ms"] * 1e3 / peak)


def mfu(arm: Row, row: Row, *counts: str) -> str:
    return " / ".join(f"{mfu_of(arm, row, count):.1%}" for count in counts)
