"""The data of a run: text as tokens, and the tokens that each step takes."""

from __future__ import annotations

import functools
import hashlib
import json
import sysconfig
from pathlib import Path
from typing import Any, Callable, Iterator, List, Sequence, Tuple

import torch


class TextError(ValueError):
    """A text cannot be used; the message is one sentence that says why."""


def documents(files: Sequence[str]) -> Iterator[str]:
    """The documents of text files (one each) and of .jsonl files (the field "text" of each line that is not blank).

    Without files: the standard library's modules, which every Python has.
    """
    yield from () if files else _library()
    for file in files:
        try:
            text = Path(file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TextError(f"{file} cannot be read: {error}") from None
        if not file.endswith(".jsonl"):
            yield text
            continue
        lines = text.split("\n")  # a JSON string may hold characters at which splitlines() would split
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                document = json.loads(line)["text"]
                if not isinstance(document, str):
                    raise TypeError("it is not a string")
            except (ValueError, KeyError, TypeError) as error:
                raise TextError(f'{file}, line {number}: not a JSON object with a "text": {error!r}') from None
            yield document


@functools.lru_cache(maxsize=None)
def _library() -> Tuple[str, ...]:
    library = Path(sysconfig.get_paths()["stdlib"])
    others = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    paths = [path for path in sorted(library.rglob("*.py")) if not others & set(path.relative_to(library).parts)]
    return tuple(path.read_text(encoding="utf-8", errors="replace") for path in paths)


def encoder(folder: str) -> Callable[[str], torch.Tensor]:
    """Text -> tokens [n]: its UTF-8 bytes, or what a Hugging Face folder's tokenizer.json makes of it."""
    if not folder:
        # torch.frombuffer refuses an empty buffer.
        return lambda text: torch.frombuffer(bytearray(text.encode("utf-8")) + b"\0", dtype=torch.uint8)[:-1]
    read = tokenizer(folder)
    return lambda text: torch.tensor(read.encode(text).ids, dtype=torch.int32)


def decoder(folder: str) -> Callable[[List[int]], str]:
    """Tokens -> text."""
    if not folder:
        return lambda tokens: bytes(token % 256 for token in tokens).decode("utf-8", errors="replace")
    read = tokenizer(folder)
    return lambda tokens: str(read.decode(tokens))


def tokenizer(folder: str) -> Any:
    """The tokenizer of a Hugging Face folder."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise TextError("--tokenizer needs the package tokenizers, which this environment lacks") from None
    try:
        return Tokenizer.from_file(str(Path(folder, "tokenizer.json")))
    except Exception as error:  # tokenizers raises nothing narrower
        raise TextError(f"--tokenizer: {folder} holds no tokenizer.json that can be read: {error}") from None


class Text:
    """Tokens [n] cut into windows, the last hundredth of them held out; the order follows from seed and step alone."""

    def __init__(self, tokens: torch.Tensor, length: int, seed: int) -> None:
        """Windows of `length` tokens and the one that follows each."""
        count = (len(tokens) - 1) // length
        self.held_out = max(1, count // 100)
        self.count = count - self.held_out
        if self.count < 1:
            raise TextError(f"the text has {len(tokens)} tokens, too few for two windows of {length}")
        self.tokens, self.length, self.seed = tokens, length, seed
        self._epoch, self._order = -1, torch.empty(0)

    @classmethod
    def read(cls, files: Sequence[str], folder: str, vocabulary: int, length: int, seed: int) -> "Text":
        """The text of files, each document followed by a zero."""
        encode, end = encoder(folder), torch.zeros(1, dtype=torch.uint8)
        tokens = [part for document in documents(files) for part in (encode(document), end)]
        text = torch.cat(tokens) if tokens else end
        if len(text) and int(text.max()) >= vocabulary:
            raise TextError(
                f"token {int(text.max())} of the tokenizer is beyond the model's vocabulary of {vocabulary}"
            )
        return cls(text, length, seed)

    def identity(self) -> str:
        """A hash of the tokens."""
        return hashlib.sha256(self.tokens.numpy().tobytes()).hexdigest()[:16]

    def windows(self, first: int, count: int) -> Tuple[torch.Tensor, torch.Tensor]:
        """Samples first .. first + count - 1 of the endless order: tokens and targets, each [count, length].

        Every window comes once in an epoch; each epoch has an order of its own.
        """
        return self._cut([self._place(sample) for sample in range(first, first + count)])

    def unseen(self, count: int) -> Tuple[torch.Tensor, torch.Tensor]:
        """Up to `count` windows that no step takes."""
        return self._cut([self.count + index for index in range(min(count, self.held_out))])

    def _place(self, sample: int) -> int:
        epoch, index = divmod(sample, self.count)
        if epoch != self._epoch:
            draw = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._epoch, self._order = epoch, torch.randperm(self.count, generator=draw)
        return int(self._order[index])

    def _cut(self, places: List[int]) -> Tuple[torch.Tensor, torch.Tensor]:
        rows = [self.tokens[place * self.length : (place + 1) * self.length + 1] for place in places]
        cut = torch.stack(rows).long()
        return cut[:, :-1].contiguous(), cut[:, 1:].contiguous()
