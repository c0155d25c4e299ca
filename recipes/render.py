"""README's tables, written between markers from data, patches, claims and promoted evidence."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from recipes import evidence, patch
from recipes.cache import write_text
from recipes.evidence import Room
from recipes.model import Catalogue, Refusal
from recipes.plan import Plan, plan
from recipes.progress import console

# The seed inventory: five documents, their ids numbered from 1.
SEEDS = {"A": 29, "B": 58, "C": 24, "D": 15, "E": 16}


def blocks(catalogue: Catalogue) -> dict[str, str]:
    """Every rendered block of README.md, by the name in its markers."""
    plans = [plan(catalogue, name) for name in catalogue.targets]
    makers: dict[str, Callable[[Catalogue, list[Plan]], str]] = {
        "targets": _targets, "matrix": _matrix, "patches": _patches, "ledger": _ledger,
    }  # fmt: skip
    return {name: make(catalogue, plans) for name, make in makers.items()}


def _rows(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _targets(_: Catalogue, plans: list[Plan]) -> str:
    rows = []
    for one in plans:
        target = one.target
        packages = ", ".join(pin.label + (" (patched)" if one.patches[pin.name] else "") for pin in one.pins)
        cuda = target.cuda if target.cuda == "none" else f"{target.cuda}, sm {' '.join(target.sm)}"
        rows.append(
            [
                f"`{target.name}`",
                target.base.wheels.image,
                target.python,
                cuda,
                packages,
                ", ".join(target.proves_on),
                target.reason,
            ]
        )
    return _rows(["target", "base", "Python", "CUDA", "packages", "proves on", "for"], rows)


def _matrix(catalogue: Catalogue, plans: list[Plan]) -> str:
    """Target and hardware by package: how many claims are proved, or the word that stands in the way."""
    rows = []
    for one in plans:
        found = evidence.promoted(catalogue.root, one.target.name)
        if not found:
            rows += [[f"`{one.target.name}`", "", pin.label, "declared", ""] for pin in one.pins]
        for run in found:
            for pin in one.pins:
                claims = [row for row in run["claims"] if row["package"] == pin.name]
                built = run["packages"].get(pin.name, {}).get("built_with", {})
                how = (
                    f"built with {built['compiler']}, {built['where']}"
                    if built.get("compiler", "none") != "none"
                    else ""
                )
                rows.append(
                    [
                        f"`{one.target.name}`",
                        f"{run['hardware']['name']} ({run['hardware']['cpu']})",
                        pin.label,
                        _cell(one, run, claims),
                        how,
                    ]
                )
    return _rows(["target", "hardware", "package", "state", "note"], rows)


def _cell(one: Plan, run: dict, claims: list[dict]) -> str:  # type: ignore[type-arg]
    if not claims:
        return "declared"
    state = evidence.state(one, run, claims)
    good = sum(row["outcome"] == "proved" for row in claims)
    return f"{state} ({good} of {len(claims)})"


def _patches(catalogue: Catalogue, plans: list[Plan]) -> str:
    rows = []
    for one in patch.every(catalogue.root):
        used = [
            each.target.name
            for each in plans
            for chosen in each.patches.get(one.package, [])
            if chosen.path == one.path
        ]
        upstream = str(one.header["Applied-Upstream"] or "not upstream")
        rows.append(
            [
                f"[{one.package} {one.path.name[:4]}]({one.name})",
                one.summary,
                str(one.header["X-Applies-To"]),
                upstream,
                ", ".join(used),
            ]
        )
    return _rows(["patch", "what it does", "versions", "upstream", "targets"], rows)


def _ledger(catalogue: Catalogue, plans: list[Plan]) -> str:
    """Seed id, claim, state on each hardware; then the ids for which no claim exists yet."""
    by_id: dict[str, list[list[str]]] = {}
    for claim in Room(catalogue.root).claims.values():
        for seed in claim.seeds:
            by_id.setdefault(seed, []).append([seed, claim.sentence, _states(catalogue, plans, claim.id)])
    unknown = sorted(
        set(by_id) - {f"{letter}{number:02}" for letter, last in SEEDS.items() for number in range(1, last + 1)}
    )
    if unknown:
        raise Refusal(
            f"smoke_tests: a claim names the seed {unknown[0]}, which is not in the inventory (A01 to E16): correct it."
        )
    open_ids = [
        _ranges(letter, [n for n in range(1, last + 1) if f"{letter}{n:02}" not in by_id])
        for letter, last in SEEDS.items()
    ]
    table = _rows(["id", "claim", "state"], [row for seed in sorted(by_id) for row in by_id[seed]])
    return f"{table}\n\nNo claim yet: {', '.join(text for text in open_ids if text)}."


def _states(catalogue: Catalogue, plans: list[Plan], claim: str) -> str:
    states = []
    for one in plans:
        for run in evidence.promoted(catalogue.root, one.target.name):
            rows = [row for row in run["claims"] if row["id"].split("[")[0] == claim]
            if rows:
                states.append(f"{evidence.state(one, run, rows)} on {one.target.name}, {run['hardware']['name']}")
    return "; ".join(states) or "not run"


def _ranges(letter: str, numbers: list[int]) -> str:
    """A01-A08, A11."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{letter}{first:02}" + (f"-{letter}{last:02}" if last > first else "") for first, last in runs)


def rendered(catalogue: Catalogue) -> tuple[Path, str]:
    """README.md and the text it should have."""
    path = catalogue.root / "README.md"
    text = path.read_text(encoding="utf-8")
    for name, block in blocks(catalogue).items():
        marked = re.search(rf"<!-- {name}: [^\n]*-->\n(.*?)<!-- /{name} -->", text, re.DOTALL)
        if not marked:
            raise Refusal(f"{path} lacks the markers <!-- {name}: ... --> and <!-- /{name} -->: put them back.")
        text = f"{text[: marked.start(1)]}{block}\n{text[marked.end(1) :]}"
    return path, text


def write(catalogue: Catalogue) -> int:
    """Write README.md and return 0."""
    path, text = rendered(catalogue)
    if path.read_text(encoding="utf-8") != text:
        write_text(path, text)
        console.print(f"rendered {path.name}")
    return 0


def check(catalogue: Catalogue) -> int:
    """0 if README.md is current; else refused with the command that makes it so."""
    path, text = rendered(catalogue)
    if path.read_text(encoding="utf-8") != text:
        raise Refusal(f"{path.name} is not what the data and the evidence say: run `nox -s render` and commit it.")
    return 0
