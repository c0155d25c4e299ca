"""Verbs that query upstream: for releases newer than the pins, and for the data of a new recipe."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from pathlib import Path

from rich.table import Table

from recipes.catalogue import limits
from recipes.catalogue.load import Catalogue
from recipes.files import write_json
from recipes.make import draft
from recipes.make import outdated as asking
from recipes.make.cache import Cache
from recipes.make.outdated import Standing
from recipes.progress import Steps, console, errors, say
from recipes.verbs.arguments import Verbs, text


def register(verbs: Verbs) -> None:
    """Add these verbs with their arguments."""
    asked = verbs.add("outdated", outdated, target=False)
    asked.add_argument("targets", nargs="*", metavar="TARGET", help="the targets to look at (default: all)")
    asked.add_argument("--json", type=text, metavar="FILE", help='also write JSON to this file; "-" prints it instead')
    begun = verbs.add("new-package", new_package, target=False)
    begun.add_argument("pin", metavar="PACKAGE==VERSION", help="the release to write a recipe for")
    begun.add_argument("--target", default="cpu", help="the target that the wheel has to fit (default: %(default)s)")
    begun.add_argument("--source", action="store_true", help="build it from its sdist even if it has a wheel")
    added = verbs.add("new-target", new_target, target=False)
    added.add_argument("name", metavar="NAME", help="the name of the target")
    added.add_argument("--like", required=True, metavar="TARGET", help="the target to copy")
    added.add_argument(
        "--without", action="append", default=[], metavar="PACKAGE", help="leave this package out; repeat for several"
    )
    added.add_argument("--reason", type=text, help="what the target is for, in one line")


def outdated(options: argparse.Namespace) -> int:
    """Show each pin's newest release, whether the limits allow it, and if its patches stay, end or retire."""
    catalogue = Catalogue()
    targets = [catalogue.target(name) for name in options.targets] or list(catalogue.targets.values())
    alone = options.json == "-"
    with tempfile.TemporaryDirectory() as folder, Steps(errors if alone else console) as steps:
        cache = Cache(Path(folder).resolve())  # nothing is kept, so there is no other run to wait for
        with cache.held(steps.wait):
            rows = asking.standings(catalogue, targets, cache, steps)
    as_json = {"pins": [row.as_json() for row in rows]}
    if alone:
        print(json.dumps(as_json, indent=1))
        return 0
    _show(rows)
    if options.json:
        write_json(Path(options.json), as_json)
        say(f"The same as JSON is in {options.json}.")
    return 0


def new_package(options: argparse.Namespace) -> int:
    """Write the recipe of a release on the package index, and list what is left to fill in."""
    catalogue, cache, (name, version) = Catalogue(), Cache(), limits.what_if(options.pin)
    with Steps() as steps, cache.held(steps.wait):
        path, todo = draft.package(catalogue, name, version, options.target, options.source, cache, steps)
        steps.say("wrote", str(path))
        for line in todo:
            steps.say("todo", line)
    return 0


def new_target(options: argparse.Namespace) -> int:
    """Copy a target under another name, and list what is left to fill in."""
    catalogue = Catalogue()
    todo = draft.target(catalogue, options.name, options.like, options.without, options.reason)
    say(f"[{options.name}] is in {catalogue.targets_file}.")
    for line in todo:
        say(f"todo    {line}")
    return 0


def _show(rows: list[Standing]) -> None:
    """Print the table, and below it each reason by its number."""
    reasons = list(dict.fromkeys(reason for row in rows for reason in row.reasons))
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("target", "package", "pinned", "newest", "limits", "bump to", "patches"):
        table.add_column(column, overflow="fold")
    for row in rows:
        cited = " ".join(str(reasons.index(reason) + 1) for reason in row.reasons)
        words = Counter(patch.word for patch in row.patches)
        patches = ", ".join(f"{count} {word}" for word, count in sorted(words.items()))
        verdict = f"{row.verdict} {cited}".rstrip()
        table.add_row(row.target, row.package, row.pinned, row.newest or "", verdict, row.fitting or "", patches)
    console.print(table)
    for number, reason in enumerate(reasons, 1):
        say(f"{number:3}  {reason}")
    for name, why in dict.fromkeys(
        (patch.name, patch.why) for row in rows for patch in row.patches if patch.word == "retires"
    ):
        say(f"{name} retires: {why}")
