"""The blocks of docs/status/documents.md: the documents' statements, and what answers them."""

from __future__ import annotations

from recipes.measure import runs
from recipes.pages import markdown
from recipes.pages.tables import Facts, ids_by_answer, states_of


def claims(facts: Facts) -> str:
    """The claims that answer the documents, by id."""
    pairs = sorted(((seed, claim) for claim in facts.room.claims.values() for seed in claim.seeds), key=lambda x: x[0])
    rows = [[seed, claim.sentence, states_of(facts, claim.id)] for seed, claim in pairs]
    return markdown.table("id|claim|state", rows)


def statements(facts: Facts) -> str:
    """The documents' other statements, and what answers them."""
    rows = [
        [", ".join(answer.statement.seeds), answer.statement.says, answer.result or "not measured", answer.where]
        for answer in facts.statements
    ]
    return markdown.table("id|the document says|measured or tested here|where", rows)


def described(facts: Facts) -> str:
    """The runs on several GPUs that the documents describe."""
    listed = [f"- `{run.name}`: {', '.join(run.seeds)}" for run in runs.load(facts.root).values() if run.seeds]
    return "\n".join(listed)


def left_open(facts: Facts) -> str:
    return f"Neither claimed nor measured yet: {', '.join(_ranges(ids_by_answer(facts)['open']))}."


def _ranges(ids: list[str]) -> list[str]:
    """A01-A08, A11."""
    ranges: list[list[str]] = []
    for identity in ids:
        if ranges and identity == f"{ranges[-1][1][0]}{int(ranges[-1][1][1:]) + 1:02}":
            ranges[-1][1] = identity
        else:
            ranges.append([identity, identity])
    return [first if first == last else f"{first}-{last}" for first, last in ranges]
