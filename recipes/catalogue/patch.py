"""Read version patches: what each header says, and which patches are for a release in a target.

A patch is a unified diff with a DEP-3 header (https://dep-team.pages.debian.net/deps/dep3/) and up to three fields of
ours: X-Applies-To, a version range, with a marker for the target's Python if needed; X-Lines, where the hunks are in
each release, if the text is the same in several; X-Needs, what else the target must have for the patch to be safe. It
applies exactly or not at all: an offset, fuzz, no effect and "already upstream" are errors, since each means that
nobody has checked this patch on this version.
"""

from __future__ import annotations

import email.parser
import hashlib
import re
from dataclasses import dataclass, field, replace
from email.message import Message
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from recipes.catalogue.schema import Pin, Target, is_version
from recipes.errors import Refusal
from recipes.files import read_text

REQUIRED = ("Description", "Origin", "Forwarded", "Last-Update", "X-Applies-To")
OURS = ("X-Applies-To", "X-Lines", "X-Needs")
FILE = r"^--- \S.*\n\+\+\+ (\S+)"  # a file's two header lines; a removed line like the first never precedes the second
HUNK = r"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@"


@dataclass(frozen=True)
class Patch:
    """One patch file: `header` is its DEP-3 part, `diff` the rest, `files` the paths it touches, below the tree.

    `lines` holds, by version, the line at which each hunk starts in that release; empty without X-Lines. Of `needs`,
    one must hold in a target: a requirement on another package of it, or a patch that is selected for it.
    """

    path: Path
    package: str
    header: Message = field(compare=False)
    diff: str = field(compare=False, repr=False)
    applies_to: Requirement
    files: tuple[str, ...]
    lines: dict[Version, tuple[int, ...]] = field(compare=False)
    needs: tuple[Requirement | Patch, ...] = field(compare=False)

    @property
    def name(self) -> str:
        """The path as the evidence and docs/status/patches.md show it: patches/transformers/0001-....patch."""
        return f"patches/{self.package}/{self.path.name}"

    @property
    def sha256(self) -> str:
        """The sha256 of the diff alone: rewording the header changes nothing that is built."""
        return hashlib.sha256(self.diff.encode()).hexdigest()

    @property
    def summary(self) -> str:
        """The first line of the description."""
        return str(self.header["Description"]).splitlines()[0]

    @property
    def reason(self) -> str:
        """The description below its first line: the symptom, quoted with ">", and the cause."""
        return "\n".join(line.strip() for line in str(self.header["Description"]).splitlines()[1:])

    def in_upstream(self, version: str) -> str | None:
        """The release that first had the patch's change (Applied-Upstream), if that version has it too."""
        since = re.match(r"\d+(\.\d+)*", str(self.header["Applied-Upstream"] or ""))
        return since[0] if since and Version(version) >= Version(since[0]) else None

    def covers(self, version: str) -> bool:
        """Whether the version is in the patch's range."""
        return self.applies_to.specifier.contains(version, prereleases=True)

    def selects(self, version: str, target: Target) -> bool:
        """Whether the patch is for that version of its package in that target."""
        needed = not self.needs or any(_holds(need, target) for need in self.needs)
        return self.covers(version) and target.applies(self.applies_to) and needed

    def at(self, version: str) -> Patch:
        """The patch with its hunks moved to that release; a release that X-Lines does not list is refused."""
        if not self.lines:
            return self
        if Version(version) not in self.lines:
            raise Refusal(
                f"{self.name}: nobody has checked this patch on {self.package} {version}, which X-Applies-To covers: "
                "add the version to X-Lines with the lines of its hunks and prove it, or bound X-Applies-To."
            )
        return replace(self, diff=_moved(self.diff, self.lines[Version(version)]))


def _holds(need: Requirement | Patch, target: Target) -> bool:
    version = target.packages.get(need.package if isinstance(need, Patch) else canonicalize_name(need.name))
    if version is None:
        return False
    if isinstance(need, Patch):
        return need.selects(version, target)
    return need.specifier.contains(version, prereleases=True) and target.applies(need)


def _moved(diff: str, lines: tuple[int, ...]) -> str:
    """The diff with its hunks' old sides starting at these lines; a new side moves by the lines added before it."""
    starts, grown = iter(lines), 0

    def renewed(match: re.Match[str]) -> str:
        nonlocal grown
        if match[0].startswith("---"):  # the header of the next file
            grown = 0
            return match[0]
        old, new = (int(count or 1) for count in (match[2], match[4]))
        start = next(starts)
        header = f"@@ -{start},{old} +{start + grown},{new} @@"
        grown += new - old
        return header

    return re.sub(rf"{HUNK}|{FILE}", renewed, diff, flags=re.MULTILINE)


def read(path: Path, needed_by: tuple[Path, ...] = ()) -> Patch:
    """Parse a patch file; a missing, repeated or unknown field of the header is refused, as is a missing diff."""
    text = read_text(path)
    if "\r" in text:
        raise Refusal(f"{path} has CRLF line endings, which match no source: save it with LF.")
    head, _, diff = text.partition("\n---\n")
    header = _header(path, head)
    files = _files(path, diff)
    if stray := str(header.get_payload()).strip():  # the lines after it would not be read
        raise Refusal(f"{path}: {stray.splitlines()[0]!r} in its header is not a field: correct or indent the line.")
    applies_to = _requirement(f"{path.parent.name} {header['X-Applies-To']}")
    if applies_to is None:
        raise Refusal(
            f'{path}: X-Applies-To {header["X-Applies-To"]!r} is not a range such as ">=1.8,<1.9": correct it.'
        )
    lines = _lines(path, header["X-Lines"], applies_to, diff) if "X-Lines" in header else {}
    needs = _needs(path, str(header["X-Needs"]), (*needed_by, path)) if "X-Needs" in header else ()
    return Patch(path, path.parent.name, header, diff, applies_to, files, lines, needs)


