"""The images that recipes/bases.toml declares and no target does."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from recipes.catalogue.load import Catalogue, validated
from recipes.catalogue.schema import Image, ImageName, Strict, Target
from recipes.files import ROOT, read_toml


class Bases(Strict):
    """`sources` is the image of every Dockerfile's first stage, and `buildkit` builds in CI.

    `support` is the month until which a runtime base gets security updates.
    """

    sources: Image
    buildkit: Image
    support: dict[ImageName, Annotated[str, Field(pattern=r"^20\d\d-[01]\d$")]]

    def of(self, target: Target) -> tuple[Image, Image, Image]:
        """What an image of the target is built from: for its sources, its wheels and its environment."""
        return self.sources, target.base.wheels, target.base.runtime

    def supported_until(self, target: Target) -> str:
        """The month ("2029-04") in which the support of a target's image ends, or "none"."""
        return self.support.get(target.base.runtime.image, "none")


def bases(root: Path = ROOT) -> Bases:
    """The images that recipes/bases.toml of a checkout declares."""
    path = root / "recipes" / "bases.toml"
    return validated(Bases, read_toml(path), path)


def of_targets(catalogue: Catalogue) -> list[Image]:
    """The images that the targets declare, in their order; one that several declare is there several times."""
    return [image for target in catalogue.targets.values() for image in (target.base.wheels, target.base.runtime)]
