"""Every rendered file: the tables of README and docs/status, runs and Dockerfiles; written, or checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from recipes.catalogue.load import Catalogue
from recipes.errors import Refusal
from recipes.files import write_text
from recipes.measure import runs
from recipes.pages import compatibility, faults, ledger, patches, tables
from recipes.pages.markdown import filled
from recipes.pages.tables import Facts
from recipes.progress import say
from recipes.ship import dockerfile

# Every page with rendered blocks, and the function that makes each block.
PAGES: dict[str, dict[str, Callable[[Facts], str]]] = {
    "README.md": {"images": tables.images, "numbers": tables.headlines},
    "docs/status/targets.md": {"targets": tables.targets, "packages": tables.packages},
    "docs/status/claims.md": {"matrix": tables.matrix, "logs": tables.logs, "records": tables.records_table},
    "docs/status/patches.md": {
        "patches": patches.patches,
        "proofs": patches.proofs_of_patches,
        "reasons": patches.reasons,
    },
    "docs/status/compatibility.md": {"compatibility": lambda facts: compatibility.text(facts.catalogue)},
    "docs/status/numbers.md": {"bench": tables.goals_reached},
    "docs/status/several-gpus.md": {"runs": tables.described_speeds},
    "docs/status/training.md": {"parity": tables.trainings},
    "docs/status/mutants.md": {"mutants": lambda facts: faults.text(facts.root, facts.plan_of)},
    "docs/status/documents.md": {
        "documents": tables.answered_documents,
        "answers": ledger.claims,
        "statements": ledger.statements,
        "described": ledger.described,
        "open": ledger.left_open,
    },
}


def blocks(facts: Facts) -> dict[str, str]:
    """Every rendered block, by the name in its markers."""
    return {name: make(facts) for makers in PAGES.values() for name, make in makers.items()}


def described_runs(root: Path) -> tuple[Path, str]:
    """The module through which claims read the runs of recipes/runs.toml, and the text that it should have."""
    return root / "smoke_tests" / "training" / "distributed" / "engine_arguments.py", runs.module(root)


def every(catalogue: Catalogue) -> list[tuple[Path, str]]:
    """Every rendered file and the text it should have."""
    root, facts = catalogue.root, Facts.of(catalogue)
    dockerfiles = [(root / "docker" / f"{plan.target.name}.Dockerfile", dockerfile.text(plan)) for plan in facts.plans]
    texts = blocks(facts)
    pages = [filled(root, name, {marker: texts[marker] for marker in markers}) for name, markers in PAGES.items()]
    return [*pages, described_runs(root), *dockerfiles]


def write(catalogue: Catalogue) -> int:
    """Write every rendered file that is not current and return 0; a Dockerfile that belongs to no target is removed."""
    _write([described_runs(catalogue.root)])  # first, because claims run it
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
    """Return 0 if every rendered file is current; otherwise refuse with the command that renders them."""
    texts = dict(every(catalogue))
    if stray := next((path for path in catalogue.root.glob("docker/*.Dockerfile") if path not in texts), None):
        raise Refusal(f"{stray.name} belongs to no target: run `nox -s render` and commit it.")
    for path, text in texts.items():
        if not _is_current(path, text):
            raise Refusal(f"{path.name} does not match the data and the evidence: run `nox -s render` and commit it.")
    return 0
