"""Every source, verified: wheels and sdists by sha256, git trees by commit; from cache, mirror folder or network.

Files are found through pip's configured index and find-links (unearth; nothing of a source is run), or through the
publisher's own index where a release names one. Which place served a file does not matter: the hash decides.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import ssl
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import cast
from urllib.parse import urlsplit

import httpx2
from pip._internal.models.index import PyPI  # the only place where pip says which index is its default
from unearth import PackageFinder, TargetPython
from unearth.errors import UnpackError
from unearth.fetchers import Fetcher, PyPIClient

from recipes.cache import Cache, disk_named, find_file, put, sha256_of
from recipes.model import Pin, Refusal, Release, Target
from recipes.progress import Step, Steps, size

WORKERS = 6  # downloads at a time


@dataclass(frozen=True)
class Artifact:
    """A file to have: one named by a release, or (`file` None) the one of a locked dependency that fits the target."""

    name: str
    version: str
    sha256: str
    file: str | None = None
    index: str | None = None

    @property
    def label(self) -> str:
        return f"{self.name} {self.version}"


@dataclass(frozen=True)
class PipSettings:
    """What `pip config list` says of finding files."""

    indexes: tuple[str, ...]
    find_links: tuple[str, ...]
    trusted_hosts: tuple[str, ...] = ()
    timeout: float = 15.0
    retries: int = 2
    cert: str | None = None

    @classmethod
    def read(cls) -> PipSettings:
        """pip's own settings: its files, then its variables; the later one holds (pip's user guide, Configuration)."""
        listing = subprocess.run(
            [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
        )
        if listing.returncode != 0:
            raise Refusal(
                f"pip's configuration cannot be read ({listing.stderr.strip().splitlines()[-1]}): mend it, "
                "then run again."
            )
        values: dict[str, str] = {}
        for line in sorted(listing.stdout.splitlines(), key=lambda line: line.startswith((":env:", "download."))):
            key, _, value = line.partition("=")
            section, _, name = key.partition(".")
            if section in ("global", "download", ":env:"):
                values[name] = ast.literal_eval(value)
        indexes = [] if "no-index" in values else [values.get("index-url", PyPI.simple_url)]
        return cls(
            indexes=(*indexes, *values.get("extra-index-url", "").split()),
            find_links=tuple(values.get("find-links", "").split()),
            trusted_hosts=tuple(values.get("trusted-host", "").split()),
            timeout=float(values.get("timeout", values.get("default-timeout", 15))),
            retries=int(values.get("retries", 2)),
            cert=values.get("cert"),
        )


def target_tags(target: Target) -> TargetPython:
    """The wheels that fit the target's CPython and its C library, for unearth."""
    newest = int(target.glibc.split(".")[1])
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in range(newest, 4, -1)]
    platforms += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"]
    major, minor = target.python.split(".")
    return TargetPython((int(major), int(minor)), platforms=platforms, impl="cp")


