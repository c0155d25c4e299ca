"""Git sources by commit, with their submodules, from a mirror folder, the cache or the network."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from urllib.parse import urljoin, urlsplit

from recipes.catalogue.schema import Source, Submodule
from recipes.errors import Refusal
from recipes.files import disk_full, put
from recipes.make.cache import Cache
from recipes.process import GIT_ALONE, git_variables, group
from recipes.progress import Steps


class Failed(Refusal):
    """A git command that failed or took too long; `repository` is the repository that it did not fetch."""

    repository = ""


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
    seconds: int = field(default_factory=lambda: _seconds())

    def fetch(self, label: str, source: Source) -> None:
        """Fetch a git source and its submodules; a moved tag and a missing or different commit are refused."""
        for _ in self._checked(label, source):
            pass

    def fetch_all(self, sources: Iterable[tuple[str, Source]]) -> None:
        """Fetch several sources. If the network does not serve one, the refusal names all that need the network."""
        sources = list(sources)
        for index, (label, source) in enumerate(sources):
            try:
                self.fetch(label, source)
            except Failed as failure:
                missing = self._missing(sources[index:], failure.repository) if failure.repository else {}
                if not missing:
                    raise
                listed = ", ".join(f"{place} (for {', '.join(labels)})" for place, labels in missing.items())
                reason = str(failure).removesuffix(".")
                raise Refusal(f"{reason}; neither the mirror nor the cache has {listed}.") from None

    def _missing(self, sources: list[tuple[str, Source]], beside: str) -> dict[Path, list[str]]:
        """The repositories whose needed commit is in neither the mirror nor the cache, and what needs it."""
        missing: dict[Path, list[str]] = {}
        for label, source in sources:
            for part in self._parts(label, source):
                place = self._place(part.repository)
                places = [root / place for root in (self.cache.root, self.mirror) if root]
                if part.repository != beside and not any(self._points(bare, part.commit) for bare in places):
                    missing.setdefault(place, []).append(part.label)
        return missing

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
                        "to the release's submodules, or to its `without` if no build reads it."
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
        for submodule in source.submodules:
            yield _Part(
                f"{label} {submodule.path}",
                submodule.repository,
                submodule.commit,
                path=submodule.path,
                without=tuple(submodule.without),
            )

    def commit_of(self, label: str, repository: str, tag: str) -> str:
        """The commit that a tag points to, in the mirror or upstream."""
        place = self._place(repository)
        source = str((self.mirror / place).resolve()) if self.mirror and (self.mirror / place).is_dir() else repository
        cure = "check the version and the network, or pass --mirror DIR"
        refs = (f"refs/tags/{tag}", f"refs/tags/{tag}^{{}}")  # the second is for annotated tags only, and comes last
        lines = self._git(label, "ls-remote", source, *refs, cure=cure).splitlines()
        if not lines:
            raise Refusal(f"{label}: {source} has no tag {tag}: check the version.")
        return lines[-1].split()[0]

    def tags(self, label: str, repository: str) -> list[str]:
        """The names of all tags that a repository has upstream; a mirror is not asked, since it may lag behind."""
        cure = "check the network"
        listed = self._git(label, "ls-remote", "--tags", "--refs", repository, cure=cure).splitlines()
        return [line.partition("\trefs/tags/")[2] for line in listed if "\trefs/tags/" in line]

    def submodules(self, label: str, source: Source) -> list[Submodule]:
        """Every submodule that a git source names, nested ones included, except those in its `without`."""
        assert source.repository and source.commit
        pending, submodules = [_Part(label, source.repository, source.commit, source.tag)], []
        while pending:
            part = pending.pop(0)
            bare = self._repository(part)
            urls = self._submodule_urls(part, bare)
            for path, commit in self._gitlinks(part, bare):
                if path not in source.without:
                    submodules.append(Submodule(path=path, repository=urls[path], commit=commit))
                    pending.append(_Part(f"{label} {path}", urls[path], commit, path=path))
        return submodules

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
        urls = {}
        for entry in values.values():
            url = urljoin(f"{part.repository}/", entry["url"]).removesuffix(".git")  # "../other.git" is beside this one
            urls[(PurePosixPath(part.path) / entry["path"]).as_posix()] = url
        return urls

    @staticmethod
    def _place(repository: str) -> Path:
        """Where a repository lies in a mirror or the cache."""
        url = urlsplit(repository)
        return Path(url.netloc, url.path.strip("/").removesuffix(".git") + ".git")

    def _check_out(self, part: _Part, bare: Path, into: Path) -> None:
        into.mkdir(parents=True, exist_ok=True)
        # Not `git archive`, which omits and substitutes what .gitattributes says; and without the user's filters.
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
        cached, source = self.cache.root / place, part.repository
        if self._points(cached, commit) == commit and (
            tag is None or self._points(cached, f"refs/tags/{tag}") == commit
        ):
            return cached
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
        return self._fetched(part, source, cached)

    def _fetched(self, part: _Part, source: str, cached: Path) -> Path:
        """The cached repository with that commit and tag, fetched from a source."""
        label, commit, tag = part.label, part.commit, part.tag
        refs = [f"+refs/tags/{tag}:refs/tags/{tag}"] if tag else []
        settings = ("protocol.version=2", "http.lowSpeedLimit=1000", "http.lowSpeedTime=30")
        alone = ("gc.auto=0", "maintenance.auto=false")  # nothing runs in the background
        options = [word for setting in (*settings, *alone) for word in ("-c", setting)]
        with self.steps.step("fetch", label), self.cache.scratch("git") as folder:
            # Into a copy, since a killed `git fetch` leaves its locks; objects are linked, as git never rewrites them.
            bare = folder / "new.git"
            if cached.is_dir():
                shutil.copytree(cached, bare, ignore=shutil.ignore_patterns("FETCH_HEAD"), copy_function=os.link)
            else:
                self._git(label, "init", "--quiet", "--bare", bare)
            fetch = (f"--git-dir={bare}", "fetch", "--quiet", "--depth=1", source, commit, *refs)
            cure = "check the commit and the network, or pass --mirror DIR"
            if source != part.repository:  # a mirror, which has the commit, but not all of its files
                cure = f"renew {source}, which lacks a part of the commit, or the tag"
            try:
                self._git(label, *options, *fetch, cure=f"{cure}, or remove {cached}" if cached.is_dir() else cure)
            except Failed as failure:
                # If a repository answers with another commit, the recipe is wrong, not the network.
                answered = re.search(r"not our ref|find remote ref|unadvertised object", str(failure))
                failure.repository = "" if answered else part.repository
                raise
            self._refuse_moved_tag(label, bare, commit, tag)
            if cached.is_dir():
                cached.rename(folder / "old.git")
            return put(bare, cached)

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
        """Run git within the time limit and return its output; a failure is refused."""
        environment = git_variables() | {"GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"} | variables
        with group(["git", *map(str, arguments)], self.cache.partial, environment) as process:
            try:
                output = process.communicate(timeout=self.seconds)[0].strip()
            except subprocess.TimeoutExpired:
                raise Failed(
                    f"{label}: git did not finish within {self.seconds} s: check the network, pass --mirror DIR, or "
                    "set FUSEBOX_GIT_SECONDS."
                ) from None
        if "No space left on device" in output:
            raise disk_full(self.cache.root)
        if process.returncode != 0:
            verb = next(word for word in arguments if word in ("init", "fetch", "checkout", "ls-remote"))
            lines = output.splitlines() or ["no message"]
            why = next((line for line in lines if line.startswith("fatal: ")), lines[-1]).rstrip(".")
            raise Failed(f"{label}: git {verb} failed ({why}): {cure}.")
        return output


def _seconds() -> int:
    text = os.environ.get("FUSEBOX_GIT_SECONDS", "600")
    if not text.isdecimal():
        raise Refusal(f"FUSEBOX_GIT_SECONDS is {text!r}, which is not a number of seconds: correct it.")
    return int(text)
