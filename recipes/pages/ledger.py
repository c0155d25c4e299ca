"""recipes/seeds.md: what the documents say, and what answers it."""

from __future__ import annotations

from pathlib import Path

from recipes.measure import documents
from recipes.pages import markdown
from recipes.pages.tables import Facts, ids_by_answer, states_of


def page(facts: Facts) -> tuple[Path, str]:
    """recipes/seeds.md and the text it should have: claims and statements of every id, and the ids without any."""
    claims = [(seed, claim) for claim in facts.room.claims.values() for seed in claim.seeds]
    claimed = [
        [seed, claim.sentence, states_of(facts, claim.id)] for seed, claim in sorted(claims, key=lambda one: one[0])
    ]
    others = [
        [", ".join(one.statement.seeds), one.statement.says, one.found or "not measured", one.where]
        for one in facts.statements
    ]
    text = _LEDGER.format(
        documents="\n".join(f"- {letter}: {name}" for letter, (name, _) in documents.DOCUMENTS.items()),
        claims=markdown.table("id|claim|state", claimed),
        statements=markdown.table("id|the document says|found here|in", others),
        open=", ".join(_ranges(ids_by_answer(facts)["open"])),
    )
    return facts.root / "recipes" / "seeds.md", text


_LEDGER = """\
# What the documents say, and what answers it

Rendered by `nox -s render` from the claims of smoke_tests/, their evidence, and seeds.toml. The documents are:

{documents}

## Claims

{claims}

## What else they say

Beside what was found: by `bench` (how many times as fast), by a patch's proof, by trainings beside each other, or by a
test of the tool. The documents' numbers are of other GPUs and older releases. A cell is a row of
[the measurements](../smoke_tests/evidence/bench), with its interval of 95 %; a bound within that is not told apart.
Where the host sets the time, to launch kernels took longer than to run them.

{statements}

## Open

Neither claimed nor measured yet: {open}.
"""


def _ranges(ids: list[str]) -> list[str]:
    """A01-A08, A11."""
    found: list[list[str]] = []
    for one in ids:
        if found and one == f"{found[-1][1][0]}{int(found[-1][1][1:]) + 1:02}":
            found[-1][1] = one
        else:
            found.append([one, one])
    return [first if first == last else f"{first}-{last}" for first, last in found]
