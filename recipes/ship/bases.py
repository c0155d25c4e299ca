"""Raise the base images: each tag's digest as its registry gives it now, written where the image is pinned."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from recipes.catalogue.bases import bases, of_targets
from recipes.catalogue.load import Catalogue
from recipes.files import read_text, write_text
from recipes.ship import registry
from recipes.ship.image import last_words


def pinned(catalogue: Catalogue) -> dict[str, set[str]]:
    """The digests that the data have for each image, by its name with the tag."""
    own = bases(catalogue.root)
    digests = defaultdict(set)
    for image in (own.sources, own.buildkit, *of_targets(catalogue)):
        digests[image.image].add(image.digest)
    return digests


def raise_digests(catalogue: Catalogue) -> Iterator[str]:
    """Write the digest that each tag has now into targets.toml and bases.toml; yields a line for each image."""
    registry.refuse_without_crane("Digests are asked with")
    for name, digests in pinned(catalogue).items():
        before, done = ", ".join(sorted(digests)), registry.run_crane("digest", name)
        if done.returncode != 0:
            reason = last_words((done.stderr.strip().splitlines() or ["no message"])[-1])
            yield f"{name} keeps the digest {before}: its registry gives none ({reason})"
        elif digests == {done.stdout.strip()}:
            yield f"{name} is still {before}"
        else:
            _write(catalogue.root, name, done.stdout.strip())
            yield f"{name}: {before} -> {done.stdout.strip()}"


def _write(root: Path, name: str, digest: str) -> None:
    for file in ("targets.toml", "bases.toml"):
        path = root / "recipes" / file
        text = read_text(path)
        changed = re.sub(rf'(image = "{re.escape(name)}"(?:, |\n)digest = ")[^"]+', rf"\g<1>{digest}", text)
        if changed != text:
            write_text(path, changed)
