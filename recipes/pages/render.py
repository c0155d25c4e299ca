"""Every rendered file: the READMEs' tables, the two pages of recipes/, runs and Dockerfiles; written, or checked."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from recipes.catalogue.load import Catalogue
from recipes.errors import Refusal
from recipes.files import write_text
from recipes.measure import runs
from recipes.pages import compatibility, faults, ledger
from recipes.pages.markdown import filled
from recipes.pages.tables import Facts, blocks, records_of
from recipes.progress import say
from recipes.ship import dockerfile


def told(root: Path) -> tuple[Path, str]:
    """The runs as the claims are told them, and the text that file should have."""
    return root / "smoke_tests" / "training" / "engine_arguments.py", runs.module(root)


def every(catalogue: Catalogue) -> list[tuple[Path, str]]:
    """Every rendered file and the text it should have."""
    root, facts = catalogue.root, Facts.of(catalogue)
    dockerfiles = [(root / "docker" / f"{one.target.name}.Dockerfile", dockerfile.text(one)) for one in facts.plans]
    readmes = [
        filled(root / "README.md", blocks(facts)),
        filled(root / "smoke_tests" / "README.md", {"mutants": faults.text(root), "records": records_of(root)}),
    ]
    return [*readmes, compatibility.page(catalogue), ledger.page(facts), told(root), *dockerfiles]


def write(catalogue: Catalogue) -> int:
    """Write every rendered file that is not current and return 0; a Dockerfile that is of no target is removed."""
    _write([told(catalogue.root)])  # first: claims reach it, and the other files say which claims have changed
    texts = dict(every(catalogue))
    for path in catalogue.root.glob("docker/*.Dockerfile"):
        if path not in texts:
            path.unlink()
            say(f"removed {path.name}")
    _write(texts.items())
    return 0


def _write(texts: Iterable[tuple[Path, str]]) -> None:
    for path, text in texts:
        if not _is_current(path, text):
            write_text(path, text)
            say(f"rendered {path.name}")


def _is_current(path: Path, text: str) -> bool:
    return path.exists() and path.read_text(encoding="utf-8") == text


def check(catalogue: Catalogue) -> int:
    """0 if every rendered file is current; else refused with the command that makes it so."""
    texts = dict(every(catalogue))
    if stray := next((path for path in catalogue.root.glob("docker/*.Dockerfile") if path not in texts), None):
        raise Refusal(f"{stray.name} is of no target: run `nox -s render` and commit it.")
    for path, text in texts.items():
        if not _is_current(path, text):
            raise Refusal(f"{path.name} is not what the data and the evidence say: run `nox -s render` and commit it.")
    return 0
