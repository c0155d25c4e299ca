"""Pictures of the measured rows, in colours that colour-blind readers can tell apart."""

from __future__ import annotations

import io
import statistics
from collections.abc import Callable
from typing import Any

import matplotlib
from matplotlib import pyplot
from matplotlib.colors import TwoSlopeNorm

from recipes.measure.results import Row, of, shares, valid

matplotlib.use("agg")
# Okabe and Ito's palette without its yellow, which is hard to see on white.
ORANGE, SKY, GREEN, BLACK, BLUE, RED, PURPLE, GREY = (
    "#E69F00", "#56B4E9", "#009E73", "#000000", "#0072B2", "#D55E00", "#CC79A7", "#777777",
)  # fmt: skip
PALETTE = (BLUE, ORANGE, GREEN, PURPLE, SKY, RED, GREY, BLACK)
MARKERS = "osD^vPX"  # one less than colours, so that no two of the first 56 lines look alike
pyplot.rcParams.update({"svg.fonttype": "none", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False})


# --- pictures ---


def picture(name: str, cells: list[Row]) -> str:
    """One picture as SVG; "" where the rows have nothing for it."""
    makers: dict[str, Callable[[list[Row]], Any]] = {
        "block": _block,
        "ablation": _ablation,
        "crossover": _crossover,
        "roof": _roof,
        "models": _models,
        "scaling": _scaling,
    }
    figure = makers[name](cells)
    if figure is None:
        return ""
    out = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(out, format="svg", bbox_inches="tight", metadata={"Date": None})
    pyplot.close(figure)
    text = out.getvalue()
    return text[text.index("<svg") :]


def _block(cells: list[Row]) -> Any:
    """FP8 over bf16 by model size, sequence length and micro-batch; eager and as CUDA graphs."""
    rows = of(cells, "block/")
    if not rows:
        return None
    names = sorted({(row["facts"]["hidden"], row["facts"]["model"]) for row in rows}, reverse=True)
    places = sorted({(row["facts"]["length"], row["facts"]["batch"]) for row in rows})
    size = (2.6 + 0.5 * len(places), 1.6 + 0.85 * len(names))
    figure, axes = pyplot.subplots(2, 1, figsize=size, squeeze=False, layout="constrained")
    for axis, arm, title in zip(
        axes[:, 0], ("fp8", "fp8 graph"), ("launched one by one", "as a CUDA graph"), strict=True
    ):
        grid = [[float("nan")] * len(places) for _ in names]
        for row in rows:
            column = places.index((row["facts"]["length"], row["facts"]["batch"]))
            line = names.index((row["facts"]["hidden"], row["facts"]["model"]))
            if arm in valid(row) and "ratio" in row["arms"][arm]:
                value = grid[line][column] = row["arms"][arm]["ratio"]
                bound = "°" if row["arms"][arm]["launch_bound"] else ""
                dark = abs(value - 1) > 0.45
                axis.text(
                    column, line, f"{value:.2f}{bound}", ha="center", va="center", size=7, color="w" if dark else "k"
                )
            elif arm in row["arms"]:
                axis.text(column, line, "×", ha="center", va="center", size=7, color=GREY)
        drawn = axis.imshow(grid, cmap="PuOr_r", norm=TwoSlopeNorm(1, 0.4, 1.8), aspect="auto")
        axis.set_yticks(range(len(names)), [name for _, name in names])
        axis.set_xticks(range(len(places)), [f"{length}\n×{batch}" for length, batch in places], size=7)
        axis.set_title(f"FP8 over bf16, one block, {title}", size=9, loc="left")
    axes[1, 0].set_xlabel(
        "sequence length × micro-batch; ° the host, not the GPU, sets the time; × no valid number, its row says why"
    )
    figure.colorbar(drawn, ax=axes, shrink=0.6, label="times as fast")
    return figure


