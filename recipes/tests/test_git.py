"""Git sources: the commit that is pinned and no other, with its submodules, from upstream or a mirror."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from recipes.tests.conftest import OFFLINE, SOURCE, Tiny, spoil
from recipes.tests.upstream import Upstream


@pytest.fixture
def upstream(tiny: Tiny, tmp_path: Path) -> Upstream:
    """The package's source is a git repository now."""
    return Upstream(tmp_path / "upstream", tiny)


PATCHED = SOURCE | {"tinypkg.py": SOURCE["tinypkg.py"].replace("1", "2")}


def test_a_git_source_is_the_whole_commit_with_its_submodules(tiny: Tiny, upstream: Upstream, tmp_path: Path) -> None:
    """And nothing but the commit: neither .gitattributes nor the user's git settings change a byte."""
    files = {".gitattributes": "backend.py export-ignore\nstamp export-subst\n", "stamp": "$Format:%H$\n"}
    upstream.pin(upstream.commit("tinypkg", files, submodule=upstream.extra))
    upstream.git("tinypkg", "tag", "--force", "v1.0")
    (tmp_path / "gitconfig").write_text("[core]\neol = crlf\nautocrlf = true\n")
    tiny.variables |= {f"GIT_{name}": "/nowhere" for name in ("DIR", "WORK_TREE", "INDEX_FILE", "OBJECT_DIRECTORY")}
    tiny.variables |= {"GIT_CONFIG_COUNT": "2", "GIT_CONFIG_KEY_1": "core.autocrlf", "GIT_CONFIG_VALUE_1": "true"}
    tiny.succeed("patch", "tiny", GIT_CONFIG_GLOBAL=str(tmp_path / "gitconfig"))
    assert upstream.tree() == PATCHED | files | {"vendor/extra/extra.txt": "extra\n"}


def test_a_mirror_serves_git_too(tiny: Tiny, upstream: Upstream, tmp_path: Path) -> None:
    """`fetch --into` fills it; then upstream is gone."""
    tiny.succeed("fetch", "tiny", "--into", tmp_path / "mirror")
    tiny.succeed("patch", "tiny")
    sound = upstream.tree()
    shutil.rmtree(tiny.cache)
    shutil.rmtree(upstream.folder)
    tiny.refuse("patch", "tiny", naming=("tinypkg 1.0", "git fetch failed", "--mirror DIR"))
    tiny.succeed("patch", "tiny", "--mirror", tmp_path / "mirror", before=OFFLINE)
    assert upstream.tree() == sound


def test_every_repository_that_a_mirror_lacks_is_named_at_once(tiny: Tiny, upstream: Upstream, tmp_path: Path) -> None:
    """Of the source that fails and of those after it; what the mirror has is not named."""
    tiny.succeed("fetch", "tiny", "--into", tmp_path / "mirror")
    shutil.rmtree(tiny.cache)
    shutil.rmtree(upstream.folder)
    here = tmp_path / "mirror" / "git.example.org" / "acme"
    shutil.rmtree(here / "tinypkg.git")
    sentence = tiny.refuse("fetch", "tiny", "--mirror", tmp_path / "mirror", naming=("tinypkg 1.0: git fetch failed",))
    assert "extra.git" not in sentence
    shutil.rmtree(here / "extra.git")
    naming = ("tinypkg 1.0: git fetch failed", "git.example.org/acme/extra.git (for tinypkg 1.0 vendor/extra)")
    tiny.refuse("fetch", "tiny", "--mirror", tmp_path / "mirror", naming=naming)


def test_a_mirror_without_the_commit_is_refused(tiny: Tiny, upstream: Upstream, tmp_path: Path) -> None:
    """A mirror that lags behind is named; upstream is not asked instead."""
    tiny.succeed("fetch", "tiny", "--into", tmp_path / "mirror")
    shutil.rmtree(tiny.cache)
    upstream.pin(upstream.commit("tinypkg", {"new.txt": ""}))
    naming = ("tinypkg 1.0", "git.example.org/acme/tinypkg.git", "update the mirror")
    tiny.refuse("fetch", "tiny", "--mirror", tmp_path / "mirror", naming=naming)


def test_a_mirror_with_a_part_of_the_commit_is_named(tiny: Tiny, upstream: Upstream, tmp_path: Path) -> None:
    """Git says "early EOF" of it, as of a network that fails."""
    tiny.succeed("fetch", "tiny", "--into", tmp_path / "mirror")
    shutil.rmtree(tiny.cache)
    bare = tmp_path / "mirror" / "git.example.org" / "acme" / "extra.git"
    git = ("git", f"--git-dir={bare}")
    for pack in (bare / "objects" / "pack").glob("*.pack"):
        with pack.rename(tmp_path / pack.name).open("rb") as objects:
            subprocess.run([*git, "unpack-objects", "-q"], stdin=objects, check=True)
    named = subprocess.run(
        [*git, "rev-parse", f"{upstream.extra}:extra.txt"], capture_output=True, text=True, check=True
    )
    blob = named.stdout.strip()
    (bare / "objects" / blob[:2] / blob[2:]).unlink()
    naming = ("tinypkg 1.0 vendor/extra: git fetch failed", f"renew {bare}, which lacks a part of the commit")
    tiny.refuse("fetch", "tiny", "--into", tmp_path / "other", "--mirror", tmp_path / "mirror", naming=naming)