class Downloads:
    """Finds and downloads files; every failure is one sentence that names the package and the file."""

    def __init__(self, cache: Cache, steps: Steps, mirror: Path | None, target: Target) -> None:
        if mirror is not None and not mirror.is_dir():
            raise Refusal(f"The mirror folder {mirror} does not exist: name one that holds files/ and github.com/.")
        self.cache, self._steps, self._mirror, self._target = cache, steps, mirror, target

    @cached_property
    def settings(self) -> PipSettings:
        """pip's settings, read when the first file has to come from the network."""
        return PipSettings.read()

    @cached_property
    def _session(self) -> PyPIClient:
        settings = self.settings
        verify = ssl.create_default_context(cafile=settings.cert) if settings.cert else True
        return PyPIClient(
            trusted_hosts=settings.trusted_hosts, timeout=settings.timeout, verify=verify, follow_redirects=True
        )

    def all(self, artifacts: Iterable[Artifact]) -> dict[str, Path]:
        """Every file, by its sha256; several at a time, the first failure ends it."""
        with ThreadPoolExecutor(WORKERS) as pool:
            jobs = {artifact.sha256: pool.submit(self.file, artifact) for artifact in artifacts}
            try:
                return {sha256: job.result() for sha256, job in jobs.items()}
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def file(self, artifact: Artifact) -> Path:
        """The artifact's file, its sha256 checked."""
        if path := self.cache.file(artifact.sha256):
            return path
        if self._mirror and (path := find_file(self._mirror, artifact.sha256)):
            return self._adopt(path, artifact)
        link = self._find(artifact)
        return self._download(link.url_without_fragment, link.filename, artifact)

    def _adopt(self, path: Path, artifact: Artifact) -> Path:
        partial = self._partial(artifact)
        with disk_named(partial):
            shutil.copyfile(path, partial)
            kept = self.cache.keep_file(partial, path.name, artifact.sha256)
        self._steps.say("fetch", artifact.label, f"{size(kept.stat().st_size)} from the mirror")
        return kept

    def _partial(self, artifact: Artifact) -> Path:
        return self.cache.partial / f"{artifact.name}-{artifact.version}"

    def choose(self, name: str, version: str) -> Path:
        """The wheel of that version which the target would install, whatever its hash: what a lock then pins."""
        finder = self._finder(self.settings.indexes, self.settings.find_links)
        matches = list(finder.find_matches(f"{name}=={version}"))
        if not matches:
            fit = f"Python {self._target.python} and glibc {self._target.glibc}"
            raise Refusal(f"{name} {version} has no wheel for {fit}: constrain it in the recipe that needs it.")
        link = matches[0].link
        return self._download(link.url_without_fragment, link.filename, Artifact(name, version, ""))

    def _finder(self, indexes: Iterable[str], find_links: Iterable[str], every: bool = False) -> PackageFinder:
        settings = self.settings
        return PackageFinder(
            cast(Fetcher, self._session),
            index_urls=indexes,
            find_links=find_links,
            trusted_hosts=settings.trusted_hosts,
            target_python=target_tags(self._target),
            ignore_compatibility=every,
            only_binary=[] if every else [":all:"],
        )

    def _find(self, artifact: Artifact):  # type: ignore[no-untyped-def]
        places = [(self.settings.indexes, self.settings.find_links)]
        if artifact.index:
            places.append(((artifact.index,), ()))
        for indexes, find_links in places:
            finder = self._finder(indexes, find_links, every=artifact.file is not None)
            try:
                matches = [
                    match.link
                    for match in finder.find_matches(f"{artifact.name}=={artifact.version}", allow_yanked=True)
                ]
            except (httpx2.HTTPError, UnpackError, OSError) as error:
                raise self._unreachable(artifact, error) from None
            for link in matches:
                if artifact.file in (None, link.filename):
                    return link
        wanted = artifact.file or f"a wheel for Python {self._target.python}"
        asked = "pip's configured index" + (f" and {artifact.index}" if artifact.index else "")
        raise Refusal(
            f"{artifact.label}: {wanted} is not on {asked}, or it cannot be reached: see `pip config "
            "list`, or pass --mirror DIR."
        )

    def _download(self, url: str, name: str, artifact: Artifact) -> Path:
        partial = self._partial(artifact)
        with self._steps.step("fetch", artifact.label) as step, disk_named(partial):
            try:
                self._stream(url, partial, artifact, step)
                found = sha256_of(partial)
                if artifact.sha256 not in ("", found):
                    raise Refusal(
                        f"{artifact.label}: {name} has sha256 {found}, and {artifact.sha256} is pinned: it "
                        "is corrupted or was "
                        "replaced; nothing was kept, try again or ask its publisher."
                    )
                path = self.cache.keep_file(partial, name, found)
                step.note = size(path.stat().st_size)
            finally:
                partial.unlink(missing_ok=True)
        return path

    def _stream(self, url: str, partial: Path, artifact: Artifact, step: Step) -> None:
        for left in reversed(range(self.settings.retries + 1)):
            try:
                with self._session.get_stream(url) as answer, partial.open("wb") as file:
                    answer.raise_for_status()
                    length = answer.headers.get("content-length")
                    step.expect(int(length) if length else None)
                    for chunk in answer.iter_bytes(2**18):
                        file.write(chunk)
                        step.advance(len(chunk))
                return
            except httpx2.HTTPError as error:
                if left == 0:
                    raise self._unreachable(artifact, error) from None
                self._steps.say("fetch", artifact.label, f"{_reason(error)}; trying again")
                time.sleep(1)

    def _unreachable(self, artifact: Artifact, error: Exception) -> Refusal:
        return Refusal(
            f"{artifact.label}: {_reason(error)}: check the network and `pip config list`, or pass --mirror DIR."
        )


