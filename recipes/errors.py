"""What every room raises where something cannot be done."""

from __future__ import annotations


class Refusal(Exception):
    """What cannot be done, as one sentence: what is wrong, where, and what to do next. Never shown as a traceback."""
