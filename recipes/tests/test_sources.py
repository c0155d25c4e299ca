"""Every source of every target, from the real histories: fetched at its commit, with its submodules, and patched.

The histories are a mirror folder's (FUSEBOX_MIRROR). Without one these tests are unproven, not green.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from recipes.catalogue.load import Catalogue
from recipes.catalogue.lock import artifact_of
from recipes.catalogue.plan import plan
from recipes.make.build import Builder
from recipes.make.cache import Cache
from recipes.progress import Steps

CATALOGUE = Catalogue()
GIT = [
    name for name, target in CATALOGUE.targets.items() if any(pin.release.repository for pin in CATALOGUE.pins(target))
]


@pytest.mark.parametrize("name", GIT)
def test_sources_are_fetched_and_patched(name: str) -> None:
    if not (mirror := os.environ.get("FUSEBOX_MIRROR")):
        pytest.skip("unproven here: FUSEBOX_MIRROR names no folder with the upstream repositories")
    chosen, cache = plan(CATALOGUE, name), Cache()
    with Steps() as steps, cache.held(steps.wait):
        builder = Builder(chosen, cache, steps, Path(mirror))
        sources = [pin for pin in chosen.pins if pin.release.kind == "source"]
        files = builder.downloads.all(artifact for pin in sources if (artifact := artifact_of(pin)))
        trees = builder.trees(files)
    assert list(trees) == [pin.name for pin in sources]
    for pin in sources:
        tree, release = trees[pin.name], pin.release
        assert [record["file"] for record in tree.patches] == [each.name for each in chosen.patches[pin.name]]
        assert (tree.path / (release.subfolder or ".") / "setup.py").is_file()
        for submodule in release.submodules:
            assert any((tree.path / submodule.path).iterdir()), submodule.path
