"""What the learned limits (limits.toml) say: which versions fit together, which do not and why, and which are unknown.

A limit is one fact: these versions of a package need these ranges of other things. It is apart from the releases
because it also speaks of versions that no target pins, so that a what-if gets an answer before any build.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from recipes.catalogue.lock import Lock
from recipes.catalogue.schema import Limit, Target, is_version
from recipes.errors import Refusal

# What a combination holds: versions of distributions, and of python, cuda, sm, glibc; sm may have several.
Facts = Mapping[str, list[str]]


@dataclass(frozen=True)
class Reason:
    """Why a combination is allowed or refused: the rule by itself, and what the target has."""

    rule: str
    here: str

    def __str__(self) -> str:
        return f"{self.here}: {self.rule}"


@dataclass(frozen=True)
class Verdict:
    """The answer for one combination: allowed, refused or unknown, with the reasons that it cites."""

    word: Literal["allowed", "refused", "unknown"]
    reasons: tuple[Reason, ...] = ()


def facts(target: Target, lock: Lock | None, replaced: Mapping[str, str]) -> dict[str, list[str]]:
    """What a target holds: itself, its packages, its locked dependencies; then what a what-if puts in their place."""
    held = {artifact.name: [artifact.version] for artifact in lock.artifacts} if lock else {}
    held |= {name: [version] for name, version in target.packages.items()}
    held |= {"python": [target.python], "cuda": [target.cuda], "glibc": [target.glibc], "sm": target.sm}
    base = {"driver": target.driver, "cudnn": target.cudnn, "gcc": target.gcc}
    held |= {name: [version] for name, version in base.items() if version}
    return held | {name: [version] for name, version in replaced.items()}


def judge(limits: list[Limit], held: Facts, about: Collection[str]) -> Verdict:
    """Refused if a limit on these things is broken, allowed if limits cover them and none is broken, else unknown."""
    cited = [need for limit in limits for need in _applied(limit, held) if {limit.package, need.thing} & set(about)]
    broken = tuple(need.reason for need in cited if not need.holds)
    if broken:
        return Verdict("refused", broken)
    return Verdict("allowed", tuple(need.reason for need in cited)) if cited else Verdict("unknown")


def refuse(verdict: Verdict) -> None:
    """Raise a refusal with every reason of the verdict, if it is refused."""
    if verdict.word == "refused":
        reasons = "; also, ".join(map(str, verdict.reasons))
        raise Refusal(f"{reasons}; choose another version of one of them.")


@dataclass(frozen=True)
class _Cited:
    """A need of a limit that the facts answer."""

    thing: str
    holds: bool
    reason: Reason


def _applied(limit: Limit, held: Facts) -> Iterator[_Cited]:
    mine = held.get(limit.package, [])
    if not mine or not all(_within(version, limit.versions) for version in mine):
        return
    for thing, need in limit.needs.items():
        theirs = held.get(thing, [])
        if theirs:
            holds = all(_within(version, need) for version in theirs)
            side = f"{limit.package} {', '.join(mine)} needs {thing} {need}"
            here = f"{side}, and the target has {thing} {', '.join(theirs)}"
            rule = f"{limit.reason} ({limit.thread})"
            yield _Cited(thing, holds, Reason(rule, here))


def constraints(limits: list[Limit], target: Target) -> list[str]:
    """What the limits require of distributions that the target does not pin; its lock has to keep to these."""
    held = facts(target, None, {})
    beside = {"python", "cuda", "cudnn", "driver", "gcc", "glibc", "sm"} | set(target.packages)
    required = {
        f"{thing}{need}"
        for limit in limits
        if held.get(limit.package) and all(_within(version, limit.versions) for version in held[limit.package])
        for thing, need in limit.needs.items()
        if thing not in beside
    }
    return sorted(required)


@cache  # the compatibility matrix asks the same question tens of thousands of times
def _within(version: str, need: str) -> bool:
    return is_version(version) and SpecifierSet(need).contains(version, prereleases=True)


def what_if(text: str) -> tuple[str, str]:
    """Parse PACKAGE==VERSION from a command line; anything else is refused."""
    try:
        asked = Requirement(text)
        (only,) = asked.specifier
    except (InvalidRequirement, ValueError):
        raise Refusal(f"{text!r} is not PACKAGE==VERSION: write it as flash-attn==2.5.8.") from None
    if only.operator != "==" or not is_version(only.version):
        raise Refusal(f"{text!r} names no single version: write it as flash-attn==2.5.8.")
    return canonicalize_name(asked.name), only.version
