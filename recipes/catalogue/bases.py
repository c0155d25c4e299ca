"""The images that no target declares, from recipes/bases.toml."""

from __future__ import annotations

from pathlib import Path

from recipes.catalogue.load import validated
from recipes.catalogue.schema import Image, Strict
from recipes.files import ROOT, read_toml


class Bases(Strict):
    """`sources` is the image of every Dockerfile's first stage, and `buildkit` builds in CI."""

    sources: Image
    buildkit: Image


def bases(root: Path = ROOT) -> Bases:
    """Those of a checkout."""
    path = root / "recipes" / "bases.toml"
    return validated(Bases, read_toml(path), path)
