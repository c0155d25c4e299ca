"""README's tables say what data, patches, claims and evidence say, and the check names the command that mends them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from recipes import render
from recipes.model import ROOT, Catalogue, Refusal


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what README is rendered from."""
    for name in ("recipes", "patches", "smoke_tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "README.md", tmp_path)
    return tmp_path


def test_readme_is_current() -> None:
    assert render.check(Catalogue()) == 0


def test_the_check_names_the_command_that_mends_it(checkout: Path) -> None:
    targets = checkout / "recipes" / "targets.toml"
    targets.write_text(targets.read_text().replace("any x86-64 machine", "any machine"))
    with pytest.raises(Refusal, match="nox -s render"):
        render.check(Catalogue(checkout))
    assert render.write(Catalogue(checkout)) == 0
    assert render.check(Catalogue(checkout)) == 0
    assert "any machine" in (checkout / "README.md").read_text()


def test_a_lost_marker_is_named(checkout: Path) -> None:
    readme = checkout / "README.md"
    readme.write_text(readme.read_text().replace("<!-- /ledger -->", ""))
    with pytest.raises(Refusal, match="/ledger"):
        render.check(Catalogue(checkout))


def test_a_seed_outside_the_inventory_is_refused(checkout: Path) -> None:
    test = checkout / "smoke_tests" / "test_transformers.py"
    test.write_text(test.read_text().replace('seed="A09"', 'seed="A99"'))
    with pytest.raises(Refusal, match="A99"):
        render.check(Catalogue(checkout))


def test_a_patch_for_no_target_shows_none(checkout: Path) -> None:
    patch = checkout / "patches" / "deepspeed" / "0001-let-the-builder-name-the-cpu.patch"
    patch.write_text(patch.read_text().replace("==0.19.8", "==0.1"))
    row = next(line for line in render.blocks(Catalogue(checkout))["patches"].splitlines() if "deepspeed 0001" in line)
    assert row.endswith("|  |")


@pytest.mark.parametrize(
    ("numbers", "text"), [([], ""), ([1], "A01"), ([1, 2, 3], "A01-A03"), ([1, 2, 5, 7, 8], "A01-A02, A05, A07-A08")]
)
def test_ranges(numbers: list[int], text: str) -> None:
    assert render._ranges("A", numbers) == text
