"""A patch's proof runs one script on two trees of each pinned release: the pristine one, and one patched up to here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from patches.proof import Proof
from recipes import environment, patch
from recipes.build import Builder
from recipes.cache import Cache
from recipes.fetch import artifact_of, unpack
from recipes.model import Catalogue, Pin
from recipes.plan import Plan, plan
from recipes.progress import Steps


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A proof runs once per pinned release that its patch applies to; a patch that applies to none has no proof."""
    if "proof" in metafunc.fixturenames:
        path = patch_of(metafunc.definition.path)
        catalogue = Catalogue()
        cases = []
        for name in catalogue.targets:
            chosen = plan(catalogue, name)
            cases += [
                (chosen, pin, path) for pin in chosen.pins for one in chosen.patches[pin.name] if one.path == path
            ]
        assert cases, f"{path} applies to no release of any target: delete it, or bound X-Applies-To."
        metafunc.parametrize(
            "proof", cases, indirect=True, ids=[f"{pin.label}-{chosen.target.name}" for chosen, pin, _ in cases]
        )


def patch_of(test: Path) -> Path:
    """test_0001_some_slug.py proves 0001-some-slug.patch."""
    return test.with_name(test.stem.removeprefix("test_").replace("_", "-") + ".patch")


@pytest.fixture
def proof(request: pytest.FixtureRequest, tmp_path: Path) -> Proof:
    """Both trees, unpacked anew, and the target's environment, built if it is not there."""
    chosen, pin, path = request.param
    before = [one for one in chosen.patches[pin.name] if one.path <= path]
    pristine, patched = (unpacked(chosen, pin, tmp_path / name) for name in ("pristine", "patched"))
    patch.apply_all(before, patched)
    return Proof(pristine, patched, built(chosen))


def unpacked(chosen: Plan, pin: Pin, into: Path) -> Path:
    """The pristine source of a pin."""
    cache, artifact = Cache(), artifact_of(pin)
    mirror = os.environ.get("FUSEBOX_MIRROR")
    into.mkdir()
    with Steps() as steps, cache.held(steps.wait):
        builder = Builder(chosen, cache, steps, Path(mirror) if mirror else None)
        if artifact is None:
            return builder.git.tree(pin.label, pin.release, into / pin.name)
        return unpack(builder.downloads.file(artifact), into)


BUILT: dict[str, Path] = {}


def built(chosen: Plan) -> Path:
    """The Python of the target's environment, which is built if it is not there."""
    name = chosen.target.name
    if name not in BUILT:
        command = [sys.executable, "-m", "recipes", "build", name]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        assert made.returncode == 0, made.stderr
        BUILT[name] = environment.python_of(environment.folder(chosen.root, chosen.target) / "env")
    return BUILT[name]
