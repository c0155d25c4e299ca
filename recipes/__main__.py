"""`python -m recipes VERB`: finds the verb in recipes/verbs/ and runs it. Bad input ends in one sentence and code 2."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """End the process in one sentence where a package that the tool needs is not installed."""
    try:
        yield
    except ModuleNotFoundError as missing:
        sys.exit(
            f"fusebox: the Python package {missing.name} is not installed: run the verb through nox, which "
            "installs what it needs."
        )
    except KeyboardInterrupt:
        sys.exit(130)


with importing():
    from rich.text import Text

    from recipes import verbs
    from recipes.errors import Refusal
    from recipes.progress import errors


def main(arguments: list[str] | None = None) -> int:
    """Run one verb and return the exit code: 0 done, 1 a claim was refuted, 2 refused, 3 a what-if is unknown."""
    options = parsed(sys.argv[1:] if arguments is None else arguments)
    for sent in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(sent) is not signal.SIG_IGN:  # ignored under `nohup`
            signal.signal(sent, signal.default_int_handler)  # like Ctrl-C: the processes that we started end with us
    try:
        return int(options.verb(options))
    except Refusal as refusal:
        printable = "".join(char if char.isprintable() else " " for char in str(refusal))  # it may quote any input
        errors.print(Text.assemble(("fusebox:", "red"), " ", printable), soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        errors.print("fusebox: stopped; completed work is kept: run again to continue.")
        return 130


def parsed(words: list[str]) -> argparse.Namespace:
    """The verb's options, parsed from the command line."""
    with importing():
        parser = verbs.parser(words[0] if words else "")
    return parser.parse_args(words)


if __name__ == "__main__":
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        code = 128 + signal.SIGPIPE
    os._exit(code)  # at once, also when a download still waits for a stalled server
