"""Verbs that render, and the compatibility matrix on a terminal."""

from __future__ import annotations

import argparse

from rich.table import Table

from recipes.catalogue.compatibility import grid
from recipes.catalogue.load import Catalogue
from recipes.pages import render as rendering
from recipes.pages.compatibility import grid_rows
from recipes.progress import console, say
from recipes.verbs.arguments import Verbs


def register(verbs: Verbs) -> None:
    """Add these verbs with their arguments."""
    verbs.add("compat", compat, target=False)
    rendered = verbs.add("render", render, target=False)
    rendered.add_argument("--check", action="store_true", help="write nothing, and fail if a file is not current")


def compat(_: argparse.Namespace) -> int:
    """Print which releases of which packages each target allows, and why it refuses the others."""
    matrix = grid(Catalogue())
    rows, reasons = grid_rows(matrix)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("package", *matrix.targets):
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(cell.replace("*", "") for cell in row))
    console.print(table)
    for number, reason in enumerate(reasons, 1):
        say(f"{number:3}  {reason}")
    return 0


def render(options: argparse.Namespace) -> int:
    """Write the tables of README and docs/ and all other rendered files, or check that they are current."""
    return rendering.check(Catalogue()) if options.check else rendering.write(Catalogue())
