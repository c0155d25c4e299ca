"""The documents: every link and anchor resolves, every command exists with its options, and README stays short."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import textwrap
from functools import cache
from pathlib import Path

import pytest

from recipes import __main__ as tool
from recipes.files import ROOT
from recipes.pages import site

PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "patches/*.md", "smoke_tests/*.md", ".github/*.md")
    for path in ROOT.glob(pattern)
)
# A command of nox in a line of code or inside a sentence: the session's name, and what follows.
COMMAND = re.compile(r"\bnox -s (\"[^\"]+\"|[\w-]+)([^`\n]*)")
# Sessions whose arguments pytest or pre-commit parse, not a verb.
OTHERS = {"tests", "lint", "docs"}
# Placeholders for names that readers choose themselves.
PLACEHOLDERS = {"TARGET": "cpu", "NAME": "cpu", "RUN": "llama-8b", "cpu-small": "cpu"}


def prose(path: Path) -> str:
    """A page without its code, so that only links of sentences and tables are left."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("    ")]
    return re.sub(r"`[^`]*`", lambda code: code[0] if "](" not in code[0] else "", "\n".join(lines))


@cache
def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", title.strip().lower())) for title in titles}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_anchors_resolve(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        file, _, anchor = target.partition("#")
        if target.startswith(("https://", "http://")) or "/compare/" in target:
            continue
        there = (path.parent / file).resolve() if file else path
        assert there.exists(), f"{target} is not there"
        assert not anchor or anchor in anchors(there), f"{target} has no such heading"


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_the_guarded_loop_on_the_page_is_the_one_that_a_claim_runs() -> None:
    loop = (ROOT / "smoke_tests" / "training" / "guarded_loop.py").read_text(encoding="utf-8")
    assert textwrap.indent(loop, "    ") in (ROOT / "docs" / "use" / "guard.md").read_text(encoding="utf-8")


def test_ids_of_the_documents_stay_on_their_page() -> None:
    for path in PAGES:
        if path != ROOT / "docs" / "status" / "documents.md" and path.is_relative_to(ROOT / "docs"):
            ids = re.findall(r"\b[A-E]\d\d\b", path.read_text(encoding="utf-8"))
            assert not ids, f"{path.relative_to(ROOT)} names {ids[0]}"


@cache
def sessions() -> set[str]:
    """What `nox -l` lists: the menu has a line for each, with `-` or `*` before it."""
    command = [sys.executable, "-m", "nox", "--list", "--nocolor"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = re.findall(r"^[-*] (\S+)", listed, re.MULTILINE)
    return {*names, *(name.partition("(")[0] for name in names)}  # a sentence may name `publish` without a target


def commands(path: Path) -> list[tuple[str, list[str]]]:
    """The nox sessions that a page names, each with the words after `--`; comments and redirections are left out."""
    called = []
    for session, rest in COMMAND.findall(path.read_text(encoding="utf-8")):
        words = shlex.split(re.sub(r"\[[^\]]*\]", "", rest), comments=True) if rest.strip().startswith("--") else []
        stop = next((at for at, word in enumerate(words) if word[0] in ">|&;"), len(words))
        called.append((session.strip('"'), words[1:stop]))
    return called


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_exist(path: Path) -> None:
    for session, words in commands(path):
        name, _, target = session.rstrip(")").partition("(")
        chosen = PLACEHOLDERS.get(target, target)
        assert (f"{name}({chosen})" if chosen else name) in sessions(), f"there is no session {session}"
        if name in OTHERS or not (words or chosen):
            continue
        arguments = [name, *([chosen] if chosen else []), *(PLACEHOLDERS.get(word, word) for word in words)]
        if "..." not in words:
            with_folders = [str(ROOT) if word in ("DIR", "FOLDER") else word for word in arguments]
            try:
                tool.parsed(with_folders)
            except SystemExit:
                pytest.fail(f"nox -s {session} -- {' '.join(words)}: the verb does not take these arguments")


def test_the_site_has_every_page_and_no_link_that_leaves_it(tmp_path: Path) -> None:
    site.stage(ROOT, tmp_path / "docs", "https://github.com/OWNER/fusebox")
    staged = {path.relative_to(tmp_path / "docs") for path in (tmp_path / "docs").rglob("*.md")}
    assert staged == {path.relative_to(ROOT / "docs") for path in PAGES if path.is_relative_to(ROOT / "docs")}
    claims = (tmp_path / "docs" / "status" / "claims.md").read_text()
    assert "https://github.com/OWNER/fusebox/compare/" in claims and "](../../../" not in claims
    for page in staged:
        for target in re.findall(r"\]\(([^)\s#]+)", prose(tmp_path / "docs" / page)):
            if not target.startswith("https://"):
                assert (tmp_path / "docs" / page.parent / target).resolve().is_relative_to(tmp_path / "docs"), target
    nav = (ROOT / "zensical.toml").read_text()
    assert set(re.findall(r'"([\w/-]+\.md)"', nav)) == {page.as_posix() for page in staged}