def _header(path: Path, text: str) -> Message:
    """The DEP-3 header; a missing, repeated or unknown field is refused."""
    header = email.parser.HeaderParser().parsestr(text)
    for name in REQUIRED:
        if not header[name]:
            raise Refusal(f"{path}: the header has no {name}: add it (DEP-3; see patches/README.md).")
    if twice := next((name for name in (*REQUIRED, *OURS) if len(header.get_all(name, [])) > 1), None):
        raise Refusal(f"{path}: the header has {twice} twice: remove one.")
    known = {name.lower() for name in OURS}
    if other := next((name for name in header if name.lower().startswith("x-") and name.lower() not in known), None):
        raise Refusal(f"{path}: {other} is not a known field: correct it to one of {', '.join(OURS)}, or remove it.")
    return header


def _files(path: Path, diff: str) -> tuple[str, ...]:
    """The files that a diff changes, all of them below the tree; each hunk changes something."""
    files = tuple(match.removeprefix("b/") for match in re.findall(FILE, diff, re.MULTILINE))
    hunks = [part for part in re.split(r"^(?=@@ |--- \S.*\n\+\+\+ )", diff, flags=re.MULTILINE) if part[:2] == "@@"]
    if not files or not hunks:
        raise Refusal(f'{path} holds no diff after its header and the line "---": add one, or delete the file.')
    if idle := next((hunk for hunk in hunks if _side(hunk, "-") == _side(hunk, "+")), None):
        raise Refusal(f"{path}: the hunk {idle.splitlines()[0]} changes nothing: correct it, or delete the file.")
    if outside := next((file for file in files if file.startswith("/") or ".." in Path(file).parts), None):
        raise Refusal(
            f"{path} changes {outside}, outside the tree that it is for: correct the path or delete the file."
        )
    return files


def _side(hunk: str, sign: str) -> list[str]:
    return [line[1:] for line in hunk.splitlines() if line.startswith(sign)]


def _requirement(text: str) -> Requirement | None:
    try:
        return Requirement(text)
    except InvalidRequirement:
        return None


def _lines(path: Path, text: str, applies_to: Requirement, diff: str) -> dict[Version, tuple[int, ...]]:
    """X-Lines: one version a line, then the old-side start of each hunk in it."""
    own = tuple(int(match[1]) for match in re.finditer(HUNK, diff, re.MULTILINE))
    lines: dict[Version, tuple[int, ...]] = {}
    for line in text.splitlines():
        version, *starts = line.split() or [""]
        if not is_version(version) or not all(start.isdecimal() for start in starts) or len(starts) != len(own):
            raise Refusal(
                f"{path}: X-Lines {line.strip()!r} is not a version and the first line of each of {len(own)} hunks, "
                'as in "4.36.2 3898": correct it.'
            )
        if Version(version) in lines:
            raise Refusal(f"{path}: X-Lines names {version} twice: remove one.")
        if not applies_to.specifier.contains(version, prereleases=True):
            raise Refusal(f"{path}: X-Lines names {version}, outside X-Applies-To: widen that, or remove the line.")
        lines[Version(version)] = tuple(map(int, starts))
    if own not in lines.values():
        raise Refusal(
            f"{path}: its hunks start at {own}, which X-Lines lists for no version: correct X-Lines or the hunks."
        )
    return lines


def _needs(path: Path, text: str, chain: tuple[Path, ...]) -> tuple[Requirement | Patch, ...]:
    """X-Needs: requirements on packages of the target, or names of patches, with ", or " between them."""
    needs: list[Requirement | Patch] = []
    for need in (part.strip() for part in " ".join(text.split()).split(", or ")):
        if need.startswith("patches/"):
            other = path.parents[2] / need
            if not other.is_file():
                raise Refusal(f"{path}: X-Needs names {need}, which does not exist: correct the name.")
            if other in chain:
                raise Refusal(f"{path}: X-Needs forms a cycle through {need}: break it.")
            needs.append(read(other, chain))
        elif requirement := _requirement(need):
            needs.append(requirement)
        else:
            raise Refusal(
                f'{path}: X-Needs {need!r} is neither a requirement such as "torch >=2.0" nor a patch '
                '("patches/torch/0001-....patch"): correct it.'
            )
    return tuple(needs)


def every(root: Path) -> list[Patch]:
    """All patches of a checkout, by package and number."""
    return [read(path) for path in sorted((root / "patches").glob("*/*.patch"))]


def of_package(root: Path, package: str) -> list[Patch]:
    """The patches of one package, in the order of their numbers."""
    return [read(path) for path in sorted((root / "patches" / package).glob("*.patch"))]


def selected(root: Path, pin: Pin, target: Target) -> list[Patch]:
    """The patches for a pinned package of a target, in order, each with its hunks where they are in that version."""
    version = pin.release.version
    return [patch.at(version) for patch in of_package(root, pin.name) if patch.selects(version, target)]
