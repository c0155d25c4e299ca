"""Where files are kept, and how they get there complete.

    CACHE/files/SHA256/NAME            downloads; a mirror folder has the same layout
    CACHE/github.com/OWNER/NAME.git    bare git repositories, likewise
    CACHE/trees/KEY/                   patched sources: the tree, and tree.json
    CACHE/wheels/KEY/                  built wheels: NAME.whl, wheel.json, build.log
    CACHE/uv/                          uv's own cache of the package index
    CACHE/CACHEDIR.TAG, lock           mark the folder as ours, and as in use
    CACHE/partial/                     files being written; the next run removes leftovers
    ROOT/build/TARGET/                 of one checkout: env/ (the environment), evidence/, bench/, mutants/, image/,
                                       logs of failed builds, and lock (marks the folder as in use)

A name outside partial/ is only ever given by renaming something complete and synced, so a killed run leaves nothing
half-written there.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from recipes import process
from recipes.errors import Refusal
from recipes.files import disk_named, put, remove, sha256_of, write_text

LONGEST = 200  # of the cache's path: Linux reads 255 bytes of a shebang line, which names a Python in the cache
TAG = "CACHEDIR.TAG"  # https://bford.info/cachedir/: backup tools skip such a folder, and we recognize ours by it
SIGNATURE = "Signature: 8a477f597d28d172789f06886806bc55"


def default_cache() -> Path:
    """FUSEBOX_CACHE, or fusebox/ in the user's cache folder (XDG Base Directory); builds run in it."""
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # a user without an entry in the system's user database
        home = None
    if not (chosen := os.environ.get("FUSEBOX_CACHE") or (home and home / "fusebox")):
        raise Refusal("There is no place for downloads and wheels: set HOME, or FUSEBOX_CACHE to a folder.")
    if len(os.path.abspath(chosen)) > LONGEST:  # noqa: PTH100, since a name that is too long cannot be resolved
        raise Refusal(
            f"The cache's folder {str(chosen)[:60]}... has a name of {len(str(chosen))} characters, and scripts in it "
            f"cannot start from a path of more than {LONGEST}: set FUSEBOX_CACHE to a shorter path."
        )
    root = Path(chosen).resolve()
    if odd := re.search(r"[\s'\",:#{}]", str(root)):
        raise Refusal(
            f"{root}: compilers fail in a folder with {odd[0]!r} in its name: set FUSEBOX_CACHE to another one."
        )
    return root


class Cache:
    """One cache folder, used by one run at a time (`held`)."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = root or default_cache()

    @property
    def partial(self) -> Path:
        return self.root / "partial"

    @contextlib.contextmanager
    def held(self, waiting: Callable[[str], None]) -> Iterator[None]:
        """Hold the cache for one run, after removing what a killed run left; another run waits and says for which."""
        with disk_named(self.root):
            try:
                self.root.mkdir(parents=True, exist_ok=True)
            except (FileExistsError, NotADirectoryError):
                raise Refusal(f"{self.root} is not a folder: choose another place with FUSEBOX_CACHE.") from None
            self._refuse_other_things()
            with process.held(self.root, waiting):
                for left in (self.partial, *self.root.glob("uv/.tmp*"), *self.root.glob(f".{TAG}.*")):
                    remove(left)
                if not (self.root / TAG).exists():
                    write_text(self.root / TAG, f"{SIGNATURE}\n# Fusebox's cache or mirror.\n")
                self.partial.mkdir()
                try:
                    yield
                except (FileExistsError, NotADirectoryError) as error:
                    raise Refusal(
                        f"{error.filename} is there already, or a file is where its folder should be: remove it, or "
                        "choose another place."
                    ) from None

    def _refuse_other_things(self) -> None:
        """Refuse a folder that holds other files before anything in it is written or removed."""
        names = {path.name for path in self.root.iterdir() if not path.name.startswith(f".{TAG}.")}
        if TAG in names or {"lock", "partial"} <= names:  # the latter is a cache made before the mark existed
            return
        lock = self.root / "lock"  # alone and with a process's number: the run was killed before it made the mark
        if names == {lock.name} and lock.is_file() and not re.search(r"[^\d\s]", lock.read_text(errors="replace")):
            return
        if names:
            raise Refusal(f"{self.root} holds other things ({min(names)}): choose an empty or a new folder.")

    @contextlib.contextmanager
    def scratch(self, name: str) -> Iterator[Path]:
        """A new folder under partial/, removed at the end; its path is the same in each run, so that builds repeat."""
        folder = self.partial / name
        with disk_named(folder):
            folder.mkdir(parents=True)
            try:
                yield folder
            finally:
                shutil.rmtree(folder, ignore_errors=True)

    def clear(self) -> None:
        """Remove everything that runs keep there, and nothing else; `lock` stays, since another run may wait for it."""
        for name in ("files", "github.com", "trees", "wheels", "uv", "partial"):
            remove(self.root / name)

    def file(self, sha256: str) -> Path | None:
        """The downloaded file with that hash, checked; a damaged file is removed."""
        return find_file(self.root, sha256, drop_damaged=True)

    def keep_file(self, path: Path, name: str, sha256: str) -> Path:
        """Keep a checked file under its hash."""
        return put(path, self.root / "files" / sha256 / name)

    def wheel(self, key: str) -> tuple[Path, dict[str, Any]] | None:
        """The wheel built for that key and its record; a wheel whose bytes changed is removed."""
        folder = self.root / "wheels" / key
        record = self.record(folder / "wheel.json", "file", "sha256")
        if record is None:
            return None
        wheel = folder / record["file"]
        if not wheel.is_file() or sha256_of(wheel) != record["sha256"]:
            shutil.rmtree(folder)
            return None
        return wheel, record

    def record(self, path: Path, *keys: str) -> dict[str, Any] | None:
        """A record with these keys; a record that lacks one is removed, with the folder that it describes."""
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            return dict(record, **{key: record[key] for key in keys})
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            shutil.rmtree(path.parent, ignore_errors=True)
            return None


def find_file(root: Path, sha256: str, *, drop_damaged: bool = False) -> Path | None:
    """The file with that hash in a folder of the cache's layout; a damaged one is refused, or removed if it is ours."""
    for path in filter(Path.is_file, (root / "files" / sha256).glob("*")):
        if sha256_of(path) == sha256:
            return path
        if not drop_damaged:
            raise Refusal(f"{path} does not have the sha256 of its folder: replace it, or remove it from the mirror.")
        path.unlink()
    return None
