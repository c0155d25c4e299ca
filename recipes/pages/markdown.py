"""Markdown: tables, and blocks between markers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from recipes.errors import Refusal
from recipes.files import read_text


def table(header: str, rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table; the header's cells are separated by "|"."""
    names = header.split("|")
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def filled(path: Path, blocks: Mapping[str, str]) -> tuple[Path, str]:
    """A README and the text it should have: its own words, and each block between its markers."""
    text = read_text(path)
    for name, block in blocks.items():
        marked = re.search(rf"<!-- {name}: [^\n]*-->\n(.*?)<!-- /{name} -->", text, re.DOTALL)
        if not marked:
            raise Refusal(f"{path} lacks the markers <!-- {name}: ... --> and <!-- /{name} -->: put them back.")
        text = f"{text[: marked.start(1)]}{block}\n{text[marked.end(1) :]}"
    return path, text
