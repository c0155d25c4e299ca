"""The compatibility matrix for readers: the block of docs/status/compatibility.md, and the cells of `compat`."""

from __future__ import annotations

from recipes.catalogue.compatibility import Grid, grid
from recipes.catalogue.limits import Reason
from recipes.catalogue.load import Catalogue
from recipes.pages import markdown

_WORDS = {"allowed": "fits", "unknown": "?", "refused": "no"}


def grid_rows(matrix: Grid) -> tuple[list[list[str]], list[str]]:
    """The cells of the compatibility matrix, row by row, and the numbered reasons that refused cells cite."""
    numbers: dict[str, int] = {}
    rows = []
    for (package, version), verdicts in matrix.rows.items():
        row = [f"{package} {version}"]
        for target, verdict in verdicts.items():
            cell = "**in**" if (target, package, version) in matrix.holds else _WORDS[verdict.word]
            if verdict.word == "refused":
                cited = [numbers.setdefault(_rule(reason), len(numbers) + 1) for reason in verdict.reasons]
                cell += f" {', '.join(map(str, sorted(set(cited))))}"
            row.append(cell)
        rows.append(row)
    return rows, list(numbers)


def _rule(reason: Reason) -> str:
    """A reason without the part about one target."""
    return f"{reason.here.partition(', and the target has ')[0]}: {reason.rule}"


def text(catalogue: Catalogue) -> str:
    """Every release of every package against every target, and the numbered reasons that refused cells cite."""
    matrix = grid(catalogue)
    rows, reasons = grid_rows(matrix)
    names = "|".join(f"`{name}`" for name in matrix.targets)
    listed = "\n".join(f"{number}. {reason}" for number, reason in enumerate(reasons, 1))
    return f"{markdown.table(f'package|{names}', rows)}\n\n{listed}"