@pytest.mark.parametrize("cached", [False, True])
def test_a_moved_tag_is_refused(tiny: Tiny, upstream: Upstream, cached: bool) -> None:
    """Both commits are named; also where the cache holds the repository already; and it works once the tag is back."""
    if cached:
        tiny.succeed("fetch", "tiny")
    moved = upstream.commit("tinypkg", {"new.txt": ""}, submodule=upstream.extra)
    upstream.git("tinypkg", "tag", "--force", "v1.0")
    upstream.pin(upstream.commit("tinypkg", {"newer.txt": ""}, submodule=upstream.extra))
    tiny.refuse("fetch", "tiny", naming=("tinypkg 1.0", "tag v1.0", moved, "find out why"))
    upstream.git("tinypkg", "tag", "--force", "v1.0", "HEAD")
    tiny.succeed("patch", "tiny")
    assert upstream.tree() == PATCHED | {"new.txt": "", "newer.txt": "", "vendor/extra/extra.txt": "extra\n"}


def test_a_missing_commit_is_refused(tiny: Tiny, upstream: Upstream) -> None:
    """Once the right commit is pinned, the same cache goes on."""
    upstream.pin("0" * 40)
    tiny.refuse("fetch", "tiny", naming=("tinypkg 1.0", "git fetch failed", "check the commit"))
    upstream.pin(upstream.sound)
    tiny.succeed("patch", "tiny")
    assert upstream.tree() == PATCHED | {"vendor/extra/extra.txt": "extra\n"}


def test_a_commit_that_a_forced_push_removed_is_refused(tiny: Tiny, upstream: Upstream) -> None:
    """Upstream's branch was rewritten and swept: the pinned commit is nowhere, and no other is taken instead."""
    upstream.git("tinypkg", "tag", "--delete", "v1.0")
    upstream.git("tinypkg", "commit", "--amend", "--quiet", "--message", "rewritten")
    upstream.git("tinypkg", "tag", "v1.0")
    upstream.git("tinypkg", "reflog", "expire", "--expire=now", "--all")
    upstream.git("tinypkg", "gc", "--quiet", "--prune=now")
    tiny.refuse("fetch", "tiny", naming=("tinypkg 1.0", "git fetch failed", "check the commit"))
    assert not list(tiny.cache.glob("git.example.org/*/*"))


def test_a_submodule_at_another_commit_is_refused(tiny: Tiny, upstream: Upstream) -> None:
    """The commit that the tree names is the one to pin."""
    other = upstream.commit("extra", {"extra.txt": "another\n"})
    upstream.pin(upstream.sound, other)
    tiny.refuse("fetch", "tiny", naming=("tinypkg 1.0", "vendor/extra", upstream.extra, other, "correct the recipe"))


def test_a_submodule_whose_commit_is_gone_is_refused(tiny: Tiny, upstream: Upstream) -> None:
    """Named by its place in the tree."""
    upstream.pin(upstream.commit("tinypkg", {}, submodule="1" * 40), "1" * 40)
    upstream.git("tinypkg", "tag", "--force", "v1.0")
    tiny.refuse("fetch", "tiny", naming=("tinypkg 1.0 vendor/extra", "git fetch failed", "check the commit"))


@pytest.mark.parametrize("case", ["not declared", "left out", "not in the tree"])
def test_every_submodule_of_the_tree_is_declared_or_left_out(tiny: Tiny, upstream: Upstream, case: str) -> None:
    """An empty folder where a submodule should be would only be seen by the compiler."""
    recipe = tiny.recipe("tinypkg")
    declared = re.search(r"^submodules = .*$", recipe.read_text(), re.MULTILINE)
    assert declared
    match case:
        case "not declared":
            tiny.edit(recipe, declared[0], "")
            tiny.refuse("fetch", "tiny", naming=("tinypkg 1.0", "vendor/extra", upstream.extra, "the recipe has none"))
        case "left out":
            tiny.edit(recipe, declared[0], 'without = ["vendor/extra"]')
            tiny.succeed("patch", "tiny")
            assert upstream.tree() == PATCHED
        case "not in the tree":
            upstream.git("tinypkg", "rm", "--quiet", "--cached", "vendor/extra")
            upstream.pin(upstream.commit("tinypkg", {"new.txt": ""}))
            upstream.git("tinypkg", "tag", "--force", "v1.0")
            tiny.refuse("fetch", "tiny", naming=("tinypkg 1.0", "vendor/extra", "the tree has none there"))


