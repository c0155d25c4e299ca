"""Tokenize text once: `python -m smoke_tests.training.prepare_data FILE ... --tokenizer FOLDER --out FOLDER`.

Writes shards of tokens that `pretrain --data FOLDER` maps into memory, and index.json. A run that was ended, even by
SIGKILL, goes on behind its last complete shard when it is started again with the same arguments.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import fcntl
import itertools
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any, Deque, Dict, Iterable, Iterator, List, Sequence, Tuple

import numpy as np

from smoke_tests.training import shards
from smoke_tests.training.command import Parser
from smoke_tests.training.documents import Piece, TextError, pieces
from smoke_tests.training.tokens import Tokenizer, files_of, is_folder, opened

BATCH = 2**20  # characters that are tokenized at a time
AHEAD = 3  # batches that are tokenized while another is written
SECONDS = 2.0  # between two lines of progress
Place = Tuple[int, int]  # the index of an input, and of a piece in it


def parser() -> Parser:
    """The parser of the command."""
    parser = Parser(prog="prepare_data", description="Tokenize text into shards for pretrain.", allow_abbrev=False)
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="text, .jsonl, .zst, .parquet, a datasets folder")
    parser.add_argument("--out", required=True, type=Path, help="folder for the shards")
    parser.add_argument("--tokenizer", default="", help="a Hugging Face folder, or tiktoken:NAME; by default bytes")
    parser.add_argument("--eos", default="", help="the token behind each document; by default the tokenizer's own")
    parser.add_argument("--field", default="text", help="the field or column with the text (text)")
    parser.add_argument("--shard-tokens", type=int, default=2**26, help="tokens per shard, at least (67108864)")
    return parser


def request_of(asked: argparse.Namespace, tokenizer: Tokenizer) -> Dict[str, Any]:
    """What decides the shards; another request cannot go on in the same folder."""
    name = "." if is_folder(asked.tokenizer) else asked.tokenizer
    about = {"name": name, "sha256": tokenizer.sha256, "vocabulary": tokenizer.vocabulary, "end": tokenizer.separator}
    inputs = []
    for path in map(Path, asked.inputs):
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        try:
            inputs.append({"path": str(path), "bytes": sum(file.stat().st_size for file in files if not file.is_dir())})
        except OSError as error:
            raise TextError(f"{path} cannot be read: {error.strerror}") from None
    return {
        "format": shards.FORMAT,
        "dtype": np.min_scalar_type(max(tokenizer.vocabulary - 1, tokenizer.separator)).name,  # uint8, uint16 or uint32
        "tokenizer": about,
        "field": asked.field,
        "shard_tokens": asked.shard_tokens,
        "inputs": inputs,
    }


def begun(folder: Path, request: Dict[str, Any]) -> Dict[str, Any]:
    """The index of a folder, with the shards that are complete; TextError if it was begun with another request."""
    index = shards.read_index(folder) if shards.is_prepared(str(folder)) else {"shards": []}
    if not index["shards"]:
        return {**request, "complete": False, "shards": []}
    for key, value in request.items():
        if index[key] != value:
            raise TextError(
                f"{folder} was begun with other {key} ({index[key]}, and now {value}); name another --out, or remove it"
            )
    return index


def pieces_from(inputs: Sequence[str], field: str, place: Place) -> Iterator[Tuple[Place, Piece]]:
    """The pieces of all inputs from a place on, each with the place behind it."""
    for number in range(place[0], len(inputs)):
        first = place[1] if number == place[0] else 0
        for index, piece in itertools.islice(enumerate(pieces(inputs[number], field), start=1), first, None):
            yield (number, index), piece


def tokenized(placed: Iterable[Tuple[Place, Piece]], tokenizer: Tokenizer) -> Iterator[Tuple[Place, Piece, np.ndarray]]:
    """The tokens of each piece, in order; AHEAD batches are in work, whatever the input's size."""

    def encode(batch: List[Tuple[Place, Piece]]) -> List[Tuple[Place, Piece, np.ndarray]]:
        ids = tokenizer.encode([piece.text for _, piece in batch])
        return [(place, piece, each) for (place, piece), each in zip(batch, ids)]

    waiting: Deque[Any] = collections.deque()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for batch in batches(placed):
            waiting.append(pool.submit(encode, batch))
            if len(waiting) > AHEAD:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()


