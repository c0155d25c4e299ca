"""What a patch's proof holds in its hands: two trees of one release, and the environment to run them in."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from recipes import environment


@dataclass(frozen=True)
class Proof:
    """Both trees of a release and the environment of a target that applies the patch."""

    pristine: Path
    patched: Path
    python: Path

    def run(
        self, script: str, **variables: str
    ) -> tuple[subprocess.CompletedProcess[str], subprocess.CompletedProcess[str]]:
        """Run a Python script with each tree as the current folder and first on the path; pristine, then patched."""
        return self._run(self.pristine, script, variables), self._run(self.patched, script, variables)

    def _run(self, tree: Path, script: str, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
        path = f"{tree / 'src'}:{tree}"
        ours = environment.clean_variables(self.python.parent.parent) | {"PYTHONPATH": path, **variables}
        command = [str(self.python), "-c", script]
        return subprocess.run(command, cwd=tree, env=ours, capture_output=True, text=True, check=False, timeout=120)
