"""The documents of a user's files: text, .jsonl, either of them compressed as .zst, Parquet, and folders of `datasets`.

A document is read in pieces of at most PIECE characters, so that memory does not grow with the input.
"""

from __future__ import annotations

import functools
import importlib
import io
import json
import os
import sysconfig
from pathlib import Path
from typing import Any, BinaryIO, Callable, Iterable, Iterator, List, NamedTuple, Sequence, Tuple

PIECE = 2**20  # characters; a longer document is cut behind a line, or here if a line is longer
LONGEST = 2**25  # characters of one line of .jsonl, which has to be in memory
CHUNK = 2**16  # bytes of a compressed file that are decompressed at a time


class TextError(ValueError):
    """A text cannot be used; the message is one sentence that says why."""


class Piece(NamedTuple):
    """A part of a document: its text, whether the document ends with it, and the share of the input read so far."""

    text: str
    last: bool
    share: float


def documents(files: Sequence[str], field: str = "text") -> Iterator[str]:
    """The documents of files, or of the standard library's modules, which every Python has, if there are none.

    A text file is one document; of .jsonl, Parquet and datasets, each row's field is one.
    """
    yield from () if files else _library()
    for file in files:
        parts: List[str] = []
        for piece in pieces(file, field):
            parts.append(piece.text)
            if piece.last:
                yield "".join(parts)
                parts = []


@functools.lru_cache(maxsize=None)
def _library() -> Tuple[str, ...]:
    others = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    paths = []
    for folder, folders, names in os.walk(sysconfig.get_paths()["stdlib"]):
        folders[:] = set(folders) - others  # skip installed packages, of which there may be many
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    return tuple(path.read_text(encoding="utf-8", errors="replace") for path in sorted(paths))


def pieces(path: str, field: str = "text") -> Iterator[Piece]:
    """The pieces of an input's documents, in order. TextError says which input cannot be read, and why."""
    try:
        if Path(path).is_dir():
            yield from _rows(path, *_dataset(path, field))
        elif path.endswith(".parquet"):
            yield from _rows(path, *_parquet(path, field))
        else:
            read = _json_lines if path.endswith((".jsonl", ".jsonl.zst")) else _text
            with open(path, "rb") as raw, _decoded(path, raw) as file:
                size = max(1, os.fstat(raw.fileno()).st_size)
                yield from read(path, file, field, lambda: raw.tell() / size)
    except TextError:
        raise
    except Exception as error:  # pyarrow, datasets and zstandard raise many kinds
        raise TextError(f"{path} cannot be read: {' '.join(str(error).split())}") from None


def _decoded(path: str, raw: BinaryIO) -> io.TextIOWrapper:
    binary: Any = raw
    if path.endswith(".zst"):
        binary = io.BufferedReader(_Zstd(raw, _needed("zstandard", path).ZstdDecompressor()))
    return io.TextIOWrapper(binary, encoding="utf-8")


class _Zstd(io.RawIOBase):
    """The content of a file of zstd frames; the package's own reader takes one that is cut off for a whole one."""

    def __init__(self, raw: BinaryIO, decompressor: Any) -> None:
        self._raw, self._decompressor = raw, decompressor
        self._frame: Any = None
        self._compressed = self._content = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._content:
            self._compressed = self._compressed or self._raw.read(CHUNK)
            if not self._compressed:
                if self._frame is not None:
                    raise OSError("it ends in the middle of a zstd frame")
                return 0
            self._frame = self._frame or self._decompressor.decompressobj()
            self._content, self._compressed = self._frame.decompress(self._compressed), b""
            if self._frame.eof:
                self._compressed, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._content))
        buffer[:count], self._content = self._content[:count], self._content[count:]
        return count


def _text(path: str, file: io.TextIOWrapper, field: str, share: Callable[[], float]) -> Iterator[Piece]:
    for text, last in _cut(iter(lambda: file.read(PIECE), "")):
        yield Piece(text, last, share())


def _json_lines(path: str, file: io.TextIOWrapper, field: str, share: Callable[[], float]) -> Iterator[Piece]:
    # readline() ends a line where JSON's ends; a JSON string may hold characters at which splitlines() would split.
    for number, line in enumerate(iter(lambda: file.readline(LONGEST + 1), ""), start=1):
        if len(line) > LONGEST:
            raise TextError(f"{path}, line {number}: has more than {LONGEST:,} characters; split this document")
        if not line.strip():
            continue
        try:
            document = json.loads(line)[field]
            if not isinstance(document, str):
                raise TypeError("it is not a string")
        except (ValueError, KeyError, TypeError) as error:
            raise TextError(f'{path}, line {number}: not a JSON object with a "{field}": {error!r}') from None
        for text, last in _cut([document]):
            yield Piece(text, last, share())


def _parquet(path: str, field: str) -> Tuple[int, Iterable[Any]]:
    """The number of rows of a Parquet file, and their field."""
    file = _needed("pyarrow.parquet", path).ParquetFile(path)
    _check_field(path, field, file.schema_arrow.names)
    batches = file.iter_batches(batch_size=64, columns=[field])
    return file.metadata.num_rows, (row for batch in batches for row in batch.column(0).to_pylist())


def _dataset(path: str, field: str) -> Tuple[int, Iterable[Any]]:
    """The number of rows of a folder that datasets' save_to_disk() wrote, and their field."""
    if not {"state.json", "dataset_dict.json"} & set(os.listdir(path)):
        raise TextError(f"{path} is a folder, but not one that datasets' save_to_disk() wrote; name its files")
    rows = _needed("datasets", path).load_from_disk(path)
    if isinstance(rows, dict):
        raise TextError(f"{path} holds the splits {', '.join(rows)}; name one, such as {path}/{next(iter(rows))}")
    _check_field(path, field, rows.column_names)
    return len(rows), (row[field] for row in rows.select_columns([field]))


def _rows(path: str, count: int, rows: Iterable[Any]) -> Iterator[Piece]:
    for number, document in enumerate(rows, start=1):
        if not isinstance(document, str):
            raise TextError(f"{path}, row {number}: the field is {type(document).__name__}, not text")
        for text, last in _cut([document]):
            yield Piece(text, last, number / count)


def _check_field(path: str, field: str, names: Sequence[str]) -> None:
    if field not in names:
        raise TextError(f"{path} has no column {field}, but {', '.join(names)}; name one with --field")


def _cut(blocks: Iterable[str]) -> Iterator[Tuple[str, bool]]:
    """The pieces of a document that comes in blocks, and whether each is the last."""
    rest = ""
    for block in blocks:
        rest += block
        while len(rest) > PIECE:
            end = rest.rfind("\n", 0, PIECE) + 1 or PIECE
            yield rest[:end], False
            rest = rest[end:]
    yield rest, True


def _needed(module: str, path: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise TextError(f"{path} needs the package {package}, which this environment lacks") from None
