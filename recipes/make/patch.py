"""Patches applied to an unpacked tree, exactly or not at all."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path

from recipes.catalogue.patch import Patch
from recipes.errors import Refusal
from recipes.files import disk_full, sha256_of
from recipes.process import GIT_ALONE


def tree_hash(tree: Path) -> str:
    """The sha256 of a tree's content: relative paths, executable bits, bytes and link targets."""
    digest = hashlib.sha256()
    for path in sorted(tree.rglob("*")):
        name = path.relative_to(tree).as_posix()
        if path.is_symlink():
            digest.update(f"link {name} {path.readlink()}\n".encode())
        elif path.is_file():
            executable = "x" if path.stat().st_mode & 0o100 else "-"
            digest.update(f"file {name} {executable} {sha256_of(path)}\n".encode())
    return digest.hexdigest()


def apply(patch: Patch, tree: Path) -> None:
    """Apply a patch to a tree (which must not be a git checkout of its own); anything but an exact fit is refused."""
    if shutil.which("git") is None:
        raise Refusal(f"{patch.name} needs `git apply`, and git is not installed: install git.")
    if (tree / ".git").exists():
        raise Refusal(
            f"{patch.name} is for an exported tree, and {tree.name} is a git repository, whose settings and attributes "
            "would affect the result: export the commit without .git."
        )
    if _git_apply(patch, tree, "--reverse", "--check").returncode == 0:
        raise Refusal(f"{patch.name} is already in {tree.name}: set Applied-Upstream and bound X-Applies-To.")
    if crlf := next((file for file in patch.files if (tree / file).is_file() and _has_crlf(tree / file)), None):
        raise Refusal(
            f"{patch.name} has LF line endings, and {crlf} of {tree.name} has CRLF: unpack that source again."
        )
    before = {file: _hash_or_none(tree / file) for file in patch.files}
    done = _git_apply(patch, tree, "--verbose")
    messages = done.stderr.strip().splitlines() or ["no message"]
    if any("No space left on device" in line for line in messages):
        raise disk_full(tree)
    if done.returncode != 0:
        raise Refusal(
            f"{patch.name} does not apply to {tree.name} ({_first_error(messages)}): renew it for this version "
            "or bound X-Applies-To."
        )
    if moved := next((line for line in messages if re.search(r"\(offset|fuzz", line)), None):
        raise Refusal(
            f"{patch.name} applies to {tree.name} only at another place ({moved.strip()}): renew its line numbers."
        )
    if idle := next((file for file in patch.files if _hash_or_none(tree / file) == before[file]), None):
        raise Refusal(
            f"{patch.name} had no effect on {idle} of {tree.name}: check that the tree is not inside a git repository."
        )


def _has_crlf(path: Path) -> bool:
    return b"\r\n" in path.read_bytes()


def _git_apply(patch: Patch, tree: Path, *options: str) -> subprocess.CompletedProcess[str]:
    # Inside a repository `git apply` skips files outside the current folder's prefix, with exit code 0.
    ours = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    environment = ours | GIT_ALONE | {"GIT_CEILING_DIRECTORIES": str(tree.resolve().parent), "LC_ALL": "C"}
    command = ["git", "apply", *options, "-p1"]
    return subprocess.run(
        command, cwd=tree, env=environment, input=patch.diff, capture_output=True, encoding="utf-8", check=False
    )


def _first_error(messages: list[str]) -> str:
    errors = [line.removeprefix("error: ") for line in messages if line.startswith("error: ")]
    return next((error for error in errors if not error.startswith("while searching")), messages[-1])


def apply_all(patches: list[Patch], tree: Path) -> None:
    """Apply patches in order."""
    for patch in patches:
        apply(patch, tree)


def _hash_or_none(path: Path) -> str | None:
    return sha256_of(path) if path.is_file() else None
