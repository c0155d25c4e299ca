"""The layers of an image as a registry has them: what made each, its size, and the files in it.

A target may bound the sizes of the layers of its environment (`layers` in targets.toml), which docker/split-layers.sh
makes, so that an image does not grow by hundreds of megabytes unseen.
"""

from __future__ import annotations

import itertools
import json
import re
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from recipes.catalogue.schema import Target
from recipes.errors import Refusal
from recipes.ship import registry

SLACK = 1.05  # factor on a bound: what a new release of a package may add
LISTED = 5  # how many files a refusal names


@dataclass(frozen=True)
class Layer:
    """A layer of an image: its digest, its compressed size in bytes and the Dockerfile's line that made it."""

    digest: str
    bytes: int
    made_by: str

    @property
    def part(self) -> str:
        """The part of the environment that it holds, as split-layers.sh names it; "" for any other layer."""
        copied = re.match(r"COPY /layers/(\w+) ", self.made_by)
        return copied[1] if copied else ""


def of(manifest: dict[str, Any], config: dict[str, Any]) -> list[Layer]:
    """The layers that a manifest lists, with the lines that the image's configuration has for them."""
    lines = [entry.get("created_by", "base") for entry in config.get("history", []) if not entry.get("empty_layer")]
    return [
        Layer(layer["digest"], layer["size"], line.partition(" # ")[0])
        for layer, line in zip(manifest["layers"], itertools.chain(lines, itertools.repeat("")), strict=False)
    ]


def blob(oci: Path, digest: str) -> Path:
    """The file of a blob in an OCI layout."""
    return oci / "blobs" / "sha256" / digest.removeprefix("sha256:")


def read(oci: Path) -> list[Layer]:
    """The layers of the one image of an OCI layout."""
    manifest = json.loads(blob(oci, registry.digest_in(oci)).read_text())
    return of(manifest, json.loads(blob(oci, manifest["config"]["digest"]).read_text()))


def refuse_grown(target: Target, oci: Path, name: str) -> None:
    """Refuse an image with a layer that is larger than the target's bound and its slack, and name the files.

    `name` is the image's name in its registry, whose image under the target's tag says which files are new.
    """
    layers = {layer.part: layer for layer in read(oci)}
    for part, bound in target.layers.items():
        layer = layers.get(part)
        if layer and layer.bytes > bound * 2**20 * SLACK:
            with blob(oci, layer.digest).open("rb") as file:
                files = files_in(file)
            before = _published(f"{name}:{target.name}", part)
            grown = {path: size for path, size in files.items() if size > before.get(path, 0)}
            largest = sorted(grown, key=lambda path: (before.get(path, 0) - grown[path], path))[:LISTED]
            listed = ", ".join(f"{path} ({grown[path] / 2**20:.1f} MiB)" for path in largest)
            raise Refusal(
                f"The layer {part} of {target.name} would take {layer.bytes / 2**20:.1f} MiB in the registry, which is "
                f"over 5 % more than the {bound:g} of recipes/targets.toml [{target.name}.layers]; the largest "
                f"{'new or grown' if before else 'of its'} files are {listed}: leave them out, or raise the bound."
            )


def files_in(archive: IO[bytes]) -> dict[str, int]:
    """The files of a layer with their sizes in bytes."""
    with tarfile.open(fileobj=archive) as layer:
        return {member.name: member.size for member in layer if member.isfile()}


def _published(image: str, part: str) -> dict[str, int]:
    """The files of that part of an image in its registry; none if it has no such image."""
    manifest, config = registry.run_crane("manifest", image), registry.run_crane("config", image)
    if manifest.returncode or config.returncode:
        return {}
    layers = {layer.part: layer for layer in of(json.loads(manifest.stdout), json.loads(config.stdout))}
    if part not in layers:
        return {}
    with tempfile.TemporaryFile() as file:
        registry.read_blob(f"{image.rpartition(':')[0]}@{layers[part].digest}", file)
        file.seek(0)
        return files_in(file)
