"""What a patch's proof works with: two trees of one release, and the environment to run them in."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from recipes.catalogue.patch import read
from recipes.make import environment
from recipes.make.patch import apply

LINES = 8  # of an output that go into the record


@dataclass(frozen=True)
class Proof:
    """Both trees of a release, the Python that runs them, and what every run so far printed.

    `path` comes after the tree on the path and before the environment's own packages; `places` maps folders of this
    machine to the words that stand for them in a record.
    """

    pristine: Path
    patched: Path
    python: Path
    version: str
    path: tuple[Path, ...] = ()
    places: dict[Path, str] = field(default_factory=dict)
    runs: list[dict[str, Any]] = field(default_factory=list)

    def with_patch_beside(self, file: str, version: str, into: Path) -> Proof:
        """The same proof, with a patch of patches/ applied to that version in a hard-linked copy of BESIDE's wheel."""
        shutil.copytree(self.path[0], into, symlinks=True, copy_function=os.link)
        apply(read(Path(__file__).parent / file).at(version), into)
        return replace(self, path=(into,), places={**self.places, into: "BESIDE"})

    def run(
        self, script: str, **variables: str
    ) -> tuple[subprocess.CompletedProcess[str], subprocess.CompletedProcess[str]]:
        """Run a Python script with each tree as the current folder and first on the path; pristine, then patched."""
        pristine, patched = (self._run(tree, script, variables) for tree in (self.pristine, self.patched))
        self.runs.append({"pristine": self._printed(pristine), "patched": self._printed(patched)})
        return pristine, patched

    def _run(self, tree: Path, script: str, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
        settings = environment.clean_variables(self.python.parent.parent)
        # Nothing of this machine decides what is printed: no GPU, no warnings, which differ between machines.
        settings |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
        settings |= {"PYTHONPATH": ":".join(map(str, (tree / "src", tree, *self.path)))}
        command = [str(self.python), "-c", script]
        with tempfile.TemporaryDirectory() as home:  # the user's could hold settings and caches
            settings |= {"HOME": home, "TMPDIR": home, **variables}
            done = subprocess.run(
                command, cwd=tree, env=settings, capture_output=True, text=True, check=False, timeout=120
            )
        for stream in ("stdout", "stderr"):
            setattr(done, stream, getattr(done, stream).replace(home, "HOME"))
        return done

    def _printed(self, done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
        """Exit code and last lines, the same on every machine; without stderr of a run that succeeds, which is not."""
        text = done.stdout + (done.stderr if done.returncode else "")
        for place in sorted(self.places, key=lambda place: -len(str(place))):
            text = text.replace(str(place), self.places[place])
        text = re.sub(r"\b0x[0-9a-f]{6,}\b", "0x...", re.sub(r"\btmp[a-z0-9_]{8}\b", "tmp...", text))
        return {"code": done.returncode, "output": text.splitlines()[-LINES:]}
