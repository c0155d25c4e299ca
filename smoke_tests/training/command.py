"""The parser of the commands of this folder; it imports nothing, so that a command starts at once."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """A parser that ends with one sentence about what is wrong."""

    def error(self, message: str) -> NoReturn:
        sys.exit(f"fusebox: {message}; --help lists all flags")