def _ablation(cells: list[Row]) -> Any:
    """Seconds of a step of 65,536 tokens by what is fused, and memory of a micro-batch."""
    rows = [row for row in of(cells, "ablation/") if not row["key"].startswith("ablation/step") and valid(row)]
    if not rows:
        return None
    count = sum(len(valid(row)) + 1 for row in rows)
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 0.6 + 0.23 * count), sharey=True, layout="constrained")
    place, ticks, labels = 0.0, [], []
    for row in rows:
        tokens = row["facts"]["tokens"]
        labels.append(f"{row['key'].removeprefix('ablation/')}:")
        ticks.append(place)
        place += 1
        for name, arm in valid(row).items():
            seconds = arm["ms"] / 1e3 * 65536 / tokens
            colour = ORANGE if arm["precision"] == "fp8" else GREY if "naive" in name else BLUE
            axes[0].barh(place, seconds, color=colour)
            ratio = f"  {arm['ratio']:.2f}×" if "ratio" in arm else ""
            ratio += f" {arm['base']}" if ratio and arm["base"] != next(iter(row["arms"])) else ""
            bound = "°" if arm["launch_bound"] else ""
            axes[0].text(seconds, place, f" {seconds:.3g} s{bound}{ratio}", va="center", size=7)
            gib = (arm["state_mib"] + arm.get("peak_mib", 0)) / 1024
            axes[1].barh(place, gib, color=colour)
            axes[1].text(gib, place, f" {gib:.3g}", va="center", size=7)
            ticks.append(place)
            labels.append(name)
            place += 1
    axes[0].set_yticks(ticks, labels, size=7)
    axes[0].invert_yaxis()
    axes[0].set_xlabel(
        "seconds per 65,536 tokens: forward and backward of a micro-batch, times their number\n"
        "° the host, not the GPU, sets the time; × as fast as a cell's first, or as what is named",
        size=8,
    )
    axes[1].set_xlabel("GiB: weights, gradients, and the peak of a micro-batch", size=8)
    axes[0].margins(x=0.18)
    axes[1].margins(x=0.12)
    return figure


def _crossover(cells: list[Row]) -> Any:
    """FP8 over bf16 of one Linear by its size, with intervals."""
    rows = [row for row in of(cells, "linear/") if row["facts"]["way"] == "both"]
    lines: dict[str, list[tuple[float, Row, bool]]] = {}
    for row in rows:
        size = (row["facts"]["m"] * row["facts"]["k"] * row["facts"]["n"]) ** (1 / 3)
        for name, arm in valid(row).items():
            if arm["precision"] == "fp8" and "ratio" in arm:
                host = arm["launch_bound"] or row["arms"][arm["base"]]["launch_bound"]
                lines.setdefault(name, []).append((size, arm, host))
    if not lines:
        return None
    figure, axis = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for index, (name, points) in enumerate(sorted(lines.items())):
        points.sort(key=lambda point: point[0])
        colour, marker = PALETTE[index % 8], MARKERS[index % len(MARKERS)]
        for face, bound in ((colour, False), ("white", True)):
            part = [(size, arm) for size, arm, host in points if host == bound]
            ratios = [arm["ratio"] for _, arm in part]
            spread = [[arm["ratio"] - arm["low"] for _, arm in part], [arm["high"] - arm["ratio"] for _, arm in part]]
            style: dict[str, Any] = {"color": colour, "marker": marker, "markerfacecolor": face, "elinewidth": 0.8}
            axis.errorbar([size for size, _ in part], ratios, spread, linestyle="none", markersize=4, **style)
        sizes, ratios = [size for size, _, _ in points], [arm["ratio"] for _, arm, _ in points]
        style = {"color": colour, "linewidth": 1, "linestyle": "-" if index < 8 else "--"}
        axis.plot(*smoothed(sizes, ratios), **style)
        axis.plot([], [], marker=marker, markersize=4, label=name, **style)
    axis.axhline(1, color="k", linewidth=0.8)
    axis.axhline(2, color="k", linewidth=0.8, linestyle=":")
    axis.text(1, 2, "the hardware's limit", size=7, va="bottom", ha="right", transform=axis.get_yaxis_transform())
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter("{x:.0f}")
    axis.set_xlabel(
        "size of the product, cube root of m × k × n; hollow: the host, not the GPU, sets the time of either"
    )
    axis.set_ylabel("FP8 over bf16, forward and both gradients")
    axis.legend(fontsize=7, frameon=False)
    return figure


