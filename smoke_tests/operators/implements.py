"""The decorator by which an adapter adds a row to the table of operators."""

from __future__ import annotations

from importlib import metadata
from typing import Any, Callable, TypeVar

from smoke_tests.claims import holds

Implementation = TypeVar("Implementation", bound=Callable[..., Any])


def implements(name: str, column: str, newer: str = "", **fields: Any) -> Callable[[Implementation], Implementation]:
    """Add what is decorated to the table as this implementation of an operator; the fields are those of its Entry.

    Its row is part of its own definition, so that outcomes of other rows do not depend on it. newer: the version of the
    package from which on it takes the place of the row that the table has.
    """

    def add(call: Implementation) -> Implementation:
        from smoke_tests.operators import table  # here, because the table imports the adapters

        if not newer or _is_installed(column.partition(".")[0], newer):
            table.OPERATORS[name][column] = table.Entry(call, **fields)
        return call

    return add


def _is_installed(package: str, since: str) -> bool:
    """Whether a distribution is installed in this version or a newer one."""
    try:
        return holds(metadata.version(package), since, "")
    except metadata.PackageNotFoundError:
        return False
