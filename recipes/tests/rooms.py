"""A room of claims, planted: the rules of smoke_tests/ with made-up tests and a made-up environment."""

import json
import os
import platform
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from recipes.files import ROOT
from recipes.prove.claims import Room

ROOM = ROOT / "smoke_tests"
HERE = platform.machine().replace("_", "-")


@cache
def checkout_room() -> Room:
    """The claims and the code of this checkout, read once for all tests that ask about them."""
    return Room(ROOT)


class PlantedRoom:
    """A copy of the rules with planted tests and a made-up environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "smoke_tests"
        self.folder.mkdir()
        modules = ("__init__", "conftest", "claims", "hardware", "printed", "recorder")
        for name in (*(f"{module}.py" for module in modules), "pytest.ini"):
            shutil.copy(ROOM / name, self.folder)
        shutil.copytree(ROOM / "recorded", self.folder / "recorded", ignore=shutil.ignore_patterns("__pycache__"))
        self.evidence = folder / "out" / "outcomes.json"
        self.manifest = folder / "manifest.json"
        self.describe()

    def describe(self, *packages: str, cuda: str = "none", proves_on: tuple[str, ...] = (HERE,)) -> None:
        """Write the manifest; by default one package, alpha 1.2, on hardware that the target declares."""
        same = {"version": "1.2", "release": "1.2", "kind": "wheel", "patches": []}
        entries = {name: {"module": name.replace("-", "_"), **same} for name in packages or ("alpha",)}
        described = {"target": "planted", "cuda": cuda, "proves_on": proves_on, "stack": "5" * 64, "packages": entries}
        self.manifest.write_text(json.dumps(described))

    def plant(self, text: str, name: str = "test_alpha.py") -> None:
        """Write a test file that starts with the imports all of them need."""
        (self.folder / name).write_text("import pytest\nfrom smoke_tests.claims import needs, proves\n" + text)

    def command(self, *options: str) -> list[str]:
        options = ("-n0", "--manifest", str(self.manifest), "--evidence", str(self.evidence), *options)
        return [sys.executable, "-B", "-m", "pytest", "-p", "xdist", str(self.folder), *options]

    def run(self, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run the claims in a process of their own, with no plugin but pytest-xdist, as in a built environment."""
        env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **environment}
        return subprocess.run(self.command(*options), cwd=self.folder.parent, env=env, capture_output=True, text=True)

    def outcomes(self) -> dict[str, Any]:
        outcomes: dict[str, Any] = json.loads(self.evidence.read_text())
        return outcomes

    def claims(self) -> dict[str, tuple[str, str]]:
        """Outcome and reason of each claim by id."""
        return {claim["id"]: (claim["outcome"], claim["reason"]) for claim in self.outcomes()["claims"]}


def fake_nvidia_smi(folder: Path, *rows: str) -> None:
    """An nvidia-smi that lists these GPUs."""
    folder.mkdir()
    script = folder / "nvidia-smi"
    lines = [f"{index}, GPU-{index}{index}aa, {row}" for index, row in enumerate(rows)]
    script.write_text("#!/bin/sh\ncat <<'END'\n{}\nEND\n".format("\n".join(lines)))
    script.chmod(0o755)
