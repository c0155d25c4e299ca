"""The definition of a fault, the list of all faults, and the ways to plant one."""

from __future__ import annotations

import importlib.util
import sys
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any, Callable, ContextManager, List, NamedTuple, Tuple, Union
from unittest import mock

import torch

from smoke_tests.operators.table import OPERATORS

Call = Callable[..., Any]
Wrap = Callable[[Call], Call]
TABLE, CASTS, FLOAT8 = "test_fused_ops.py", "test_torch.py", "test_torchao.py"
E4M3, E5M2 = getattr(torch, "float8_e4m3fn", None), getattr(torch, "float8_e5m2", None)  # since torch 2.1
CODES = {E4M3, E5M2}


class Fault(NamedTuple):
    """A fault, and the claims that have to catch it.

    kind: what sort of fault; operator: the row of the table that it is planted in, "" where it is in none.
    column: a package, or one variant of it, where it is not for every implementation that a target has.
    dtype: the only format in which it is a fault of an implementation.
    claims: FILE::TEST, one of which has to catch it.
    plant: the context in which column's implementation has the fault.
    """

    name: str
    kind: str
    operator: str
    column: str
    dtype: str
    claims: Tuple[str, ...]
    plant: Callable[[str], ContextManager[Any]]


FAULTS: List[Fault] = []


def in_table(operator: str, wrap: Wrap) -> Callable[[str], ContextManager[Any]]:
    """Plants wrap(implementation) in place of an implementation of the operator."""

    def plant(column: str) -> ContextManager[Any]:
        entry = OPERATORS[operator][column]
        return mock.patch.dict(OPERATORS[operator], {column: entry._replace(call=wrap(entry.call))})

    return plant


@lru_cache(maxsize=None)
def loaded(extension: str, library: Path) -> ContextManager[None]:
    """Replace an extension that a package imports by this compiled one, for the rest of the process."""
    specification = importlib.util.spec_from_file_location(extension, library)
    assert specification and specification.loader, library
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    sys.modules[extension] = module
    return nullcontext()


def wrong(
    kind: str, *operators: str, by: Union[str, Tuple[str, ...]] = "", column: str = "", dtype: str = ""
) -> Callable[[Wrap], Wrap]:
    """Make a fault of these operators of a function from implementation to implementation; its name says what is wrong.

    by: the claims, in test_fused_ops.py unless they name another file; by default test_OPERATOR.
    """

    def note(wrap: Wrap) -> Wrap:
        for operator in operators:
            tests = (by or "test_" + operator,) if isinstance(by, str) else by
            claims = tuple(test if "::" in test else f"{TABLE}::{test}" for test in tests)
            name = wrap.__name__.replace("_", " ")
            FAULTS.append(Fault(name, kind, operator, column, dtype, claims, in_table(operator, wrap)))
        return wrap

    return note


def patched(kind: str, claim: str, column: str, operator: str = "") -> Callable[[Call], Call]:
    """Make a fault of a context manager, which replaces something in a package; it may take the column."""

    def note(plant: Call) -> Call:
        FAULTS.append(Fault(plant.__name__.replace("_", " "), kind, operator, column, "", (claim,), plant))
        return plant

    return note


def backward_of(forward: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The values of one tensor with the gradient of another of the same shape."""
    return forward.detach() + (other - other.detach())
