"""The parts that verbs share: the target, the options --mirror and --sm, and the types of arguments."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable
from pathlib import Path

from recipes.catalogue.load import Catalogue
from recipes.catalogue.plan import Plan, plan
from recipes.errors import Refusal

Function = Callable[[argparse.Namespace], int]


class Verbs:
    """The verbs of one command line, to which modules add theirs."""

    def __init__(self, parsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
        self._parsers = parsers

    def add(
        self, name: str, function: Function, *, target: bool = True, mirror: bool = False, sm: bool = False
    ) -> argparse.ArgumentParser:
        """Add a verb; `function` gets its options and returns the exit code, and its docstring is the help."""
        added = self._parsers.add_parser(name, help=function.__doc__, description=function.__doc__)
        added.set_defaults(verb=function)
        if target:
            added.add_argument(
                "target",
                nargs="?",
                default="cpu",
                help="the target, a table of recipes/targets.toml (default: %(default)s)",
            )
        if mirror:
            add_mirror(added)
        if sm:
            add_sm(added)
        return added


def add_mirror(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--mirror",
        type=place,
        default=os.environ.get("FUSEBOX_MIRROR") or None,
        help="a folder to search for files before using the network (default: $FUSEBOX_MIRROR)",
    )


def add_sm(parser: argparse.ArgumentParser, *, may_be_empty: bool = False) -> None:
    """`may_be_empty` is for the steps of an image, whose unset build argument means the target's architectures."""
    read = listed_or_empty if may_be_empty else listed
    parser.add_argument("--sm", type=read, help='compile for these GPU architectures only, such as "8.0,9.0"')


def add_key(parser: argparse.ArgumentParser) -> None:
    """Who signs."""
    parser.add_argument("--key", type=place, help="cosign's private key; in GitHub's workflow none is needed")


def add_trust(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Who is trusted: a key or a workflow."""
    trust = parser.add_mutually_exclusive_group(required=required)
    trust.add_argument("--key", type=place, help="the public key of the signer")
    trust.add_argument(
        "--identity", help="a pattern for the workflow that signed it, such as ^https://github.com/OWNER/"
    )


def add_wheelcache(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--wheelcache", type=folder, help="a folder of exported wheels to use instead of compiling them"
    )


def add_compiled_elsewhere(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--compiled-elsewhere",
        action="store_true",
        help="also take exported wheels that another compiler or base made from the same inputs; the image's manifest "
        "or the wheel's SBOM says so",
    )


def compiled_elsewhere(options: argparse.Namespace) -> bool:
    """Whether --compiled-elsewhere was given; without --wheelcache, there is nothing that it chooses among."""
    given = getattr(options, "compiled_elsewhere", False)  # `publish` lacks it: its wheels are compiled on their base
    if given and not options.wheelcache:
        raise Refusal("--compiled-elsewhere chooses among exported wheels: add --wheelcache DIR.")
    return bool(given)


def add_standin(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--standin",
        action="append",
        default=[],
        metavar="NAME=REF",
        help="use the image REF instead of the base image NAME",
    )


def standins(given: list[str]) -> dict[str, str]:
    """The images that stand in, by the name of the base; a text that is not NAME=REF is refused."""
    if wrong := [text for text in given if not all(text.partition("="))]:
        raise Refusal(f"--standin {wrong[0]} names no substitute image: write NAME=REF.")
    named = {name: reference for name, _, reference in (text.partition("=") for text in given)}
    if wrong := [name for name in named.values() if not re.fullmatch(r"[\w.:/@-]+", name)]:
        raise Refusal(f"--standin {wrong[0]!r} is not the name of an image: correct it.")
    return named


def listed(value: str) -> list[str]:
    """The parts of a comma-separated list; a list without any is refused."""
    parts = [part for part in value.split(",") if part]
    if not parts:
        raise argparse.ArgumentTypeError("names no GPU architecture: write it as 8.0,9.0, or omit it")
    return parts


def listed_or_empty(value: str) -> list[str]:
    """The parts of a comma-separated list, or none of an empty text."""
    return listed(value) if value else []


def text(value: str) -> str:
    """A text that is not empty."""
    if not value:
        raise argparse.ArgumentTypeError("is empty")
    return value


def number(value: str, least: int = 1) -> int:
    """A number from the least on."""
    if not value.isdecimal() or int(value) < least:
        raise argparse.ArgumentTypeError(f"{value} is not a number from {least} on")
    return int(value)


def place(value: str) -> Path:
    """A path that need not exist."""
    return Path(text(value))


def folder(value: str) -> Path:
    """A folder that exists."""
    if not (path := place(value)).is_dir():
        raise argparse.ArgumentTypeError(f"{path} is not a folder")
    return path


def chosen(options: argparse.Namespace) -> Plan:
    """The plan of the named target, for the named GPU architectures."""
    return plan(Catalogue(), options.target, getattr(options, "sm", None))
