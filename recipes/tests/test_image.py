"""Base images and their digests, with a real engine and a real registry; without them these tests are unproven."""

from __future__ import annotations

import io
import tarfile
import uuid
from collections.abc import Iterator

import docker
import pytest

from recipes import image
from recipes.model import Catalogue, Refusal
from recipes.tests.conftest import Tiny

REGISTRY = "127.0.0.1:5000"


@pytest.fixture(scope="session")
def engine() -> docker.DockerClient:
    """The engine that is running."""
    try:
        return image.engine()
    except Refusal as refusal:
        pytest.skip(f"unproven here: {refusal}")


@pytest.fixture
def pushed(engine: docker.DockerClient) -> Iterator[tuple[str, str]]:
    """An image of one file in the registry on this machine, and its digest."""
    name, archive = f"{REGISTRY}/fusebox/{uuid.uuid4().hex[:8]}", io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        member = tarfile.TarInfo("file")
        tar.addfile(member, io.BytesIO())
    engine.api.import_image_from_data(archive.getvalue(), repository=name, tag="1")
    said = engine.images.push(name, tag="1")
    if "digest: sha256:" not in said:
        pytest.skip(f"unproven here: no registry on {REGISTRY}")
    yield f"{name}:1", said.partition("digest: ")[2].partition(" ")[0]
    engine.images.remove(f"{name}:1")


def test_the_module_docker_is_the_sdk() -> None:
    """The folder docker/ of this checkout is no package."""
    assert docker.__file__ and docker.DockerClient


def test_lock_resolves_digests_and_says_which_it_could_not(tiny: Tiny, pushed: tuple[str, str]) -> None:
    name, digest = pushed
    declared = tiny.targets.read_text()
    base = tiny.declared.base.wheels.image
    for part, put in (("wheels", name), ("runtime", f"{name}-absent")):
        before = f'{part} = {{ image = "{base}"'
        tiny.edit(tiny.targets, before, before.replace(base, put))
    assert "unresolved: the digest of" in tiny.succeed("plan", "tiny")
    found, missing = image.resolve(tiny.targets, tiny.declared)
    assert found == {name: digest}
    assert len(missing) == 1 and f"{name}-absent" in missing[0]
    assert tiny.declared.base.wheels.digest == digest
    assert tiny.declared.base.unresolved == [f"{name}-absent"]
    assert len(tiny.targets.read_text().splitlines()) == len(declared.splitlines())


def test_without_an_engine_the_digest_stays_unresolved(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tiny.root}/no.sock")
    before = tiny.targets.read_text()
    found, missing = image.resolve(tiny.targets, tiny.declared)
    assert not found and "No Docker engine answers" in missing[0]
    assert tiny.targets.read_text() == before


def test_readme_lists_what_is_unresolved() -> None:
    catalogue = Catalogue()
    readme = (catalogue.root / "README.md").read_text()
    for name, target in catalogue.targets.items():
        row = next(line for line in readme.splitlines() if line.startswith(f"| `{name}` |"))
        assert ("(digest unresolved)" in row) == (target.base.wheels.digest == "unresolved")
