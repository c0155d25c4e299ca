"""Every source, verified: wheels and sdists by sha256, git trees by commit; from cache, mirror folder or network.

Files are found through pip's configured index and find-links (unearth; nothing of a source is run), or through the
publisher's own index where a release names one. Which place served a file does not matter: the hash decides.
"""

from __future__ import annotations

import ast
import hashlib
import logging
import os
import re
import shutil
import ssl
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed, wait
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TypeVar, cast
from urllib.parse import urljoin, urlsplit

import httpx2
from packaging.utils import canonicalize_name
from pip._internal.models.index import PyPI  # the only place where pip says which index is its default
from unearth import PackageFinder, TargetPython
from unearth.errors import UnpackError
from unearth.fetchers import Fetcher, PyPIClient
from unearth.link import Link

from recipes.cache import Cache, disk_full, disk_named, find_file, put, sha256_of
from recipes.model import Pin, Refusal, Source, Submodule, Target, is_version
from recipes.process import GIT_ALONE, git_variables, group
from recipes.progress import Step, Steps, size

WORKERS = 6  # downloads at a time

_Answer = TypeVar("_Answer")


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
            said = (listing.stderr.strip().splitlines() or ["no message"])[-1].partition(". ")[0].rstrip(".")
            raise Refusal(f"pip's configuration cannot be read ({said}): mend it, then run again.")
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
        """Every file, by its sha256; several at a time, the first failure ends it."""
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

    def _adopt(self, path: Path, artifact: Artifact) -> Path:
        partial = self._partial(artifact)
        with disk_named(partial):
            shutil.copyfile(path, partial)
            kept = self.cache.keep_file(partial, path.name, artifact.sha256)
        self._steps.say("fetch", artifact.label, f"{size(kept.stat().st_size)} from {self._mirror}")
        return kept

    def _partial(self, artifact: Artifact) -> Path:
        return self.cache.partial / f"{artifact.name}-{artifact.version}"

    def choose(self, name: str, version: str) -> Path:
        """The wheel of that version which the target would install, whatever its hash: what a lock then pins."""
        links = self._links(Artifact(name, version, ""), self.settings.indexes, self.settings.find_links)
        if not links:
            fit = f"Python {self._target.python} and glibc {self._target.glibc}"
            raise Refusal(f"{name} {version} has no wheel for {fit}: constrain it in the recipe that needs it.")
        return self._download(links[0].url_without_fragment, links[0].filename, Artifact(name, version, ""))

    def published(self, name: str, version: str, like: str) -> Path:
        """The file of that version that is named `like`, else its sdist or fitting wheel: what a recipe then pins."""
        asked = Artifact(name, version, "", file=like)
        links = self._links(asked, self.settings.indexes, self.settings.find_links)
        same = next((link for link in links if link.filename == like), None)
        if same is None and like.endswith(".whl"):
            return self.choose(name, version)
        found = same or next((link for link in links if link.filename.endswith(".tar.gz")), None)
        if found is None:
            raise Refusal(f"{name} {version} has no sdist on pip's configured index: check the version.")
        return self._download(found.url_without_fragment, found.filename, asked)

    def _links(self, artifact: Artifact, indexes: tuple[str, ...], find_links: tuple[str, ...] = ()) -> list[Link]:
        """The files of that version, the best first: of a package any, of a dependency those that fit."""
        if not indexes and not find_links:
            return []  # unearth would ask an index of its own choice
        named = artifact.file is not None

        def ask() -> list[Link]:
            finder = PackageFinder(
                cast(Fetcher, self._session),
                index_urls=indexes,
                find_links=find_links,
                trusted_hosts=self.settings.trusted_hosts,
                target_python=target_tags(self._target),
                ignore_compatibility=named,
                only_binary=[] if named else [":all:"],
            )
            matches = finder.find_matches(f"{artifact.name}=={artifact.version}", allow_yanked=True)
            return [match.link for match in matches]

        try:
            return self._patiently(artifact, ask)
        except (UnpackError, OSError, ValueError) as error:  # a file: index that is not there, a URL that is none
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
        """Ask a server; where it fails, again as often as pip's `retries` says."""
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
                found = sha256_of(partial)
                if artifact.sha256 not in ("", found):
                    raise Refusal(
                        f"{artifact.label}: {name} has sha256 {found}, and {artifact.sha256} is pinned: it "
                        "is corrupted or was replaced; nothing was kept, try again or ask its publisher."
                    )
                path = self.cache.keep_file(partial, name, found)
                step.note = size(path.stat().st_size)
            finally:
                partial.unlink(missing_ok=True)
        return path

    def _stream(self, url: str, partial: Path, step: Step) -> None:
        identity = {"Accept-Encoding": "identity"}  # the file's own bytes: a .tar.gz is not to be unpacked on the way
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
        return Refusal(
            f"{artifact.label}: {_reason(error)}: check the network and `pip config list`, or pass --mirror DIR."
        )


