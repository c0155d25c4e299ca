"""A git host, made up: repositories on this machine under the name of one."""

from __future__ import annotations

import subprocess
from pathlib import Path

from recipes.tests.conftest import SOURCE, Tiny


class Upstream:
    """Two local repositories, one the other's submodule, under the name of a host by git's own `insteadOf`."""

    URL = "https://git.example.org/acme/"

    def __init__(self, folder: Path, tiny: Tiny) -> None:
        self.folder, self.tiny = folder, tiny
        self.extra = self.commit("extra", {"extra.txt": "extra\n"})
        self.sound = self.commit("tinypkg", SOURCE, submodule=self.extra)
        self.git("tinypkg", "tag", "v1.0")
        tiny.variables |= {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_VALUE_0": self.URL, "GIT_CONFIG_KEY_0": self.instead()}
        self.pin(self.sound)

    def instead(self, url: str = "") -> str:
        """git's setting that names the place of the host."""
        return f"url.{url or f'file://{self.folder}/'}.insteadOf"

    def git(self, name: str, *arguments: str) -> str:
        """Run git in a repository."""
        identity = ("-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "init.defaultBranch=main")
        command = ["git", "-C", str(self.folder / f"{name}.git"), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def commit(self, name: str, files: dict[str, str], submodule: str | None = None) -> str:
        """Commit files and return the commit."""
        folder = self.folder / f"{name}.git"
        if not folder.exists():
            folder.mkdir(parents=True)
            self.git(name, "init", "--quiet")
        for file, text in files.items():
            (folder / file).write_text(text)
        self.git(name, "add", "--all")
        if submodule:
            self.git(name, "update-index", "--add", "--cacheinfo", f"160000,{submodule},vendor/extra")
        self.git(name, "commit", "--quiet", "--message", "x")
        return self.git(name, "rev-parse", "HEAD")

    def pin(self, commit: str, extra: str | None = None) -> None:
        """Write the recipe: this commit, tag v1.0, the submodule."""
        submodule = f'{{ path = "vendor/extra", repository = "{self.URL}extra", commit = "{extra or self.extra}" }}'
        identity = f'repository = "{self.URL}tinypkg"\ncommit = "{commit}"\ntag = "v1.0"\nsubmodules = [{submodule}]'
        self.tiny.plant("tinypkg", identity=identity, requires=("tinydep",))

    def tree(self) -> dict[str, str]:
        """The unpacked source in the cache: its files."""
        (tree,) = self.tiny.cache.glob("trees/*/tinypkg-1.0")
        return {str(path.relative_to(tree)): path.read_bytes().decode() for path in tree.rglob("*") if path.is_file()}
