"""What the documents say and what answers it: the blocks of docs/status/documents.md."""

from __future__ import annotations

from recipes.errors import Refusal
from recipes.measure import documents, runs
from recipes.pages import markdown
from recipes.pages.tables import Facts
from recipes.prove import evidence


def summary(facts: Facts) -> str:
    """How far each document is answered: its ids by the best that there is for them."""
    answered, rows = ids_by_answer(facts), []
    denied = {seed for one in facts.statements if one.holds is False for seed in one.statement.seeds}
    for letter, (name, last) in documents.DOCUMENTS.items():
        counted = [*answered.values(), sorted(denied)]
        counts = [str(sum(seed[0] == letter for seed in found)) for found in counted]
        rows.append([f"{letter}01 to {letter}{last}: {name}", *counts])
    return markdown.table("|".join(["document", *answered, "does not hold"]), rows)


def ids_by_answer(facts: Facts) -> dict[str, list[str]]:
    """The ids by what answers them, each once: the words of the page's columns."""
    claimed = {seed for claim in facts.room.claims.values() for seed in claim.seeds}
    if unknown := sorted(claimed - set(documents.IDS)):
        raise Refusal(f"smoke_tests: a claim names the seed {unknown[0]}, and the inventory is A01 to E16: correct it.")
    proved = {
        seed
        for claim in facts.room.claims.values()
        for seed in claim.seeds
        if "proved on" in states_of(facts, claim.id)
    }
    found = [one.statement for one in facts.statements if one.found]
    kinds = {
        "a claim is proved": proved,
        "measured, patched or tested": {seed for one in found if not one.beyond for seed in one.seeds},
        "claimed, not run yet": claimed,
        "not to be had here": {seed for one in found for seed in one.seeds},
        "open": set(documents.IDS),
    }
    ids: dict[str, list[str]] = {}
    for word, some in kinds.items():
        ids[word] = sorted(some.difference(*ids.values()))
    return ids


def claims(facts: Facts) -> str:
    """The claims that answer the documents, by id."""
    claims = sorted(((seed, claim) for claim in facts.room.claims.values() for seed in claim.seeds), key=lambda x: x[0])
    rows = [[seed, claim.sentence, states_of(facts, claim.id)] for seed, claim in claims]
    return markdown.table("id|claim|state", rows)


def statements(facts: Facts) -> str:
    """What else the documents say, and what answers it."""
    rows = [
        [", ".join(answer.statement.seeds), answer.statement.says, answer.found or "not measured", answer.where]
        for answer in facts.statements
    ]
    return markdown.table("id|the document says|measured or tested here|where", rows)


def described(facts: Facts) -> str:
    """The runs on several GPUs that the documents describe."""
    listed = [f"- `{run.name}`: {', '.join(run.seeds)}" for run in runs.load(facts.root).values() if run.seeds]
    return "\n".join(listed)


def still_open(facts: Facts) -> str:
    return f"Neither claimed nor measured yet: {', '.join(_ranges(ids_by_answer(facts)['open']))}."


def states_of(facts: Facts, claim: str) -> str:
    """The state of a claim in every run that has it."""
    places: dict[str, list[str]] = {}
    for one, run in facts.runs:
        rows = [row for row in run["claims"] if row["id"].split("[")[0] == claim]
        if rows:
            counts = facts.states(one, run, rows)
            counted = [word if count == len(rows) else f"{count} {word}" for word, count in counts.items()]
            place = f"{one.target.name} ({evidence.machine_name(run['hardware'])})"
            places.setdefault(" and ".join(counted), []).append(place)
    return "; ".join(f"{state} on {', '.join(found)}" for state, found in places.items()) or "not run"


def _ranges(ids: list[str]) -> list[str]:
    """A01-A08, A11."""
    found: list[list[str]] = []
    for one in ids:
        if found and one == f"{found[-1][1][0]}{int(found[-1][1][1:]) + 1:02}":
            found[-1][1] = one
        else:
            found.append([one, one])
    return [first if first == last else f"{first}-{last}" for first, last in found]