def test_a_moved_tag_of_a_mirror_is_refused(tiny: Tiny, upstream: Upstream, tmp_path: Path) -> None:
    """A mirror is read where it lies, with the same checks."""
    tiny.succeed("fetch", "tiny", "--into", tmp_path / "mirror")
    bare = tmp_path / "mirror" / "git.example.org" / "acme" / "tinypkg.git"
    tree = subprocess.run(["git", f"--git-dir={bare}", "mktree"], input="", capture_output=True, text=True, check=True)
    subprocess.run(
        ["git", f"--git-dir={bare}", "-c", "user.name=A", "-c", "user.email=a@example.org", "tag", "--force", "v1.0",
         tree.stdout.strip()], capture_output=True, check=True,
    )  # fmt: skip
    shutil.rmtree(tiny.cache)
    tiny.refuse("fetch", "tiny", "--mirror", tmp_path / "mirror", naming=("tinypkg 1.0", "tag v1.0"))


def test_a_missing_tag_is_refused(tiny: Tiny, upstream: Upstream) -> None:
    """A deleted tag is as suspicious as a moved one."""
    upstream.git("tinypkg", "tag", "--delete", "v1.0")
    tiny.refuse("fetch", "tiny", naming=("tinypkg 1.0", "refs/tags/v1.0"))


def accepted(server: socket.socket) -> Iterator[socket.socket]:
    """Every connection until the server is closed; none is answered."""
    with contextlib.suppress(OSError):
        while True:
            yield server.accept()[0]


@pytest.fixture
def stalling() -> Iterator[str]:
    """The address of a server that takes connections and says nothing."""
    held: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=lambda: held.extend(accepted(server)), daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}/"


def test_a_stalled_git_server_is_given_up(tiny: Tiny, upstream: Upstream, stalling: str) -> None:
    """After FUSEBOX_GIT_SECONDS, and with everything that git started."""
    started = time.monotonic()
    sound = dict(tiny.variables)
    tiny.variables |= {"FUSEBOX_GIT_SECONDS": "1", "GIT_CONFIG_KEY_0": upstream.instead(stalling)}
    tiny.refuse("fetch", "tiny", naming=("tinypkg 1.0", "git did not finish within 1 s", "--mirror DIR"))
    assert time.monotonic() - started < 8
    tiny.variables = sound
    tiny.succeed("fetch", "tiny")


def test_a_time_limit_that_is_none_is_refused(tiny: Tiny) -> None:
    """FUSEBOX_GIT_SECONDS is a number."""
    tiny.refuse("fetch", "tiny", naming=("FUSEBOX_GIT_SECONDS", "'soon'"), FUSEBOX_GIT_SECONDS="soon")


def test_a_git_source_without_git_is_refused(tiny: Tiny, upstream: Upstream, tmp_path: Path) -> None:
    """The package that needs it is named."""
    (tmp_path / "bin").mkdir()
    tiny.refuse("fetch", "tiny", naming=("tinypkg 1.0", "install git"), PATH=str(tmp_path / "bin"))


def test_a_damaged_repository_in_the_cache_is_refused(tiny: Tiny, upstream: Upstream) -> None:
    """And named, to be removed; git's own message stands in the sentence."""
    tiny.succeed("fetch", "tiny")
    bare = tiny.cache / "git.example.org" / "acme" / "tinypkg.git"
    for path in bare.glob("objects/??/*"):
        path.chmod(0o644)
        spoil(path)
    tiny.refuse("patch", "tiny", naming=("tinypkg 1.0", f"remove {bare}"))
    shutil.rmtree(bare)
    tiny.succeed("patch", "tiny")
    assert json.loads(next(tiny.cache.glob("trees/*/tree.json")).read_text())["source"] == "tinypkg 1.0"


def test_locks_of_a_killed_git_do_not_stay(tiny: Tiny, upstream: Upstream) -> None:
    """A fetch into the cache works on a copy: what was there stays usable."""
    tiny.succeed("fetch", "tiny")
    bare = tiny.cache / "git.example.org" / "acme" / "tinypkg.git"
    before = {path: path.stat().st_ino for path in bare.rglob("*.pack")}
    upstream.pin(upstream.commit("tinypkg", {"new.txt": ""}, submodule=upstream.extra))
    upstream.git("tinypkg", "tag", "--force", "v1.0")
    tiny.succeed("fetch", "tiny")
    assert before.items() <= {path: path.stat().st_ino for path in bare.rglob("*.pack")}.items()
    assert not any(bare.rglob("*.lock")) and not any((tiny.cache / "partial").iterdir())
