"""Rows of numbers, made up: what `bench` would write of one machine."""

from __future__ import annotations

from typing import Any

from recipes.measure import results

LIMITS = {"copy": 4.0e12, "bf16": 8.0e14, "fp8": 1.5e15}
SHARD: results.Row = {
    "key": "shard", "shard": "s", "target": "cpu", "releases": {"torch": "2"}, "limits": LIMITS, "state": {},
    "machine": {"name": "H200", "arch": "x86-64", "cpu": "c", "gpus": [], "driver": ""},
}  # fmt: skip


def arm(precision: str = "bf16", ms: float | None = 1.0, **others: Any) -> results.Row:
    return {
        "precision": precision, "ms": ms, "gpu_ms": ms, "host_ms": 0.1, "state_mib": 1024,
        "peak_mib": 1024, "checks": [[0.04, 0.02, 0.1]], "samples_ms": [ms], "fp8_kernels": ["nvjet_sm90_qqtst"],
        **others,
    }  # fmt: skip


def fast(ratio: float = 1.5, **others: Any) -> results.Row:
    """An FP8 arm that is so many times as fast as bf16."""
    gain = {"base": "bf16", "ratio": ratio, "low": ratio - 0.01, "high": ratio + 0.01, "comparable": True}
    return arm("fp8", 1 / ratio, **{**gain, **others})


def row(key: str = "linear/sweep/16384x2048x2048/both", **arms: results.Row) -> results.Row:
    facts = {"m": 16384, "k": 2048, "n": 2048, "way": "both"}
    return {"key": key, "facts": facts, "shard": "s", "quick": False, "pairs": 30, "arms": {"bf16": arm(), **arms}}
