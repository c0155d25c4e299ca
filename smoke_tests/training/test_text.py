"""The text of a run: its documents, its windows and their order."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import List
from unittest import mock

import numpy as np
import pytest
import torch

from smoke_tests.claims import proves
from smoke_tests.training import text as text_module
from smoke_tests.training.documents import TextError, documents
from smoke_tests.training.short_training import batches
from smoke_tests.training.small_runs import small
from smoke_tests.training.text import Text
from smoke_tests.training.tokens import opened
from smoke_tests.training.trainer import Run

pytestmark = pytest.mark.usefixtures("one_thread")


@proves(
    "the small Llama's batches are eight windows of its text each, anywhere in it, and the tokens behind theirs",
    package="torch",
    since="2.1",
)
def test_batches() -> None:
    text = torch.arange(70)
    starts = set()
    for tokens, targets in batches(text, 64, 60, 0):
        assert tokens.shape == targets.shape == (8, 64)
        assert torch.equal(tokens, tokens[:, :1] + torch.arange(64)) and torch.equal(targets, tokens + 1)
        starts |= set(tokens[:, 0].tolist())
    assert starts == set(range(6))


@proves(
    "a step's windows follow from seed and step alone, each once in an epoch, none held out",
    package="torch",
    since="2.1",
)
def test_order() -> None:
    run = Run(small())
    text = run.text
    seen = [text._place(sample) for sample in range(text.count)]
    assert sorted(seen) == list(range(text.count))
    jumped = Run(small()).text
    assert torch.equal(jumped.windows(3 * text.count + 5, 4)[0], text.windows(3 * text.count + 5, 4)[0])
    assert [text._place(sample) for sample in range(text.count, text.count + 9)] != seen[:9]
    # The order is part of a run: with another order, a run would not continue where its checkpoint ends.
    draw = torch.Generator().manual_seed(3 * 1_000_003 + 2)
    third = Text(text.tokens, text.length, 3)
    assert [third._place(2 * text.count + index) for index in range(9)] == torch.randperm(text.count, generator=draw)[
        :9
    ].tolist()
    tokens, targets = text.windows(7, 2)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert max(seen) < text.count <= text.count + text.held_out - 1


@proves(
    "a line of .jsonl ends where JSON's does, not at a line separator in a string, and a blank line holds no document",
    package="torch",
    since="2.1",
)
def test_documents(tmp_path: Path) -> None:
    path, held = tmp_path / "lines.jsonl", ["one\u2028two\x85three", "four"]
    for end, between in (("", "\n"), ("\n", "\n"), ("\n \n\n", "\n\r\n\n")):
        path.write_text(between.join(json.dumps({"text": text}, ensure_ascii=False) for text in held) + end, "utf-8")
        assert list(documents([str(path)])) == held


class ManyTokens:
    """Stands for a tokenizer of so many tokens that a byte cannot hold the last."""

    vocabulary, separator = 257, 256

    def encode(self, texts: List[str]) -> List[np.ndarray]:
        return [np.array([0, 255]) for _ in texts]


@proves(
    "a text is the bytes of its documents with 255 behind each, in windows of which the last hundredth, one at "
    "least, is held out; a token beyond the vocabulary and a text of one window are refused",
    package="torch",
    since="2.1",
)
def test_text(tmp_path: Path) -> None:
    held = ["d\u00e9j\u00e0 vu " * 40, "", "nothing else " * 40]
    paths = [tmp_path / f"{index}.txt" for index in range(len(held))]
    for path, document in zip(paths, held):
        path.write_text(document, "utf-8")
    files, tokens = list(map(str, paths)), [each for document in held for each in (*document.encode("utf-8"), 255)]
    assert list(documents(files)) == held
    text = Text.read(files, "", 256, 4, 0)
    assert (
        text.tokens[:].tolist() == tokens
        and opened("").decode([ord("a") + 256, *held[0].encode("utf-8")]) == "a" + held[0]
    )
    assert text.tokens[:].dtype == torch.uint8
    whole = (len(tokens) - 1) // 4
    assert text.held_out == whole // 100 == 2 and text.count == whole - 2
    unseen = [tokens[4 * index : 4 * index + 5] for index in range(whole - 2, whole)]
    for count in (1, 2, 9):
        unseen_tokens, behind = text.unseen(count)
        assert torch.cat([unseen_tokens, behind[:, -1:]], 1).tolist() == unseen[:count]
    epochs = [text.windows(epoch * text.count, text.count) for epoch in (0, 1)]
    seen = [sorted(torch.cat([first, behind[:, -1:]], 1).tolist()) for first, behind in epochs]
    assert seen[0] == seen[1] == sorted(tokens[4 * index : 4 * index + 5] for index in range(text.count))
    assert not torch.equal(epochs[0][0], epochs[1][0])
    later = None
    with contextlib.suppress(IndexError):
        later = Text.read(files, "", 256, 4, 0).windows(text.count, text.count)
    assert later and torch.equal(later[0], epochs[1][0]), "an epoch depends on what was read before it"
    other = Text.read(files, "", 256, 4, 1)
    assert other.identity() == text.identity() and not torch.equal(other.windows(0, 9)[0], text.windows(0, 9)[0])
    assert len(Text.read(files, "", max(tokens) + 1, 4, 0).tokens) == len(tokens)
    with pytest.raises(TextError, match=f"token {max(tokens)} .* vocabulary of {max(tokens)}"):
        Text.read(files, "", max(tokens), 4, 0)
    with mock.patch.object(text_module, "opened", lambda _: ManyTokens()):
        assert Text.read(files[:1], "", 257, 1, 0).tokens[:].tolist() == [0, 255, 256]
    assert_least_text()
    path = tmp_path / "lines.jsonl"
    path.write_text('{"text": "one"}\n{"text": 2}\n', "utf-8")
    with pytest.raises(TextError, match="line 2: "):
        list(documents([str(path)]))


def assert_least_text() -> None:
    """Assert that at least one window is held out, and that a text of one window is refused."""
    assert [Text(torch.zeros(4 * count + 1), 4, 0).held_out for count in (199, 200)] == [1, 2]
    small_text = torch.zeros(19, dtype=torch.uint8)
    assert (Text(small_text, 9, 0).count, Text(small_text, 9, 0).held_out) == (1, 1)
    with pytest.raises(TextError, match="18 tokens, too few for two windows of 9"):
        Text(small_text[:18], 9, 0)
