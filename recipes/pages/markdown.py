"""Markdown: tables, and blocks between markers."""

from __future__ import annotations

import posixpath
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


def filled(root: Path, name: str, blocks: Mapping[str, str]) -> tuple[Path, str]:
    """A page and the text it should have: its own text, with each block between its markers."""
    path = root / name
    text = read_text(path)
    for marker, block in blocks.items():
        marked = re.search(rf"<!-- {marker}: [^\n]*-->\n(.*?)<!-- /{marker} -->", text, re.DOTALL)
        if not marked:
            raise Refusal(f"{path} lacks the markers <!-- {marker}: ... --> and <!-- /{marker} -->: put them back.")
        text = f"{text[: marked.start(1)]}{_placed(block, name)}\n{text[marked.end(1) :]}"
    return path, text


def _placed(block: str, name: str) -> str:
    """A block whose links from the repository's root are made relative to the page of that name."""
    root = "/blob/main"  # GitHub serves files there, and comparisons under /compare

    def renewed(link: re.Match[str]) -> str:
        target = posixpath.join(root, link[1])
        return f"]({posixpath.relpath(target, posixpath.join(root, posixpath.dirname(name)))}"

    return re.sub(r"\]\((?!https?://|#)([^)#\s]+)", renewed, block)


def anchor(heading: str) -> str:
    """The anchor of a heading, as GitHub and the site make it: "cu13.0-torch2.11" is cu130-torch211."""
    return re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading.lower()))
