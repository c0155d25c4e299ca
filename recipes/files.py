"""Files: read, or refused with their path; renamed into place only when complete; identified by hash."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from recipes.errors import Refusal

OTHER_CACHE = "choose another place with FUSEBOX_CACHE"
OTHER_CHECKOUT = "move the checkout to a larger disk"
ROOT = Path(__file__).resolve().parent.parent  # of the checkout


def digest_of(value: object) -> str:
    """The sha256, in hexadecimal, of a JSON value in its canonical form."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def read_text(path: Path) -> str:
    """The text of a file of the checkout, line ends unchanged; an unreadable file is refused with its path."""
    try:
        return path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise Refusal(f"{path} does not exist: run from a complete checkout of Fusebox.") from None
    except OSError as error:
        raise Refusal(
            f"{path} cannot be read ({error.strerror}): check that it is a file and that you may read it."
        ) from None
    except UnicodeDecodeError as error:
        raise Refusal(f"{path} is not UTF-8 (byte {error.start}): save it as UTF-8.") from None


def read_toml(path: Path) -> dict[str, Any]:
    """The content of a TOML file; an unreadable file is refused with its path."""
    text = read_text(path)
    if text.startswith("\ufeff"):
        raise Refusal(f"{path} begins with a byte order mark: save it as UTF-8 without one.")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise Refusal(f"{path} is not valid TOML: {str(error).removesuffix('.')}; correct that line.") from None
    except RecursionError:
        raise Refusal(f"{path} is nested too deeply to be a recipe: flatten it.") from None
    except ValueError as error:  # an integer or a date that Python cannot hold
        raise Refusal(f"{path} is not valid TOML: {error}; correct that value.") from None


def sha256_of(path: Path) -> str:
    """The sha256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def disk_named(path: Path, cure: str = OTHER_CACHE) -> Iterator[None]:
    """Turn "no space left" and similar errors into one sentence that names the path; `cure` says what helps."""
    try:
        yield
    except OSError as error:
        full = (errno.ENOSPC, errno.EDQUOT)
        if error.errno in full or any(os.strerror(code) in str(error) for code in full):  # shutil.Error has no errno
            raise disk_full(path, cure) from None
        if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM, errno.EIO):
            place = error.filename or path
            raise Refusal(
                f"{place} cannot be written ({error.strerror}): make it writable, or choose another place (of the "
                "cache: FUSEBOX_CACHE)."
            ) from None
        raise


def disk_full(path: Path, cure: str = OTHER_CACHE) -> Refusal:
    """The error for a full disk; `path` is on it, and `cure` says what helps beside freeing space."""
    place = next(parent for parent in [path, *path.parents] if parent.exists())
    free = shutil.disk_usage(place).free / 2**20
    return Refusal(f"The disk of {path} is full ({free:.0f} MiB free): free space, or {cure}.")


def sync(path: Path) -> None:
    """fsync one file, or a folder's own entries."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(path: Path) -> None:
    """fsync a file, or a folder with everything in it."""
    for entry in [path, *path.rglob("*")] if path.is_dir() else [path]:
        if not entry.is_symlink():
            sync(entry)


def remove(path: Path) -> None:
    """Remove a file, a link or a folder with everything in it, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def put(source: Path, final: Path) -> Path:
    """Give a complete file or folder its final name, durably; an existing one (from a run at the same time) stays."""
    sync_tree(source)
    final.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir() and final.exists():
        shutil.rmtree(source)
    else:
        source.rename(final)
    sync(final.parent)
    return final


def read_json(path: Path) -> Any:
    """The content of a JSON file brought from elsewhere; a file that is not JSON is refused."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Refusal(f"{path} is not valid JSON ({error}): bring the whole file again.") from None


def write_json(path: Path, value: Any) -> None:
    """Write JSON; the file gets its name only once it is complete."""
    write_text(path, json.dumps(value, indent=1, sort_keys=True) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text file; it gets its name only once it is complete."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with disk_named(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(text, encoding="utf-8")
            sync(partial)
            partial.rename(path)
        except (FileExistsError, IsADirectoryError, NotADirectoryError) as error:
            raise Refusal(f"{path} cannot be written ({error.strerror}): choose another place.") from None
        finally:
            with contextlib.suppress(OSError):
                partial.unlink()
