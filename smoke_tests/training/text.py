"""The data of a run: text as tokens, and the tokens that each step takes."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import List, Optional, Sequence, Tuple, Union

import numpy as np
import torch

from smoke_tests.training import shards
from smoke_tests.training.documents import TextError, documents
from smoke_tests.training.shards import Shards
from smoke_tests.training.tokens import Tokenizer, opened


def tokenizer_of(files: Sequence[str], name: str) -> Tokenizer:
    """The tokenizer of a run: of its prepared tokens, or else the one that was named."""
    prepared = [file for file in files if shards.is_prepared(file)]
    return opened(shards.tokenizer_of(prepared[0]) if prepared else name)


class Text:
    """Tokens [n] cut into windows, the last hundredth of them held out; the order follows from seed and step alone."""

    def __init__(
        self, tokens: Union[torch.Tensor, Shards], length: int, seed: int, separator: Optional[int] = None
    ) -> None:
        """Windows of `length` tokens and the one that follows each; separator: the token that ends each document."""
        count = (len(tokens) - 1) // length
        self.held_out = max(1, count // 100)
        self.count = count - self.held_out
        if self.count < 1:
            raise TextError(f"the text has {len(tokens)} tokens, too few for two windows of {length}")
        self.tokens, self.length, self.seed, self.separator = tokens, length, seed, separator
        self._epoch, self._order = -1, torch.empty(0)

    @classmethod
    def read(cls, files: Sequence[str], folder: str, vocabulary: int, length: int, seed: int) -> "Text":
        """The text of files, each document followed by the tokenizer's end of text; or one folder of shards, mapped."""
        prepared = [file for file in files if shards.is_prepared(file)]
        if prepared and len(files) > 1:
            raise TextError(f"--data {prepared[0]} is a folder of prepared tokens, and cannot be joined with others")
        if prepared:
            mapped = Shards(Path(prepared[0]))
            mapped.check(vocabulary, folder)
            return cls(mapped, length, seed, mapped.index["tokenizer"]["end"])
        tokenizer = opened(folder)
        end = np.array([tokenizer.separator])
        parts = tokenizer.encode(list(documents(files)))
        dtype = np.uint8 if tokenizer.vocabulary <= 256 else np.int32
        text = np.concatenate([each.astype(dtype) for part in parts for each in (part, end)] or [end.astype(dtype)])
        if int(text.max()) >= vocabulary:
            raise TextError(
                f"token {int(text.max())} of the tokenizer is beyond the model's vocabulary of {vocabulary}"
            )
        return cls(torch.from_numpy(text), length, seed, tokenizer.separator)

    def identity(self) -> str:
        """A hash of the tokens."""
        if isinstance(self.tokens, Shards):
            return self.tokens.identity()
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
        cut = torch.stack([torch.as_tensor(row) for row in rows]).long()
        return cut[:, :-1].contiguous(), cut[:, 1:].contiguous()
