"""Tokens in shards on a disk: a folder of raw little-endian files and index.json, which says what is in them.

Written by prepare_data; read by mapping the files into memory, so that a run holds only the windows that it takes.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, Dict, List

import numpy as np

from smoke_tests.training.documents import TextError
from smoke_tests.training.tokens import is_folder, opened

FORMAT = 1
INDEX = "index.json"
PARTIAL = ".partial"


def is_prepared(path: str) -> bool:
    """Whether this is a folder of shards."""
    return Path(path, INDEX).is_file()


def read_index(folder: Path) -> Dict[str, Any]:
    """The index of a folder; TextError if it cannot be read."""
    try:
        index: Dict[str, Any] = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        if index["format"] != FORMAT:
            raise ValueError("its format is {}, not {}".format(index["format"], FORMAT))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TextError(f"{folder / INDEX} is not the index of prepared tokens: {error}") from None
    return index


def write_index(folder: Path, index: Dict[str, Any]) -> None:
    """Replace the index of a folder; it is complete at every moment."""
    partial = folder / (INDEX + PARTIAL)
    with open(partial, "w", encoding="utf-8") as file:
        json.dump(index, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, folder / INDEX)


class Writer:
    """A shard being written; it gets its name when it is complete."""

    def __init__(self, path: Path, dtype: str) -> None:
        self.path, self.dtype = path, np.dtype(dtype).newbyteorder("<")
        self.tokens = self.documents = self.largest = 0
        self._hash = hashlib.sha256()
        self._file = open(path.with_name(path.name + PARTIAL), "wb")  # noqa: SIM115 - close() or the end closes it

    def append(self, ids: np.ndarray) -> None:
        """Append tokens [n]."""
        written = ids.astype(self.dtype).tobytes()
        self._file.write(written)
        self._hash.update(written)
        self.tokens += len(ids)
        self.largest = max(self.largest, int(ids.max())) if len(ids) else self.largest

    def close(self) -> Dict[str, Any]:
        """Flush the shard to the disk and name it; its row of the index."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._file.name, self.path)
        return {
            "file": self.path.name,
            "tokens": self.tokens,
            "documents": self.documents,
            "largest": self.largest,
            "sha256": self._hash.hexdigest(),
        }


class Shards:
    """The tokens [n] of a prepared folder, mapped and not read: len() and slices, as of one array."""

    def __init__(self, folder: Path) -> None:
        """TextError if the folder is not complete, or not what its index says."""
        self.folder, self.index = folder, read_index(folder)
        if not self.index["complete"]:
            raise TextError(f"{folder} is not complete: run prepare_data again with the same arguments to finish it")
        dtype = np.dtype(self.index["dtype"]).newbyteorder("<")
        self._starts, self._maps, count = [], [], 0
        for row in self.index["shards"]:
            path = folder / row["file"]
            size = path.stat().st_size if path.exists() else 0
            if size != row["tokens"] * dtype.itemsize:
                raise TextError(f"{path} has {size:,} bytes, and {INDEX} says {row['tokens'] * dtype.itemsize:,}")
            self._starts.append(count)
            self._maps.append(np.memmap(path, dtype, "r"))
            count += row["tokens"]
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, span: slice) -> np.ndarray:
        """A copy of some tokens in a row, int64 [n]."""
        first, end, _ = span.indices(self._count)
        at = int(np.searchsorted(self._starts, first, side="right")) - 1
        parts: List[np.ndarray] = []
        while first < end:
            part = self._maps[at][first - self._starts[at] : end - self._starts[at]]
            parts.append(part.astype(np.int64))
            first, at = first + len(part), at + 1
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def identity(self) -> str:
        """A hash of the tokens, by the hashes of the shards."""
        hashes = [self.index["dtype"], *(row["sha256"] for row in self.index["shards"])]
        return hashlib.sha256(" ".join(hashes).encode()).hexdigest()[:16]

    def check(self, vocabulary: int, tokenizer: str) -> None:
        """TextError if a model has too few ids for these tokens, or if they are another tokenizer's than that named."""
        largest = max((row["largest"] for row in self.index["shards"]), default=0)
        if largest >= vocabulary:
            raise TextError(f"token {largest} of {self.folder} is beyond the model's vocabulary of {vocabulary}")
        if tokenizer and opened(tokenizer).sha256 != self.index["tokenizer"]["sha256"]:
            raise TextError(f"--tokenizer {tokenizer} is not the tokenizer that {self.folder} was prepared with")


def tokenizer_of(folder: str) -> str:
    """The name of the tokenizer of a prepared folder, which holds a Hugging Face tokenizer's files itself."""
    name = str(read_index(Path(folder))["tokenizer"]["name"])
    return folder if is_folder(name) else name
