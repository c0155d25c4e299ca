"""The goals of `bench`, each with the one cell and arm that answer it."""

from __future__ import annotations

import statistics
from fnmatch import fnmatch
from typing import NamedTuple

from recipes.measure.results import COUNTS, FEWEST, Number, Row, mfu, mfu_of, of, room, share, times, valid, waited


class Goal(NamedTuple):
    """A goal for a number, and the one cell and arm that answer it; of SEVERAL and SINGLE, chosen before measuring.

    of: "time" or "memory" (how many times as fast as `over`, or as little), "mfu" by the count of COUNTS[0], "copy" (a
    share of the copy's speed), "rate" (TFLOP/s over the GPU's time). over: the arm that it is compared with, else
    its base. grid: patterns of the cells and the arms that are like it, of which the median is shown and how many reach
    the goal.
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
    # The block of Transformer Engine's quickstart, with which the article measured.
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
# Of packages that not every target has. The numbers were set before cu13.2-torch2.15 was measured, the arms afterwards.
OPERATORS = (
    *(
        Goal(
            f"attention{both}, 8,192 tokens, causal, heads of 128, TFLOP/s", least,
            f"operators/attention/2x32x8192x128/{way}", "flash-attn-3", "rate",
            grid=(f"operators/attention/2x32x8192x128/{way}", "*"),
        )
        for way, both, least in (("forward", " forward", 720.0), ("both", " forward and backward", 620.0))
    ),
    *(
        Goal(
            f"cross_entropy{both} by QuACK, share of the copy", least, f"operators/cross_entropy/8192x64320/{way}",
            "quack-kernels", "copy",
        )
        for way, both, least in (("forward", " forward", 0.93), ("both", " forward and backward", 0.9))
    ),
    Goal(
        "linear and cross entropy without stored logits, forward and backward, TFLOP/s", 700.0,
        "operators/linear_cross_entropy/8192x2048x64320/both", "liger-kernel", "rate",
    ),
    *(
        Goal(
            f"{name} forward and backward, share of the copy", 0.93, f"operators/{name}/{size}/both", "flash-attn",
            "copy",
        )
        for name, size in (("rope", "8x32x2048x64"), ("swiglu", "16384x5632"))
    ),
)  # fmt: skip


def answered(cells: list[Row]) -> list[Row]:
    """The goals for one large GPU or four, and what the named arm reaches; "key" is "" if it was not measured.

    For a goal that was not reached, "profile" says where the arm's time went, as far as its row shows that.
    """
    if not cells[0]["run"]["machine"]["gpus"]:
        return []
    several = of(cells, "scaling/")
    packages = {name for row in cells for name in row["run"]["releases"]}
    of_packages = [goal for goal in OPERATORS if goal.arm in packages]
    goals = [*(SEVERAL if several else ()), *((*SINGLE, *of_packages) if len(cells) > len(several) else ())]
    shown = [_shown(goal, cells) for goal in goals]
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
    """The number that an arm of a row has for a goal, with its interval; None if it has none."""
    arms = valid(row)
    arm = arms.get(name)
    if arm is None:
        return None
    base = arms.get(goal.over or arm.get("base", ""))
    if goal.of in ("mfu", "copy", "rate"):
        if goal.of == "rate":
            value = arm["flops_per_second"] / 1e12 if "flops_per_second" in arm else None
        else:
            value = mfu_of(arm, row, COUNTS[0]) if goal.of == "mfu" else share(arm, row)
        ms, samples = (arm["ms"], waited(arm)) if goal.of == "mfu" else (arm["gpu_ms"], arm["samples_ms"])
        _, low, high = room("rows").ratio([ms] * len(samples), samples)
        return None if value is None else (value, value * low, value * high)
    if base is None:
        return None
    if goal.of == "memory":
        more, less = (side["state_mib"] + side.get("peak_mib", 0) for side in (base, arm))
        return more / less, more / less, more / less
    return times(base, arm) if goal.over else (arm["ratio"], arm["low"], arm["high"])


def verdict(number: Number, least: float, samples: int, exact: bool = False) -> tuple[str, bool | None]:
    """A number with its interval, as text, and whether it reaches a bound; None if the interval does not decide it."""
    value, low, high = number
    if exact:
        return (f"**{value:.3g}**", True) if value >= least else (f"{value:.3g}, not reached", False)
    if samples < FEWEST:
        return f"{value:.3g} ({samples} samples: no interval), inconclusive", None
    words = f"{value:.3g} ({low:.3g} to {high:.3g}, {samples})"
    met = True if low >= least else False if high < least else None
    return f"**{words}**" if met else words + (", inconclusive" if met is None else ", not reached"), met


def _grid(goal: Goal, cells: list[Row]) -> str:
    """The median of all cells and arms of a goal's kind, and how many reach the goal."""
    keys, names = goal.grid
    alike = [(row, name) for row in cells if fnmatch(row["key"], keys) for name in valid(row) if fnmatch(name, names)]
    values = [number[0] for row, name in alike if (number := measured(goal, row, name))]
    if not values:
        return ""
    reached = sum(value >= goal.least for value in values)
    return f"median {statistics.median(values):.3g}, {reached} of {len(values)} reach it"


def _profile(arm: Row) -> str:
    """Where a call's time on the GPU went: the kernels that took longest, 1 % and more, as a profiler saw one call."""
    if not arm.get("kernels"):
        return ""
    longest = ", ".join(f"`{name}` {ms:.3g}" for name, ms in arm["kernels"] if ms >= 0.01 * arm["gpu_ms"])
    moved = " for {:.3g} GB".format(arm["bytes"] / 1e9) if "bytes" in arm else ""
    return f"of {arm['gpu_ms']:.3g} ms{moved} on the GPU: {longest}"


def _least_gain(cells: list[Row]) -> list[Row]:
    """FP8 over bf16 in the graphed block that gains least of those where `recommend` chooses FP8 for a layer."""
    gains, recommend = [], room("recommend").recommend
    for row in of(cells, "block/"):
        wide, tokens = row["facts"]["hidden"], row["facts"]["length"] * row["facts"]["batch"]
        layers = {"qkv": (wide, 3 * wide), "output": (wide, wide), "up": (wide, 4 * wide), "down": (4 * wide, wide)}
        answer = recommend(cells, layers, tokens, "transformer-engine.delayed", "graph")
        if "fp8 graph" in valid(row) and any(layer["fp8"] for layer in answer["layers"].values()):
            gains.append((row["arms"]["fp8 graph"]["ratio"], row["key"]))
    if not gains:
        return []
    least = "the smallest gain of a graphed block in which `recommend` chooses FP8 for a layer"
    goal = Goal(least, 0.97, min(gains)[1], "fp8 graph")
    return [{**_shown(goal, cells), "grid": f"the least of {len(gains)}"}]
