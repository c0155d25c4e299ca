"""Images: what a registry says of a base image, asked through the Docker engine (the docker SDK)."""

from __future__ import annotations

import re
from pathlib import Path

import docker
from docker.errors import DockerException

from recipes.cache import write_text
from recipes.model import Refusal, Target


def engine() -> docker.DockerClient:
    """The Docker engine that DOCKER_HOST or the default socket names; refused if none answers."""
    try:
        client = docker.from_env()
        client.ping()
    except DockerException as error:
        raise Refusal(f"No Docker engine answers ({_last(error)}): start one, or set DOCKER_HOST.") from None
    return client


def digest(image: str) -> str:
    """The digest ("sha256:...") that a registry has for an image's tag now."""
    try:
        found = engine().images.get_registry_data(image).id
    except DockerException as error:
        raise Refusal(
            f"The registry of {image} gives no digest for it ({_last(error)}): check the name and the network."
        ) from None
    return str(found)


def _last(error: Exception) -> str:
    """The last clause of what an engine or a registry said."""
    return re.sub(r"\s+", " ", str(error)).strip().rstrip(".")[-200:]


def resolve(targets_file: Path, target: Target) -> tuple[dict[str, str], list[str]]:
    """Ask for the digests that a target lacks and write them into targets.toml: those found, then why others were not.

    Every target with the same image gets the same digest.
    """
    found, missing = {}, []
    for image in target.base.unresolved:
        try:
            found[image] = digest(image)
        except Refusal as refusal:
            missing.append(f"the digest of {image} stays unresolved: {refusal}")
    text = targets_file.read_text(encoding="utf-8")
    for image, sha256 in found.items():
        text = text.replace(f'image = "{image}", digest = "unresolved"', f'image = "{image}", digest = "{sha256}"')
    if found:
        write_text(targets_file, text)
    return found, missing