class _Heard(logging.Handler):
    """What unearth warns of, for the refusal: it goes on without an index that fails."""

    def __init__(self) -> None:
        super().__init__()
        self._said: list[str] = []
        logger = logging.getLogger("unearth")
        logger.propagate = False
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self._said.append(record.getMessage())

    def of(self, artifact: Artifact) -> str:
        """The warnings about a package, in brackets."""
        name = canonicalize_name(artifact.name)
        said = dict.fromkeys(text.rstrip(".") for text in self._said if f"/{name}/" in text)
        return f" ({'; '.join(said)})" if said else ""


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
    """Unpack an sdist and return the one folder in it; a member that would get outside is refused."""
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


@dataclass(frozen=True)
class _Part:
    """A commit of a repository, and where in the tree of a release it goes."""

    label: str
    repository: str
    commit: str
    tag: str | None = None
    path: str = "."
    without: tuple[str, ...] = ()


@dataclass
class Git:
    """Git sources by commit. `mirror` holds bare repositories as HOST/OWNER/NAME.git; the cache keeps the same.

    A mirror's repository is read where it lies; `copies` puts what is needed of it into the cache.
    """

    cache: Cache
    steps: Steps
    mirror: Path | None = None
    copies: bool = False
    seconds: int = field(default_factory=lambda: _git_seconds())

    def fetch(self, label: str, source: Source) -> None:
        """Have a git source and its submodules at hand; a moved tag, a missing or another commit is refused."""
        for _ in self._checked(label, source):
            pass

    def tree(self, label: str, source: Source, into: Path) -> Path:
        """The tree of a git source with its submodules, without .git."""
        for part, bare in self._checked(label, source):
            self._check_out(part, bare, into / part.path)
        return into

    def _checked(self, label: str, source: Source) -> Iterator[tuple[_Part, Path]]:
        """Each part and the repository that holds it; the submodules have to be the commits that the tree names."""
        parts = list(self._parts(label, source))
        pinned, named = {part.path: part for part in parts[1:]}, set[str]()
        for part in parts:
            bare = self._repository(part)
            for path, commit in self._gitlinks(part, bare):
                here = pinned.get(path)
                if here is None and path not in source.without:
                    raise Refusal(
                        f"{label}: its tree has a submodule {path} at commit {commit}, and the recipe has none: add it "
                        "to the release's submodules, or to its without if no build reads it."
                    )
                if here and here.commit != commit:
                    raise Refusal(
                        f"{label}: its tree has {path} at commit {commit}, and the recipe pins {here.commit}: "
                        "correct the recipe."
                    )
                named.add(path)
            yield part, bare
        if strangers := sorted(set(pinned) - named):
            raise Refusal(
                f"{label}: the recipe pins a submodule {strangers[0]}, and the tree has none there: "
                "remove it from the recipe."
            )

    def _gitlinks(self, part: _Part, bare: Path) -> Iterator[tuple[str, str]]:
        """Path in the whole tree, and commit, of each submodule that a part's tree names."""
        command = ["git", f"--git-dir={bare}", "ls-tree", "-r", "-z", part.commit]
        listed = subprocess.run(command, capture_output=True, text=True, env=git_variables(), check=False)
        if listed.returncode != 0:
            raise Refusal(f"{part.label}: {bare} cannot be read ({listed.stderr.strip()[:200]}): remove {bare}.")
        for entry in listed.stdout.split("\0"):
            if entry.startswith("160000 "):
                about, _, path = entry.partition("\t")
                yield (PurePosixPath(part.path) / path).as_posix(), about.split()[2]

    def _parts(self, label: str, source: Source) -> Iterator[_Part]:
        assert source.repository and source.commit
        if shutil.which("git") is None:
            raise Refusal(f"{label}: its source is a git repository and git is not installed: install git.")
        yield _Part(label, source.repository, source.commit, source.tag, without=tuple(source.without))
        for one in source.submodules:
            yield _Part(f"{label} {one.path}", one.repository, one.commit, path=one.path, without=tuple(one.without))

    def commit_of(self, label: str, repository: str, tag: str) -> str:
        """The commit that a tag points to, in the mirror or upstream."""
        place = self._place(repository)
        source = str((self.mirror / place).resolve()) if self.mirror and (self.mirror / place).is_dir() else repository
        cure = "check the version and the network, or pass --mirror DIR"
        refs = (f"refs/tags/{tag}", f"refs/tags/{tag}^{{}}")  # the second of an annotated tag, and then the last
        lines = self._git(label, "ls-remote", source, *refs, cure=cure).splitlines()
        if not lines:
            raise Refusal(f"{label}: {source} has no tag {tag}: check the version.")
        return lines[-1].split()[0]

    def submodules(self, label: str, source: Source) -> list[Submodule]:
        """Every submodule that a git source names, also inside submodules, but for those in its `without`."""
        assert source.repository and source.commit
        pending, found = [_Part(label, source.repository, source.commit, source.tag)], []
        while pending:
            part = pending.pop(0)
            bare = self._repository(part)
            urls = self._submodule_urls(part, bare)
            for path, commit in self._gitlinks(part, bare):
                if path not in source.without:
                    found.append(Submodule(path=path, repository=urls[path], commit=commit))
                    pending.append(_Part(f"{label} {path}", urls[path], commit, path=path))
        return found

    def _submodule_urls(self, part: _Part, bare: Path) -> dict[str, str]:
        """The repository of each submodule by its path in the whole tree (gitmodules(5))."""
        settings = ("config", "--blob", f"{part.commit}:.gitmodules", "--get-regexp", r"^submodule\..*\.(path|url)$")
        command = ["git", f"--git-dir={bare}", *settings]
        listed = subprocess.run(command, capture_output=True, text=True, env=git_variables(), check=False).stdout
        values: dict[str, dict[str, str]] = {}
        for line in listed.splitlines():
            key, _, value = line.partition(" ")
            name, _, kind = key.rpartition(".")
            values.setdefault(name, {})[kind] = value
        found = {}
        for one in values.values():
            url = urljoin(f"{part.repository}/", one["url"]).removesuffix(".git")  # "../other.git" is beside this one
            found[(PurePosixPath(part.path) / one["path"]).as_posix()] = url
        return found

    @staticmethod
    def _place(repository: str) -> Path:
        """Where a repository lies in a mirror or the cache."""
        url = urlsplit(repository)
        return Path(url.netloc, url.path.strip("/").removesuffix(".git") + ".git")

    def _check_out(self, part: _Part, bare: Path, into: Path) -> None:
        into.mkdir(parents=True, exist_ok=True)
        # Not `git archive`, which leaves out and fills in what .gitattributes says; and no filters of the user's.
        with self.cache.scratch("index") as folder:
            alone = GIT_ALONE | {"GIT_INDEX_FILE": str(folder / "index")}
            excluded = [f":(exclude){folder}" for folder in part.without]
            self._git(
                part.label, "-C", into, f"--git-dir={bare}", f"--work-tree={into}",
                "-c", f"core.attributesFile={os.devnull}", "checkout", "--quiet", "--force", part.commit,
                "--", ".", *excluded,
                cure=f"remove {bare} and run again", **alone,
            )  # fmt: skip

    def _repository(self, part: _Part) -> Path:
        """A bare repository with that commit in it, and with the tag that still points there."""
        label, commit, tag = part.label, part.commit, part.tag
        place = self._place(part.repository)
        kept, source = self.cache.root / place, part.repository
        if self._points(kept, commit) == commit and (tag is None or self._points(kept, f"refs/tags/{tag}") == commit):
            return kept
        if self.mirror and (self.mirror / place).is_dir():
            mirrored = (self.mirror / place).resolve()
            if self._points(mirrored, commit) != commit:
                raise Refusal(
                    f"{label}: commit {commit} is not in {mirrored}: update the mirror or correct the recipe's commit."
                )
            if not self.copies:
                self._refuse_moved_tag(label, mirrored, commit, tag)
                return mirrored
            source = str(mirrored)
        refs = [f"+refs/tags/{tag}:refs/tags/{tag}"] if tag else []
        settings = ("protocol.version=2", "http.lowSpeedLimit=1000", "http.lowSpeedTime=30")
        alone = ("gc.auto=0", "maintenance.auto=false")  # nothing goes on in the background
        options = [word for setting in (*settings, *alone) for word in ("-c", setting)]
        with self.steps.step("fetch", label), self.cache.scratch("git") as folder:
            # Into a copy, since a killed `git fetch` leaves its locks; objects are linked, for git rewrites none.
            bare = folder / "new.git"
            if kept.is_dir():
                shutil.copytree(kept, bare, ignore=shutil.ignore_patterns("FETCH_HEAD"), copy_function=os.link)
            else:
                self._git(label, "init", "--quiet", "--bare", bare)
            fetch = (f"--git-dir={bare}", "fetch", "--quiet", "--depth=1", source, commit, *refs)
            cure = "check the commit and the network, or pass --mirror DIR"
            self._git(label, *options, *fetch, cure=f"{cure}, or remove {kept}" if kept.is_dir() else cure)
            self._refuse_moved_tag(label, bare, commit, tag)
            if kept.is_dir():
                kept.rename(folder / "old.git")
            return put(bare, kept)

    def _points(self, bare: Path, name: str) -> str:
        """The commit that a name stands for in a repository, or nothing."""
        command = ["git", f"--git-dir={bare}", "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}"]
        return subprocess.run(command, capture_output=True, text=True, env=git_variables(), check=False).stdout.strip()

    def _refuse_moved_tag(self, label: str, bare: Path, commit: str, tag: str | None) -> None:
        if tag is None:
            return
        if (now := self._points(bare, f"refs/tags/{tag}")) != commit:
            where = f"now points to {now}" if now else "is not there"
            raise Refusal(
                f"{label}: tag {tag} {where}, and the recipe pins {commit}: find out why before you change the recipe."
            )

    def _git(
        self, label: str, *arguments: object, cure: str = "check what git says and run again", **variables: str
    ) -> str:
        """Run git within the time limit and return what it said; a failure is refused."""
        environment = git_variables() | {"GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"} | variables
        with group(["git", *map(str, arguments)], self.cache.partial, environment) as process:
            try:
                said = process.communicate(timeout=self.seconds)[0].strip()
            except subprocess.TimeoutExpired:
                raise Refusal(
                    f"{label}: git did not finish within {self.seconds} s: check the network, pass --mirror DIR, or "
                    "set FUSEBOX_GIT_SECONDS."
                ) from None
        if "No space left on device" in said:
            raise disk_full(self.cache.root)
        if process.returncode != 0:
            verb = next(word for word in arguments if word in ("init", "fetch", "checkout", "ls-remote"))
            lines = said.splitlines() or ["no message"]
            why = next((line for line in lines if line.startswith("fatal: ")), lines[-1]).rstrip(".")
            raise Refusal(f"{label}: git {verb} failed ({why}): {cure}.")
        return said


