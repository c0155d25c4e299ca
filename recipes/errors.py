"""The error that every room raises when something cannot be done."""

from __future__ import annotations


class Refusal(Exception):
    """One sentence on what cannot be done: what is wrong, where, and what to do next. Never shown as a traceback."""
