"""Stage docs/ for the site: `python -m recipes.pages.site FOLDER`, then Zensical builds it (`nox -s docs`).

On GitHub, pages link to files outside docs/. For the site, such a picture is copied beside the pages, and a link to
another file leads to the repository if its address is known (in GitHub's CI, or from the remote `origin`); else it
becomes plain text.
"""

from __future__ import annotations

import os
import posixpath
import re
import shutil
import subprocess
import sys
from pathlib import Path

LINK = re.compile(r"(!?)\[([^\]\n]*)\]\((?!https?://|#|mailto:)([^)\s#]+)(#[^)\s]*)?\)")


def stage(root: Path, into: Path, repository: str) -> None:
    """Copy docs/ to a folder and rewrite the links that leave it; `repository` is its https address, or ""."""
    shutil.rmtree(into, ignore_errors=True)
    for path in sorted((root / "docs").rglob("*.md")):
        page = path.relative_to(root / "docs")
        (into / page).parent.mkdir(parents=True, exist_ok=True)
        (into / page).write_text(_renewed(path.read_text(encoding="utf-8"), root, into, page, repository), "utf-8")


def _renewed(text: str, root: Path, into: Path, page: Path, repository: str) -> str:
    """A page's text for the site."""

    def renewed(link: re.Match[str]) -> str:
        picture, words, target, anchor = link[1], link[2], link[3], link[4] or ""
        place = posixpath.normpath(posixpath.join("/blob/main/docs", page.parent.as_posix(), target))
        if place.startswith("/blob/main/docs/"):
            return link[0]
        if picture:
            copied = Path("pictures", posixpath.relpath(place, "/blob/main").replace("/", "-"))
            (into / copied).parent.mkdir(exist_ok=True)
            shutil.copyfile(root / posixpath.relpath(place, "/blob/main"), into / copied)
            return f"![{words}]({posixpath.relpath(copied.as_posix(), page.parent.as_posix())})"
        return f"[{words}]({repository}{place}{anchor})" if repository else words

    return LINK.sub(renewed, text)


def address(root: Path) -> str:
    """The repository's address on GitHub, or "" if it is not known."""
    if "GITHUB_REPOSITORY" in os.environ:
        return f"{os.environ.get('GITHUB_SERVER_URL', 'https://github.com')}/{os.environ['GITHUB_REPOSITORY']}"
    command = ["git", "-C", str(root), "remote", "get-url", "origin"]
    remote = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    match = re.fullmatch(r"(?:https://|git@|ssh://git@)github\.com[:/](.+?)(?:\.git)?/?", remote)
    return f"https://github.com/{match[1]}" if match else ""


if __name__ == "__main__":
    checkout = Path(__file__).resolve().parents[2]
    stage(checkout, Path(sys.argv[1]), address(checkout))
