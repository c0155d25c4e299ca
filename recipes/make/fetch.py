"""Fetch and verify every source: wheels and sdists by sha256, git trees by commit; from cache, mirror or network.

Files are found through pip's configured index and find-links (unearth; nothing of a source is run), or through the
publisher's own index where a release names one. Which place served a file does not matter: the hash decides.
"""

from __future__ import annotations

import ast
import logging
import os
import shutil
import ssl
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed, wait
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TypeVar, cast

import httpx2
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version
from pip._internal.models.index import PyPI
from unearth import PackageFinder, TargetPython
from unearth.errors import UnpackError
from unearth.evaluator import Package
from unearth.fetchers import Fetcher, PyPIClient
from unearth.link import Link

from recipes.catalogue.lock import Artifact
from recipes.catalogue.schema import Target
from recipes.errors import Refusal
from recipes.files import disk_named, sha256_of
from recipes.make.cache import Cache, find_file
from recipes.progress import Step, Steps, size

WORKERS = 6  # downloads at a time
_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class PipSettings:
    """The settings of `pip config list` that say where to find files."""

    indexes: tuple[str, ...]
    find_links: tuple[str, ...]
    trusted_hosts: tuple[str, ...] = ()
    timeout: float = 15.0
    retries: int = 2
    cert: str | None = None

    @classmethod
    def read(cls) -> PipSettings:
        """Read pip's own settings: its files, then its variables, which win (pip's user guide, Configuration)."""
        listing = subprocess.run(
            [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
        )
        if listing.returncode != 0:
            message = (listing.stderr.strip().splitlines() or ["no message"])[-1].partition(". ")[0].rstrip(".")
            raise Refusal(f"pip's configuration cannot be read ({message}): correct it, then run again.")
        values: dict[str, str] = {}
        sections = ("global", "download", ":env:")
        lines = [line.partition(".") for line in listing.stdout.splitlines()]
        for _, _, setting in sorted(
            (line for line in lines if line[0] in sections), key=lambda line: sections.index(line[0])
        ):
            name, _, value = setting.partition("=")
            values[name] = ast.literal_eval(value)
        alone = values.get("no-index", "").lower() in ("y", "yes", "t", "true", "on", "1")
        indexes = [values.get("index-url", PyPI.simple_url), *values.get("extra-index-url", "").split()]
        links = [os.path.expanduser(link) for link in values.get("find-links", "").split()]  # noqa: PTH111 - or a URL
        try:
            return cls(
                indexes=() if alone else tuple(indexes),
                find_links=tuple(link for link in links if "://" in link or Path(link).exists()),  # as pip does
                trusted_hosts=tuple(values.get("trusted-host", "").split()),
                timeout=float(values.get("timeout", values.get("default-timeout", 15))),
                retries=int(values.get("retries", 2)),
                cert=values.get("cert"),
            )
        except ValueError as error:
            raise Refusal(
                f"pip's timeout or retries is not a number ({error}): correct it (`pip config list`)."
            ) from None


def target_tags(target: Target) -> TargetPython:
    """The wheels that fit the target's CPython and its C library, for unearth."""
    major, minor = target.python.split(".")
    return TargetPython((int(major), int(minor)), platforms=target.platforms, impl="cp")


def wheels_for(target: Target) -> Callable[[Link], bool]:
    """Whether a file is a wheel whose tags fit the target."""
    supported = set(target_tags(target).supported_tags())

    def fits(link: Link) -> bool:
        try:
            return link.is_wheel and not supported.isdisjoint(parse_wheel_filename(link.filename)[3])
        except InvalidWheelFilename:
            return False

    return fits


class Downloads:
    """Finds and downloads files; every failure is one sentence that names the package and the file."""

    def __init__(self, cache: Cache, steps: Steps, mirror: Path | None, target: Target) -> None:
        if mirror is not None and not mirror.is_dir():
            raise Refusal(f"The mirror folder {mirror} does not exist: name one that holds files/ and github.com/.")
        self.cache, self._steps, self._mirror, self._target = cache, steps, mirror, target
        self._stopped = threading.Event()
        self._heard = _Heard()

    @cached_property
    def settings(self) -> PipSettings:
        """pip's settings, read when the first file has to come from the network."""
        return PipSettings.read()

    @cached_property
    def _session(self) -> PyPIClient:
        settings = self.settings
        try:
            verify = ssl.create_default_context(cafile=settings.cert) if settings.cert else True
        except OSError as error:
            raise Refusal(
                f"pip's cert {settings.cert} cannot be used ({error}): correct it (`pip config list`)."
            ) from None
        return PyPIClient(
            trusted_hosts=settings.trusted_hosts, timeout=settings.timeout, verify=verify, follow_redirects=True
        )

    def all(self, artifacts: Iterable[Artifact]) -> dict[str, Path]:
        """Fetch every file; several at a time, and the first failure stops all. sha256 -> path."""
        pool = ThreadPoolExecutor(WORKERS)
        jobs = {artifact.sha256: pool.submit(self.file, artifact) for artifact in dict.fromkeys(artifacts)}
        try:
            for job in as_completed(jobs.values()):
                job.result()
        except BaseException:
            self._stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            wait([job for job in jobs.values() if job.running()], timeout=1)  # one may hang on a stalled server
            raise
        pool.shutdown()
        return {sha256: job.result() for sha256, job in jobs.items()}

    def file(self, artifact: Artifact) -> Path:
        """The artifact's file, its sha256 checked."""
        if path := self.cache.file(artifact.sha256):
            return path
        if self._mirror and (path := find_file(self._mirror, artifact.sha256)):
            return self._adopt(path, artifact)
        link = self._find(artifact)
        return self._download(link.url_without_fragment, link.filename, artifact)

    def place(self, artifact: Artifact, name: str) -> str:
        """The URL of the file of that name on pip's configured index, or on the artifact's own."""
        return str(self._find(replace(artifact, file=name)).url_without_fragment)

    def _adopt(self, path: Path, artifact: Artifact) -> Path:
        partial = self._partial(artifact)
        with disk_named(partial):
            shutil.copyfile(path, partial)
            cached = self.cache.keep_file(partial, path.name, artifact.sha256)
        self._steps.say("fetch", artifact.label, f"{size(cached.stat().st_size)} from {self._mirror}")
        return cached

    def _partial(self, artifact: Artifact) -> Path:
        return self.cache.partial / f"{artifact.name}-{artifact.version}"

    def choose(self, name: str, version: str) -> Path:
        """The wheel of that version which the target would install, whatever its hash; a lock then pins it."""
        links = self._links(Artifact(name, version, ""), self.settings.indexes, self.settings.find_links)
        if not links:
            fit = f"Python {self._target.python} and glibc {self._target.glibc}"
            raise Refusal(f"{name} {version} has no wheel for {fit}: constrain it in the recipe that needs it.")
        return self._download(links[0].url_without_fragment, links[0].filename, Artifact(name, version, ""))

    def published(self, name: str, version: str, like: str) -> Path:
        """The file of that version with the name `like`, else its sdist or fitting wheel; a recipe then pins it."""
        asked = Artifact(name, version, "", file=like)
        links = self._links(asked, self.settings.indexes, self.settings.find_links) or self.of_release(name, version)
        same = next((link for link in links if link.filename == like), None)
        if same is None and like.endswith(".whl"):
            return self.choose(name, version)
        chosen = same or next((link for link in links if link.filename.endswith(".tar.gz")), None)
        if chosen is None:
            raise Refusal(f"{name} {version} has no sdist on pip's configured index: check the version.")
        return self._download(chosen.url_without_fragment, chosen.filename, asked)

    def _links(self, artifact: Artifact, indexes: tuple[str, ...], find_links: tuple[str, ...] = ()) -> list[Link]:
        """The files of that version, best first: any file of a package, fitting files of a dependency."""
        asked = f"{artifact.name}=={artifact.version}"
        fitting = artifact.file is None
        matches = self._ask(
            artifact, indexes, find_links, fitting, lambda finder: finder.find_matches(asked, allow_yanked=True)
        )
        return [match.link for match in matches]

    def releases(self, name: str, index: str | None = None) -> list[Package]:
        """Every file of a package, whatever it fits, that its publisher has not withdrawn; `index` is asked too."""
        settings, asked = self.settings, Artifact(name, "", "", index=index)
        indexes = settings.indexes + ((index,) if index else ())
        packages = self._ask(asked, indexes, settings.find_links, False, lambda finder: finder.find_all_packages(name))
        if not packages:
            where = "pip's configured index" + (f" and {index}" if index else "")
            suspect = "its name" if self._heard.only_404(asked) else "the network"
            raise Refusal(
                f"{name} has no file on {where}{self._heard.of(asked)}: check {suspect} and `pip config list`."
            )
        return packages

    def of_release(self, name: str, version: str) -> list[Link]:
        """Every file of a release on pip's configured index; a release that is not there is refused."""
        every = [each for each in self.releases(name) if each.version]
        if links := [each.link for each in every if Version(str(each.version)) == Version(version)]:
            return links
        known = [Version(str(each.version)) for each in every]
        newest = max(known, key=lambda release: (not release.is_prerelease, release), default="none")
        raise Refusal(
            f"{name} has no release {version} on pip's configured index (the newest is {newest}): correct it."
        )

    def _ask(
        self, artifact: Artifact, indexes: tuple[str, ...], find_links: tuple[str, ...], fitting: bool,
        find: Callable[[PackageFinder], Iterable[Package]],
    ) -> list[Package]:  # fmt: skip
        """What unearth finds on these indexes and in these folders: every file, or the wheels that fit the target."""
        if not indexes and not find_links:
            return []  # otherwise unearth would ask an index of its own choice

        def ask() -> list[Package]:
            finder = PackageFinder(
                cast(Fetcher, self._session),
                index_urls=indexes,
                find_links=find_links,
                trusted_hosts=self.settings.trusted_hosts,
                target_python=target_tags(self._target),
                ignore_compatibility=not fitting,
                only_binary=[":all:"] if fitting else [],
            )
            return list(find(finder))

        try:
            return self._patiently(artifact, ask)
        except (UnpackError, OSError, ValueError) as error:  # a missing index at a file: URL, or an invalid URL
            raise self._unreachable(artifact, error) from None

    def _find(self, artifact: Artifact) -> Link:
        links = self._links(artifact, self.settings.indexes, self.settings.find_links)
        if artifact.index and not any(artifact.file == link.filename for link in links):
            links = self._links(artifact, (artifact.index,))
        for link in links:
            if artifact.file in (None, link.filename):
                return link
        wanted = artifact.file or f"a wheel for Python {self._target.python}"
        asked = "pip's configured index" + (f" and {artifact.index}" if artifact.index else "")
        raise Refusal(
            f"{artifact.label}: {wanted} is not on {asked}{self._heard.of(artifact)}: check the network and "
            "`pip config list`, or pass --mirror DIR."
        )

    def _patiently(self, artifact: Artifact, ask: Callable[[], _Answer]) -> _Answer:
        """Ask a server; if it fails, try again as often as pip's `retries` says."""
        left = self.settings.retries
        while True:
            try:
                return ask()
            except httpx2.HTTPError as error:
                refused = isinstance(error, httpx2.HTTPStatusError) and error.response.is_client_error
                if left <= 0 or refused or self._stopped.is_set():
                    raise self._unreachable(artifact, error) from None
                self._steps.say("fetch", artifact.label, f"{_reason(error)}; trying again")
                left -= 1
                self._stopped.wait(1)

    def _download(self, url: str, name: str, artifact: Artifact) -> Path:
        partial = self._partial(artifact)
        with self._steps.step("fetch", artifact.label) as step, disk_named(partial):
            try:
                self._patiently(artifact, lambda: self._stream(url, partial, step))
                actual = sha256_of(partial)
                if artifact.sha256 not in ("", actual):
                    raise Refusal(
                        f"{artifact.label}: {name} has sha256 {actual}, and {artifact.sha256} is pinned: it "
                        "is corrupted or was replaced; nothing was kept, try again or ask its publisher."
                    )
                path = self.cache.keep_file(partial, name, actual)
                step.note = size(path.stat().st_size)
            finally:
                partial.unlink(missing_ok=True)
        return path

    def _stream(self, url: str, partial: Path, step: Step) -> None:
        identity = {"Accept-Encoding": "identity"}  # the file's own bytes: a .tar.gz must not be unpacked on the way
        with self._session.get_stream(url, headers=identity) as answer, partial.open("wb") as file:
            answer.raise_for_status()
            length = answer.headers.get("content-length")
            step.expect(int(length) if length else None)
            for chunk in answer.iter_raw(2**18):
                if self._stopped.is_set():
                    raise CancelledError
                file.write(chunk)
                step.advance(len(chunk))

    def _unreachable(self, artifact: Artifact, error: Exception) -> Refusal:
        label, mirror = (artifact.label, ", or pass --mirror DIR") if artifact.version else (artifact.name, "")
        return Refusal(f"{label}: {_reason(error)}: check the network and `pip config list`{mirror}.")


class _Heard(logging.Handler):
    """Collects unearth's warnings for the refusal, because unearth goes on without an index that fails."""

    def __init__(self) -> None:
        super().__init__()
        self._warnings: list[str] = []
        logger = logging.getLogger("unearth")
        logger.propagate = False
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self._warnings.append(record.getMessage())

    def of(self, artifact: Artifact) -> str:
        """The warnings about a package, in brackets."""
        messages = self._about(artifact)
        return f" ({'; '.join(messages)})" if messages else ""

    def only_404(self, artifact: Artifact) -> bool:
        """Whether every index that failed answered that it lacks the package."""
        messages = self._about(artifact)
        return bool(messages) and all("(404)" in text for text in messages)

    def _about(self, artifact: Artifact) -> list[str]:
        """The warnings about a package, each once."""
        name = canonicalize_name(artifact.name)
        return list(dict.fromkeys(text.rstrip(".") for text in self._warnings if f"/{name}/" in text))


def _reason(error: Exception) -> str:
    match error:
        case httpx2.TimeoutException():
            return f"{error.request.url.host} sent nothing within the time limit (pip's `timeout`)"
        case httpx2.HTTPStatusError():
            return f"{error.request.url.host} answered {error.response.status_code}"
        case httpx2.RemoteProtocolError():
            return "the download broke off before its end"
        case httpx2.TransportError():
            return f"{error.request.url.host} cannot be reached ({error})"
        case _:
            return f"the index cannot be read ({error})"


def unpack(archive: Path, into: Path) -> Path:
    """Unpack an sdist and return the one folder in it; a member that would land outside is refused."""
    try:
        with disk_named(into), tarfile.open(archive) as tar:
            members = tar.getmembers()
            _refuse_escapes(archive, members)
            for member in members:
                member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
                member.uid, member.gid, member.uname, member.gname = os.getuid(), os.getgid(), "", ""
            # Checked above; Python before 3.11.4 has no filter of its own.
            tar.extraction_filter = lambda member, _: member
            tar.extractall(into, members)
    except (tarfile.TarError, EOFError, OSError, ValueError) as error:
        raise Refusal(
            f"{archive.name} cannot be unpacked ({error}): check the recipe's file, or remove {archive} to fetch "
            "it again."
        ) from None
    tops = list(into.iterdir())
    if len(tops) != 1 or not tops[0].is_dir():
        raise Refusal(
            f"{archive.name} holds {len(tops)} top-level entries, and an sdist has one folder: check the recipe's file."
        )
    return tops[0]


def _refuse_escapes(archive: Path, members: list[tarfile.TarInfo]) -> None:
    links = {PurePosixPath(member.name) for member in members if member.issym() or member.islnk()}
    seen = set[PurePosixPath]()
    for member in members:
        path = PurePosixPath(member.name)
        fault = None
        if path.is_absolute():
            fault = "has an absolute path"
        elif ".." in path.parts:
            fault = "leads outside the archive"
        elif not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
            fault = "is a device or a pipe"
        elif not links.isdisjoint(path.parents) or (path in links and path in seen):
            fault = "is written through a link"
        elif member.issym() or member.islnk():
            to = (path.parent if member.issym() else PurePosixPath()) / member.linkname
            through = {PurePosixPath(os.path.normpath(parent)) for parent in to.parents}
            if to.is_absolute() or os.path.normpath(to).startswith("..") or not links.isdisjoint(through):
                fault = f"links to {member.linkname}, outside the archive or through another link"
        seen.add(path)
        if fault:
            raise Refusal(
                f"{archive.name}: member {member.name!r} {fault}: refused, report it to the package's publisher."
            )
