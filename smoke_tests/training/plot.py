"""Draw curves as SVG with the standard library only, because a target's environment has no matplotlib."""

from __future__ import annotations

import math
from html import escape
from typing import Dict, List, Sequence, Tuple

Curves = Dict[str, Sequence[Tuple[float, float]]]  # name -> points (x, y)
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf", "#7f7f7f", "#e377c2", "#bcbd22")
WIDTH, HEIGHT, LEFT, TOP = 640, 280, 60, 34  # of one panel, its left and its upper margin


def figure(panels: Dict[str, Curves]) -> str:
    """Panels, one below the other: title -> curves. A point that is not finite is left out."""
    shown = "".join(_panel(title, curves, index * HEIGHT) for index, (title, curves) in enumerate(panels.items()))
    size = f'width="{WIDTH + 240}" height="{HEIGHT * len(panels)}"'
    style = 'font-family="sans-serif" font-size="11"'
    white = '<rect width="100%" height="100%" fill="white"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n{white}\n{shown}</svg>\n'


def _panel(title: str, curves: Curves, down: int) -> str:
    finite: Dict[str, List[Tuple[float, float]]] = {
        name: [(x, y) for x, y in points if math.isfinite(y)] for name, points in curves.items()
    }
    flat = [point for points in finite.values() for point in points] or [(0.0, 0.0)]
    (left, right), (low, high) = ((min(values), max(values)) for values in zip(*flat))
    right, high = max(right, left + 1e-9), max(high, low + 1e-9)

    def across(x: float) -> float:
        return float(LEFT + (x - left) / (right - left) * (WIDTH - LEFT))

    def upward(y: float) -> float:
        return float(HEIGHT - TOP - (y - low) / (high - low) * (HEIGHT - 2 * TOP))

    parts = [f'<g transform="translate(0 {down})"><text x="{LEFT}" y="20" font-size="13">{escape(title)}</text>']
    for y in ticks(low, high):
        parts.append(f'<path d="M{LEFT} {upward(y):.1f}H{WIDTH}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{upward(y) + 4:.1f}" text-anchor="end">{y:g}</text>')
    for x in ticks(left, right):
        parts.append(f'<text x="{across(x):.1f}" y="{HEIGHT - TOP + 16}" text-anchor="middle">{x:g}</text>')
    for index, (name, points) in enumerate(finite.items()):
        colour = COLOURS[index % len(COLOURS)]
        line = " ".join(f"{across(x):.1f},{upward(y):.1f}" for x, y in points)
        parts.append(f'<polyline fill="none" stroke="{colour}" points="{line}"/>')
        parts.append(f'<text x="{WIDTH + 8}" y="{TOP + 14 * index + 10}" fill="{colour}">{escape(name)}</text>')
    return "\n".join([*parts, "</g>\n"])


def ticks(low: float, high: float) -> List[float]:
    """About five round numbers from low to high."""
    step = 10 ** math.floor(math.log10((high - low) / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= 6)
    return [round(index * step, 12) for index in range(math.ceil(low / step), math.floor(high / step) + 1)]
