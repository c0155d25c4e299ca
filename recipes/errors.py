"""The error that every room raises when something cannot be done."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Self


class Refusal(Exception):
    """One sentence on what cannot be done: what is wrong, where, and what to do next. Never shown as a traceback."""

    @classmethod
    def of_all(cls, refusals: Sequence[Refusal]) -> Self:
        """One refusal that tells all of these, each fault once."""
        *others, last = dict.fromkeys(map(str, refusals))
        return cls("; also, ".join([*(other.removesuffix(".") for other in others), last]))


def suggestion(word: str, known: Iterable[str]) -> str:
    """The nearest known word, as a question for the end of a sentence; empty if none is near."""
    match = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {match[0]!r}?)" if match else ""