def _reason(error: Exception) -> str:
    match error:
        case httpx2.TimeoutException():
            return "the server sent nothing within the time limit (pip's `timeout`)"
        case httpx2.HTTPStatusError():
            return f"the server answered {error.response.status_code}"
        case httpx2.RemoteProtocolError():
            return "the download broke off before its end"
        case httpx2.TransportError():
            return f"the server cannot be reached ({error})"
        case _:
            return f"the index cannot be read ({error})"


def unpack(archive: Path, into: Path) -> Path:
    """Unpack an sdist and return the one folder in it; a member that would get outside is refused."""
    try:
        with tarfile.open(archive) as tar:
            members = tar.getmembers()
            _refuse_escapes(archive, members)
            for member in members:
                member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
                member.uid, member.gid, member.uname, member.gname = os.getuid(), os.getgid(), "", ""
            tar.extraction_filter = lambda member, _: (
                member
            )  # checked above; Python before 3.11.4 has no filter of its own
            with disk_named(into):
                tar.extractall(into, members)
    except (tarfile.TarError, EOFError, OSError) as error:
        if isinstance(error, OSError) and error.errno:
            raise
        raise Refusal(
            f"{archive.name} is not a readable archive ({error}): remove {archive} and fetch it again."
        ) from None
    tops = list(into.iterdir())
    if len(tops) != 1 or not tops[0].is_dir():
        raise Refusal(
            f"{archive.name} holds {len(tops)} top-level entries, and an sdist has one folder: check the recipe's file."
        )
    return tops[0]


def _refuse_escapes(archive: Path, members: list[tarfile.TarInfo]) -> None:
    links = {PurePosixPath(member.name) for member in members if member.issym() or member.islnk()}
    for member in members:
        path = PurePosixPath(member.name)
        fault = None
        if path.is_absolute():
            fault = "has an absolute path"
        elif ".." in path.parts:
            fault = "leads outside the archive"
        elif not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
            fault = "is a device or a pipe"
        elif any(parent in links for parent in path.parents):
            fault = "is written through a link"
        elif member.issym() or member.islnk():
            base = path.parent if member.issym() else PurePosixPath()
            if member.linkname.startswith("/") or os.path.normpath(base / member.linkname).startswith(".."):
                fault = f"links to {member.linkname}, outside the archive"
        if fault:
            raise Refusal(
                f"{archive.name}: member {member.name!r} {fault}: refused, report it to the package's publisher."
            )


