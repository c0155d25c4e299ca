"""The verb that finds what prevents a build or a run on this machine, and what causes an error text."""

from __future__ import annotations

import argparse
import codecs
import sys
from collections.abc import Iterable
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from recipes.catalogue import limits, symptoms
from recipes.catalogue.load import Catalogue
from recipes.catalogue.plan import Plan, plan
from recipes.errors import Refusal
from recipes.make import machine
from recipes.make.machine import Check
from recipes.progress import console, say
from recipes.verbs.arguments import Verbs, place

COLOURS = {"pass": "green", "warning": "yellow", "failure": "red"}
UNKNOWN = 3  # the exit code if no cause is known, as for a what-if


def register(verbs: Verbs) -> None:
    """Add this verb with its arguments."""
    asked = verbs.add("doctor", doctor, target=False)
    asked.add_argument(
        "target", nargs="?", metavar="TARGET", help='the target to look at (default: all); "-" reads an error text'
    )
    asked.add_argument(
        "--error", type=place, metavar="FILE", help='say what an error text or a build log means; "-" is standard input'
    )


def doctor(options: argparse.Namespace) -> int:
    """Check what this machine has and lacks for a target or, with --error, explain an error text."""
    catalogue = Catalogue()
    if options.error or options.target == "-":
        target = options.target if options.target != "-" else None
        path = options.error if options.error != Path("-") else None
        return _explain(catalogue, _text(path), target)
    names = [options.target] if options.target else list(catalogue.targets)
    rows: dict[Check, list[str]] = {}
    for name in names:
        for check in machine.of_target(plan(catalogue, name), catalogue.limits):
            rows.setdefault(check, []).append(name)
    order = list(dict.fromkeys(check.about for check in rows))
    of_targets = [
        (check, "" if len(of) == len(names) else ", ".join(of))
        for check, of in sorted(rows.items(), key=lambda row: order.index(row[0].about))
    ]
    of_machine = [(check, "") for check in machine.of_machine(catalogue.root)]
    _show([*of_targets, *of_machine])
    decisive = [*(of_targets if options.target else ()), *of_machine]
    return 1 if any(check.state == "failure" for check, _ in decisive) else 0


def _text(path: Path | None) -> str:
    """The error text of a file, or of standard input: UTF-8, or UTF-16 with its byte order mark."""
    try:
        data = path.read_bytes() if path else sys.stdin.buffer.read()
    except OSError as error:
        raise Refusal(f"{path} cannot be read ({error.strerror}): name a file with an error text.") from None
    utf_16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    text = data.decode("utf-16" if utf_16 else "utf-8-sig", errors="replace")
    if not text.strip():
        raise Refusal(f"{path or 'Standard input'} has no text: pass the whole output of the command that failed.")
    return text


def _explain(catalogue: Catalogue, text: str, target: str | None) -> int:
    """Print what an error text means, the likeliest cause first, or that no cause is known."""
    facts = None
    if target:
        chosen: Plan = plan(catalogue, target)
        facts = limits.facts(chosen.target, chosen.lock, {})
    causes = symptoms.diagnoses(symptoms.read(catalogue.root), text, facts)
    for number, cause in enumerate(causes, 1):
        say(f"{number}. {cause.line[:200]}")
        say(f"   cause: {cause.cause}")
        say(f"   fix:   {cause.fix}")
        say(f"   seen:  {cause.thread}")
    if causes:
        return 0
    line = next(symptoms.troubles(text), "")
    if not line:
        say("no line of this text looks like an error")
        return 0
    say(f"unknown: no row of recipes/symptoms.toml and recipes/limits.toml explains {line[:200]!r}.")
    say("Report it with the whole text, the command that printed it, and what `nox -s doctor` says of the machine.")
    return UNKNOWN


def _show(checks: Iterable[tuple[Check, str]]) -> None:
    """Print the table of checks, each with the targets that it is for if it is not for all."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("state", "check", "finding", "targets"):
        table.add_column(column, overflow="fold")
    for check, targets in checks:
        finding = f"{check.finding}\n-> {check.remedy}" if check.remedy and check.state != "pass" else check.finding
        colour = COLOURS[check.state]
        table.add_row(f"[{colour}]{check.state}[/{colour}]", check.about, escape(finding), targets)
    console.print(table)
