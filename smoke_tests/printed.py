"""The line that reports a claim's outcome in the raw log, which evidence is compared with."""

from __future__ import annotations

from typing import Any, Dict

OUTCOME = 9  # characters of the line that hold the outcome


def line(record: Dict[str, Any]) -> str:
    """A record's outcome, package, claim and row, measured numbers, the reason if it is not proved, and its seconds."""
    row = record["id"].partition("[")[2].rstrip("]")
    numbers = ", ".join(f"{name} {short(value)}" for name, value in record["measured"].items())
    parts = [record["claim"] + (f" [{row}]" if row else ""), numbers]
    parts += [record["reason"]] if record["outcome"] != "proved" else []
    text = "; ".join(part for part in parts if part)
    return "{outcome:9}{package:13} {} ({seconds:.1f} s)".format(text, **record)


def short(value: Any) -> str:
    """A measured value in a few characters."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)
