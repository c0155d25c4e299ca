"""The wheel fusebox-claims: smoke_tests/ without its evidence, to prove an environment that Fusebox did not build.

uv builds it with the backend that is part of it, so that no network is needed. It holds what git has of one commit, and
its version is the time of that commit: the same commit gives the same bytes.
"""

from __future__ import annotations

import io
import subprocess
import tarfile
import tempfile
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from recipes.errors import Refusal
from recipes.files import disk_named, sha256_of, write_json, write_text
from recipes.make.cache import Cache
from recipes.make.environment import run_uv
from recipes.process import commit_of, git_variables
from recipes.ship.wheels import LIST

NAME, SUMMARY = "fusebox-claims", "Prove the PyTorch environment that runs it: FP8, fused operators, CUDA libraries"
REQUIRES_PYTHON = ">=3.8"
PARTS = ("smoke_tests", ":!smoke_tests/evidence")
PROJECT = """
[project]
name = "{name}"
version = "{version}"
description = "{summary}"
license = "Apache-2.0"
license-files = ["LICENSE"]
requires-python = "{python}"
dependencies = ["numpy", "pytest>=8"]

[build-system]
requires = ["uv_build=={uv}"]
build-backend = "uv_build"

[tool.uv.build-backend]
module-name = "smoke_tests"
module-root = ""
"""


def make(root: Path, cache: Cache, into: Path) -> Path:
    """Build the wheel and the list that `nox -s index` reads in a folder; the wheel."""
    commit = commit_of(root, *PARTS)
    if not commit:
        raise Refusal(
            f"{root / 'smoke_tests'} differs from its commit: commit its changes, and run this in a git checkout."
        )
    made = datetime.fromtimestamp(int(_git(root, "log", "-1", "--format=%ct", "--", *PARTS)), UTC)
    number = f"{made:%Y}.{made.month}.{made.day}.{made.hour * 60 + made.minute}"
    with disk_named(into), tempfile.TemporaryDirectory(prefix="fusebox-claims-") as folder:
        files = _git(root, "archive", "--format=tar", "HEAD", "LICENSE", *PARTS)
        with tarfile.open(fileobj=io.BytesIO(files)) as archive:
            archive.extractall(folder, filter="data")
        project = PROJECT.format(name=NAME, version=number, summary=SUMMARY, python=REQUIRES_PYTHON, uv=version("uv"))
        write_text(Path(folder, "pyproject.toml"), project)
        into.mkdir(parents=True, exist_ok=True)
        done = run_uv(cache, "build", "--offline", "--wheel", "--out-dir", str(into), folder)
    if done.returncode != 0:
        raise Refusal(f"uv cannot build {NAME} ({' '.join(done.stderr.split())[-300:]}): correct smoke_tests/.")
    wheel = into / f"{NAME.replace('-', '_')}-{number}-py3-none-any.whl"
    write_json(into / LIST, {"wheels": [_row(wheel, number, commit)]})
    return wheel


def _row(wheel: Path, number: str, commit: str) -> dict[str, object]:
    """The wheel as the index describes it. It belongs to no target, and goes with any torch."""
    return {
        "file": wheel.name, "sha256": sha256_of(wheel), "size": wheel.stat().st_size, "package": NAME,
        "version": number, "summary": SUMMARY, "requires_python": REQUIRES_PYTHON, "target": "", "python": "3",
        "cuda": "any", "torch": "any", "torch_patches": [], "sm": [], "tags": ["py3-none-any"], "patches": [],
        "release": number, "source": commit, "made_from": sha256_of(wheel), "option": None,
        "proof": {"word": "built", "text": "it holds the claims"},
    }  # fmt: skip


def _git(root: Path, *words: str) -> bytes:
    done = subprocess.run(["git", "-C", str(root), *words], env=git_variables(), capture_output=True, check=False)
    if done.returncode != 0:
        raise Refusal(f"git cannot read {root} ({done.stderr.decode().strip()}): run this in a git checkout.")
    return done.stdout