def batches(placed: Iterable[Tuple[Place, Piece]]) -> Iterator[List[Tuple[Place, Piece]]]:
    """The pieces in batches of about BATCH characters."""
    batch: List[Tuple[Place, Piece]] = []
    size = 0
    for place, piece in placed:
        batch.append((place, piece))
        size += len(piece.text) + 256  # a document without text takes memory, too
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class Progress:
    """A line of what is done; on a terminal each rewrites the one before."""

    def __init__(self, inputs: int, before: int) -> None:
        self.inputs, self.before, self.began, self.shown = inputs, before, time.monotonic(), time.monotonic()

    def show(self, place: Place, share: float, tokens: int, last: bool = False) -> None:
        now = time.monotonic()
        if not last and now - self.shown < SECONDS:
            return
        self.shown = now
        rate = (tokens - self.before) / max(1e-9, now - self.began)
        line = f"input {place[0] + 1} of {self.inputs}, {share:.0%}: {tokens:,} tokens, {rate:,.0f} tokens/s"
        terminal = sys.stdout.isatty()
        print(f"\r{line}\x1b[K" if terminal else line, end="" if terminal and not last else "\n", flush=True)


def prepare(asked: argparse.Namespace) -> Dict[str, Any]:
    """Write the missing shards; the complete index."""
    tokenizer = opened(asked.tokenizer, asked.eos)
    request = request_of(asked, tokenizer)
    asked.out.mkdir(parents=True, exist_ok=True)
    with locked(asked.out):
        index = begun(asked.out, request)
        for file in files_of(tokenizer):
            shutil.copyfile(str(file), str(asked.out / (file.name + shards.PARTIAL)))
            os.replace(asked.out / (file.name + shards.PARTIAL), asked.out / file.name)
        if not index["complete"]:
            shards.write_index(asked.out, index)
            write(asked, tokenizer, index)
            index["complete"] = True
            shards.write_index(asked.out, index)
    return index


def write(asked: argparse.Namespace, tokenizer: Tokenizer, index: Dict[str, Any]) -> None:
    """Write shards from the place on where the index ends, and add each to it."""
    done = sum(row["tokens"] for row in index["shards"])
    begin: Place = tuple(index["shards"][-1]["next"]) if index["shards"] else (0, 0)
    progress, end, writer = Progress(len(asked.inputs), done), np.array([tokenizer.separator]), None
    place, piece = begin, Piece("", True, 1.0)
    for place, piece, ids in tokenized(pieces_from(asked.inputs, asked.field, begin), tokenizer):
        if writer is None:
            writer = shards.Writer(asked.out / "{:05}.bin".format(len(index["shards"])), index["dtype"])
        writer.append(ids)
        if piece.last:
            writer.append(end)
            writer.documents += 1
        progress.show(place, piece.share, done + writer.tokens)
        if writer.tokens >= asked.shard_tokens:
            done += writer.tokens
            index["shards"].append({**writer.close(), "next": place})
            shards.write_index(asked.out, index)
            writer = None
    if writer is not None:
        done += writer.tokens
        index["shards"].append({**writer.close(), "next": place})
    progress.show(place, piece.share, done, last=True)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """The context in which no other process writes into a folder; the lock goes with the process."""
    with open(folder / "lock", "w", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise TextError(f"another process is writing to {folder}; wait for it, or name another --out") from None
        yield


def main(arguments: Sequence[str]) -> int:
    """The command; its exit code."""
    asked = parser().parse_args(arguments)
    if asked.shard_tokens < 1:
        parser().error(f"--shard-tokens is {asked.shard_tokens}, but must be at least 1")
    try:
        index = prepare(asked)
    except TextError as error:
        sys.exit(f"fusebox: {error}")
    except OSError as error:
        sys.exit(f"fusebox: --out {asked.out} cannot be written: {error.strerror or error}; run again to go on")
    except KeyboardInterrupt:
        sys.exit("fusebox: stopped; the complete shards stay, and the same command goes on")
    tokens, documents = (sum(row[key] for row in index["shards"]) for key in ("tokens", "documents"))
    print(f"{asked.out}: {tokens:,} tokens of {documents:,} documents in {len(index['shards'])} shards")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