def smoothed(xs: list[float], ys: list[float]) -> tuple[list[float], list[float]]:
    """The median of each value of x, in order."""
    at: dict[float, list[float]] = {}
    for x, y in zip(xs, ys, strict=True):
        at.setdefault(round(x, 1), []).append(y)
    return list(at), [statistics.median(values) for values in at.values()]


def _roof(cells: list[Row]) -> Any:
    """Each implementation's share of the measured ceiling, by operator and size."""
    rows = [row for row in of(cells, "operators/") if valid(row)]
    if not rows:
        return None
    measured = [shares(row) for row in rows]
    columns = sorted({name for reached in measured for name in reached})
    figure, axis = pyplot.subplots(figsize=(9, 0.9 + 0.22 * len(rows)), layout="constrained")
    for index, column in enumerate(columns):
        points = [(reached[column], line) for line, reached in enumerate(measured) if column in reached]
        hollow: dict[str, Any] = (
            {"facecolors": "none", "edgecolors": PALETTE[index % 8]} if index >= 8 else {"color": PALETTE[index % 8]}
        )
        reaches, places = zip(*points, strict=True)
        axis.scatter(reaches, places, marker=MARKERS[index % len(MARKERS)], s=22, label=column, **hollow)
    axis.set_yticks(range(len(rows)), [row["key"].removeprefix("operators/") for row in rows], size=7)
    axis.invert_yaxis()
    axis.axvline(1, color="k", linewidth=0.8)
    axis.set_xlim(0, 1.1)
    axis.grid(axis="y", linewidth=0.3)
    axis.set_xlabel("share of the measured copy (bytes/s) or of the measured product (FLOP/s)")
    axis.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _models(cells: list[Row]) -> Any:
    """Sequences per second of whole models, naive or fused, bf16 or FP8."""
    rows = [row for row in of(cells, "models/") if valid(row)]
    if not rows:
        return None
    most = max(len(valid(row)) for row in rows)
    size = (3.4 * len(rows), 0.8 + 0.3 * most)
    figure, axes = pyplot.subplots(1, len(rows), figsize=size, squeeze=False, layout="constrained")
    for axis, row in zip(axes[0], rows, strict=True):
        arms = valid(row)
        rates = [row["facts"]["batch"] / arm["ms"] * 1e3 for arm in arms.values()]
        colours = [ORANGE if "fp8" in name else GREY if "naive" in name else BLUE for name in arms]
        axis.barh(range(len(arms)), rates, color=colours)
        for place, rate in enumerate(rates):
            axis.text(rate, place, f" {rate:.3g}", va="center", size=7)
        axis.set_yticks(range(len(arms)), list(arms), size=7)
        axis.invert_yaxis()
        axis.margins(x=0.15)
        axis.set_title(row["facts"]["model"], size=9, loc="left")
        axis.set_xlabel("sequences per second")
    return figure


def _scaling(cells: list[Row]) -> Any:
    """Tokens per second and GPU of each job on several GPUs, and its memory."""
    rows = [row for row in of(cells, "scaling/") if valid(row)]
    if not rows:
        return None
    heights = [len(valid(row)) + 1 for row in rows]
    figure, axes = pyplot.subplots(
        len(rows), 1, figsize=(8, 0.5 + 0.28 * sum(heights)), squeeze=False, layout="constrained", sharex=True,
        height_ratios=heights,
    )  # fmt: skip
    for axis, row in zip(axes[:, 0], rows, strict=True):
        arms, facts = valid(row), row["facts"]
        for place, arm in enumerate(arms.values()):
            rate, ratio = arm["tokens_per_second"], f"  {arm['ratio']:.2f}× {arm['base']}" if "ratio" in arm else ""
            axis.barh(place, rate, color=ORANGE if arm["precision"] == "fp8" else BLUE)
            axis.text(rate, place, f" {rate:,.0f}, {arm['peak_mib'] / 1024:.0f} GiB{ratio}", va="center", size=7)
        axis.set_yticks(range(len(arms)), list(arms), size=7)
        axis.invert_yaxis()
        axis.margins(x=0.35)
        title = f"{facts['model']}, {facts['gpus']} GPUs, sequences of {facts['length']}, {facts['batch']} a step"
        axis.set_title(title, size=9, loc="left")
    axes[-1, 0].set_xlabel("tokens per second and GPU; most memory of any GPU; times as fast as which")
    return figure
