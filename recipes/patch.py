"""Version patches: which apply to a release, and their strict application to an unpacked tree.

A patch is a unified diff with a DEP-3 header (https://dep-team.pages.debian.net/deps/dep3/) and the field X-Applies-To:
a version range, and a marker for the target's Python if need be. It applies exactly or not at all: an offset, fuzz,
no effect and "already upstream" are errors, since each means that nobody has looked at this patch on this version.
"""

from __future__ import annotations

import email.parser
import hashlib
import os
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from email.message import Message
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from recipes.cache import disk_full, sha256_of
from recipes.model import Pin, Refusal, Target
from recipes.process import GIT_ALONE

REQUIRED = ("Description", "Origin", "Forwarded", "Last-Update", "X-Applies-To")


@dataclass(frozen=True)
class Patch:
    """One patch file: `header` is its DEP-3 part, `files` the paths it touches, below the tree."""

    path: Path
    package: str
    header: Message = field(compare=False)
    applies_to: Requirement
    files: tuple[str, ...]

    @property
    def name(self) -> str:
        """The path as the evidence and README show it: patches/transformers/0001-....patch."""
        return f"patches/{self.package}/{self.path.name}"

    @property
    def sha256(self) -> str:
        return sha256_of(self.path)

    @property
    def summary(self) -> str:
        """The first line of the description."""
        return str(self.header["Description"]).splitlines()[0]

    def selects(self, version: str, target: Target) -> bool:
        """Whether the patch is for that version of its package in that target."""
        return self.applies_to.specifier.contains(version, prereleases=True) and target.applies(self.applies_to)


def read(path: Path) -> Patch:
    """Parse a patch file; a header that lacks a field, or no diff at all, is refused."""
    text = path.read_bytes().decode("utf-8")  # not read_text, which would hide CRLF
    if "\r" in text:
        raise Refusal(f"{path} has CRLF line ends, which match no source: save it with LF.")
    head, separator, diff = text.partition("\n---\n")
    header = email.parser.HeaderParser().parsestr(head)
    for name in REQUIRED:
        if not header[name]:
            raise Refusal(f"{path}: the header has no {name}: add it (DEP-3; see patches/README.md).")
    files = tuple(match.removeprefix("b/") for match in re.findall(r"^\+\+\+ (\S+)", diff, re.MULTILINE))
    if not separator or not files:
        raise Refusal(f'{path} holds no diff after its header and the line "---": add one, or delete the file.')
    try:
        applies_to = Requirement(f"{path.parent.name} {header['X-Applies-To']}")
    except InvalidRequirement:
        raise Refusal(
            f'{path}: X-Applies-To {header["X-Applies-To"]!r} is not a range such as ">=1.8,<1.9": correct it.'
        ) from None
    return Patch(path, path.parent.name, header, applies_to, files)


def every(root: Path) -> list[Patch]:
    """All patches of a checkout, by package and number."""
    return [read(path) for path in sorted((root / "patches").glob("*/*.patch"))]


def selected(root: Path, pin: Pin, target: Target) -> list[Patch]:
    """The patches for a pinned package of a target, in the order of their numbers."""
    patches = [read(path) for path in sorted((root / "patches" / pin.name).glob("*.patch"))]
    return [patch for patch in patches if patch.selects(pin.release.version, target)]


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
    if _git_apply(patch, tree, "--reverse", "--check").returncode == 0:
        raise Refusal(f"{patch.name} is already in {tree.name}: set Applied-Upstream and bound X-Applies-To.")
    done = _git_apply(patch, tree, "--verbose")
    said = done.stderr.strip().splitlines() or ["no message"]
    if any("No space left on device" in line for line in said):
        raise disk_full(tree)
    if done.returncode != 0:
        raise Refusal(
            f"{patch.name} does not apply to {tree.name} ({_first_error(said)}): renew it for this version "
            "or bound X-Applies-To."
        )
    if moved := next((line for line in said if "offset" in line or "fuzz" in line), None):
        raise Refusal(
            f"{patch.name} applies to {tree.name} only away from its place ({moved.strip()}): renew its line numbers."
        )
    missing = next((file for file in patch.files if not (tree / file).is_file()), None)
    if missing:
        raise Refusal(
            f"{patch.name} had no effect on {missing} of {tree.name}: check that the tree is not inside a "
            "git repository."
        )


def _git_apply(patch: Patch, tree: Path, *options: str) -> subprocess.CompletedProcess[str]:
    # Inside a repository `git apply` skips files outside the current folder's prefix, with exit code 0.
    ours = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    environment = ours | GIT_ALONE | {"GIT_CEILING_DIRECTORIES": str(tree.resolve().parent), "LC_ALL": "C"}
    command = ["git", "apply", *options, "-p1", str(patch.path.resolve())]
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)


def _first_error(said: list[str]) -> str:
    return next((line.removeprefix("error: ") for line in said if line.startswith("error:")), said[-1])


def apply_all(patches: list[Patch], tree: Path) -> None:
    """Apply patches in order; each must change the tree."""
    for patch in patches:
        before = {file: _hash_or_none(tree / file) for file in patch.files}
        apply(patch, tree)
        unchanged = next((file for file in patch.files if _hash_or_none(tree / file) == before[file]), None)
        if unchanged:
            raise Refusal(
                f"{patch.name} left {unchanged} of {tree.name} as it was: it has no effect, delete or mend it."
            )


def _hash_or_none(path: Path) -> str | None:
    return sha256_of(path) if path.is_file() else None