@dataclass
class Git:
    """Git sources by commit. `mirror` holds bare repositories as HOST/OWNER/NAME.git; the cache keeps the same."""

    cache: Cache
    steps: Steps
    mirror: Path | None = None
    seconds: int = field(default_factory=lambda: int(os.environ.get("FUSEBOX_GIT_SECONDS", "600")))

    def tree(self, label: str, release: Release, into: Path) -> Path:
        """The tree of a git release with its submodules, without .git; a moved tag or a missing commit is refused."""
        assert release.repository and release.commit
        if shutil.which("git") is None:
            raise Refusal(f"{label}: its source is a git repository and git is not installed: install git.")
        self._check_out(label, release.repository, release.commit, release.tag, into)
        for submodule in release.submodules:
            self._check_out(
                f"{label} {submodule.path}", submodule.repository, submodule.commit, None, into / submodule.path
            )
        return into

    def _check_out(self, label: str, repository: str, commit: str, tag: str | None, into: Path) -> None:
        bare = self._with_commit(label, repository, commit, tag)
        into.mkdir(parents=True, exist_ok=True)
        archive = into.parent / f"{into.name}.tar"
        with disk_named(into):
            self._git(label, "-C", bare, "archive", "--format=tar", f"--output={archive}", commit)
            with tarfile.open(archive) as tar:
                tar.extractall(into)  # made by git from a verified commit
            archive.unlink()

    def _with_commit(self, label: str, repository: str, commit: str, tag: str | None) -> Path:
        url = urlsplit(repository)
        place = Path(url.netloc, url.path.strip("/").removesuffix(".git") + ".git")
        for root in filter(None, (self.mirror, self.cache.root)):
            if (root / place).is_dir() and self._has(root / place, commit):
                self._refuse_moved_tag(label, root / place, commit, tag)
                return root / place
        if self.mirror and (self.mirror / place).is_dir():
            raise Refusal(
                f"{label}: commit {commit} is not in {self.mirror / place}: update the mirror or correct "
                "the recipe's commit."
            )
        refs = [f"+refs/tags/{tag}:refs/tags/{tag}"] if tag else []
        stall = ["-c", "http.lowSpeedLimit=1000", "-c", "http.lowSpeedTime=30"]
        with self.steps.step("fetch", label), self.cache.scratch("git") as folder:
            bare = self.cache.root / place if (self.cache.root / place).exists() else folder / "new.git"
            self._git(label, "init", "--quiet", "--bare", bare)
            self._git(label, "-C", bare, *stall, "fetch", "--quiet", "--depth=1", repository, commit, *refs)
            self._refuse_moved_tag(label, bare, commit, tag)
            if bare.is_relative_to(folder):
                bare = put(bare, self.cache.root / place)
        return bare

    def _has(self, bare: Path, commit: str) -> bool:
        command = ["git", "-C", str(bare), "cat-file", "-e", f"{commit}^{{commit}}"]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    def _refuse_moved_tag(self, label: str, bare: Path, commit: str, tag: str | None) -> None:
        if tag is None:
            return
        command = ["git", "-C", str(bare), "rev-parse", "--verify", "--quiet", f"refs/tags/{tag}^{{commit}}"]
        now = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        if now != commit:
            where = f"now points to {now}" if now else "is not there"
            raise Refusal(
                f"{label}: tag {tag} {where}, and the recipe pins {commit}: find out why before you change the recipe."
            )

    def _git(self, label: str, *arguments: object) -> None:
        environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
        try:
            done = subprocess.run(
                ["git", *map(str, arguments)],
                capture_output=True,
                text=True,
                timeout=self.seconds,
                env=environment,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise Refusal(
                f"{label}: git did not finish within {self.seconds} s: check the network, or pass --mirror DIR."
            ) from None
        if done.returncode != 0:
            said = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise Refusal(
                f"{label}: git {_verb(arguments)} failed ({said}): check the commit and the network, or "
                "pass --mirror DIR."
            )


def _verb(arguments: Iterable[object]) -> str:
    return next((str(word) for word in arguments if word in ("init", "fetch", "archive")), "")


def artifact_of(pin: Pin) -> Artifact | None:
    """The file of a release that is one."""
    release = pin.release
    if release.file is None or release.sha256 is None:
        return None
    return Artifact(pin.name, release.version, release.sha256, release.file, release.index)


_LOCKED = re.compile(
    r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>\S+) --hash=sha256:(?P<sha256>[0-9a-f]{64})(  # (?P<bytes>\d+) bytes)?$"
)


@dataclass(frozen=True)
class Lock:
    """recipes/lock/TARGET.txt: every dependency of a target, one file each, by sha256."""

    path: Path
    inputs: str
    artifacts: tuple[Artifact, ...]
    bytes: int

    @classmethod
    def read(cls, path: Path, target: Target) -> Lock:
        """Parse a lock; a line that is not one is refused with its number."""
        if not path.exists():
            raise Refusal(f"{path} does not exist: write it with `nox -s lock -- {target.name}`.")
        artifacts, total, inputs = [], 0, ""
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            if line.startswith("# inputs: "):
                inputs = line.removeprefix("# inputs: ")
            if not line or line.startswith("#"):
                continue
            match = _LOCKED.match(line)
            if match is None:
                raise Refusal(
                    f"{path}:{number}: {line[:60]!r} is not a locked requirement: write the file with `nox "
                    f"-s lock -- {target.name}`."
                )
            artifacts.append(Artifact(match["name"], match["version"], match["sha256"]))
            total += int(match["bytes"] or 0)
        return cls(path, inputs, tuple(artifacts), total)