def _git_seconds() -> int:
    text = os.environ.get("FUSEBOX_GIT_SECONDS", "600")
    if not text.isdecimal():
        raise Refusal(f"FUSEBOX_GIT_SECONDS is {text!r}, which is not a number of seconds: correct it.")
    return int(text)


def artifact_of(pin: Pin) -> Artifact | None:
    """The file of a release that is one."""
    return file_of(pin.name, pin.release)


def file_of(name: str, source: Source) -> Artifact | None:
    """The file of a source that is one."""
    if source.file is None or source.sha256 is None:
        return None
    return Artifact(name, source.metadata_version, source.sha256, source.file, source.index)


_LOCKED = re.compile(
    r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>\S+) --hash=sha256:(?P<sha256>[0-9a-f]{64})(  # (?P<bytes>\d+) bytes)?$"
)


@dataclass(frozen=True)
class Lock:
    """recipes/lock/TARGET.txt: every dependency of a target, one file each, by sha256."""

    path: Path
    sha256: str
    inputs: str
    artifacts: tuple[Artifact, ...]
    bytes: int

    @classmethod
    def read(cls, path: Path, target: Target) -> Lock:
        """Parse a lock; a line that is not one is refused with its number."""
        if not path.exists():
            raise Refusal(f"{path} does not exist: write it with `nox -s lock -- {target.name}`.")
        artifacts, total, inputs, content = [], 0, "", path.read_bytes()
        for number, line in enumerate(content.decode(errors="replace").splitlines(), 1):
            if line.startswith("# inputs: "):
                inputs = line.removeprefix("# inputs: ")
            if not line or line.startswith("#"):
                continue
            match = _LOCKED.match(line)
            if match is None or not is_version(match["version"]):
                raise Refusal(
                    f"{path}:{number}: {line[:60]!r} is not a locked requirement: write the file with `nox "
                    f"-s lock -- {target.name}`."
                )
            artifacts.append(Artifact(match["name"], match["version"], match["sha256"]))
            total += int(match["bytes"] or 0)
        return cls(path, hashlib.sha256(content).hexdigest(), inputs, tuple(artifacts), total)
