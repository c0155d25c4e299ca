"""The decorators of a claim: `@proves` says what a test proves, and `@needs` what hardware it needs."""

from __future__ import annotations

import re
from typing import Any, Dict, NamedTuple, Optional, Tuple, Union

import pytest


def proves(
    sentence: str,
    seed: Union[str, Tuple[str, ...]] = (),
    package: Optional[str] = None,
    since: str = "0",
    until: str = "",
) -> pytest.MarkDecorator:
    """Give a test its claim; all arguments must be literals, because tools read them without importing.

    sentence: a sentence, unique in smoke_tests.
    seed: id or ids of the seed inventory that the claim answers, e.g. "A09".
    package: the distribution the claim is about; by default the one that the test file is named after.
    since: the first version of that package that the claim is about.
    until: the first version that the claim is no longer about, or "". Versions are those of the recipes, because every
    apex reports version 0.1.
    """
    return pytest.mark.proves(sentence, seed=seed, package=package, since=since, until=until)


def needs(cuda: bool = False, sm: Tuple[int, int] = (0, 0), gpus: int = 0, isa: str = "") -> pytest.MarkDecorator:
    """Say what hardware a claim needs; a machine without it skips the test and names what it lacks.

    cuda: a CUDA GPU (implied by sm and gpus), sm: the lowest compute capability, e.g. (8, 9), gpus: how many of them,
    isa: a CPU feature as /proc/cpuinfo spells it, e.g. "avx2".
    """
    return pytest.mark.needs(cuda=cuda or sm > (0, 0) or gpus > 0, sm=sm, gpus=gpus, isa=isa)


def every(*operators: str, only: str = "", seen: bool = False, once: bool = False) -> pytest.MarkDecorator:
    """Run a test once per implementation of these operators that the target has, and per dtype of each.

    The test takes `column` and `dtype` of operators/table.py, and `name` if it is about several operators. A column
    names its package. only: the one package to take; seen: only implementations that their kernels identify;
    once: on a GPU only with the first dtype of each, because every further dtype has to be compiled.
    """
    return pytest.mark.every(*operators, only=only, seen=seen, once=once)


# Marks a claim that takes long: if several processes share the claims, these begin first.
long = pytest.mark.long


class Claim(NamedTuple):
    """The sentence that a test proves about a package."""

    sentence: str
    seed: Tuple[str, ...]
    package: str
    since: str
    until: str

    def is_about(self, packages: Dict[str, Any]) -> bool:
        """Whether the claim is about an environment with these packages, as the manifest lists them."""
        return self.package in packages and holds(packages[self.package]["release"], self.since, self.until)


def holds(version: str, since: str, until: str) -> bool:
    """Whether since <= version < until, where "" is no end."""
    return release(since) <= release(version) and (not until or release(version) < release(until))


def release(version: str) -> Tuple[int, ...]:
    """The release numbers of a version: "2.13.0+cpu" -> (2, 13, 0), "2.1.0a0+32f93b1" -> (2, 1, 0)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in match.group().split(".")) if match else ()


def claim_of(item: pytest.Item, manifest: Dict[str, Any]) -> Claim:
    """The claim of a collected test, which must carry `@proves`.

    A `package` or `column` parameter of the test wins over the decorator, and the decorator over the file name, where
    test_<module>.py stands for the package whose module that is, else for the name with hyphens.
    """
    mark = item.get_closest_marker("proves")
    assert mark is not None, f"{item.nodeid} makes no claim"
    seed, since = mark.kwargs.get("seed", ()), mark.kwargs.get("since", "0")
    until = mark.kwargs.get("until", "")
    stem = item.path.stem[len("test_") :]
    by_module = {entry["module"]: name for name, entry in manifest["packages"].items()}
    named = mark.kwargs.get("package") or by_module.get(stem, stem.replace("_", "-"))
    row = item.callspec.params if hasattr(item, "callspec") else {}
    package = row.get("package", named)
    if "column" in row:
        # If the target has no implementation, pytest keeps an item without values, which concerns no package.
        package = row["column"].partition(".")[0] if isinstance(row["column"], str) else ""
    return Claim(mark.args[0], (seed,) if isinstance(seed, str) else tuple(seed), package, since, until)


def needs_of(item: pytest.Item) -> Dict[str, Any]:
    """Everything that the `needs` marks of a test require, the strictest of each kind."""
    merged: Dict[str, Any] = {"cuda": False, "sm": (0, 0), "gpus": 0, "isa": ""}
    for mark in item.iter_markers("needs"):
        merged = {key: max(value, mark.kwargs.get(key, value)) for key, value in merged.items()}
    return merged


class Elsewhere(pytest.skip.Exception):  # type: ignore[name-defined,misc]
    """Something that this machine lacks although its hardware is the declared kind: more GPUs, or a permission.

    A claim that raises it is unproven here, and never refuted.
    """
