"""What the learned limits (limits.toml) say: which versions fit together, which do not and why, and which are unknown.

A limit is one fact: these versions of a package need these ranges of other things. It is apart from the releases
because it also speaks of versions that no target pins, so that a what-if gets an answer before any build.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from recipes.catalogue.lock import Lock
from recipes.catalogue.schema import BaseFacts, Limit, Target, is_version
from recipes.errors import Refusal

# What a limit may name besides distributions.
FACTS = ("python", "cuda", "cudnn", "driver", "gcc", "glibc", "sm")
# How each of them is written, and what else people write: by name, the pattern, what it is called, and an example.
SHAPES = {
    "python": (r"3\.\d+(\.\d+)?", "a version of Python", "3.12, without the t of a free-threaded build"),
    "cuda": (r"\d+\.\d+(\.\d+)?", "a version of CUDA", "12.8, with its minor version"),
    "sm": (r"\d+\.\d+", "a GPU architecture", "9.0, with a point and without a or f: an H100 is 9.0, an RTX 4090 8.9"),
    "glibc": (r"2\.\d+", "a C library", "2.35"),
    "driver": (r"\d+(\.\d+)*", "a driver of NVIDIA", "580, its branch, or 580.95.05"),
    "gcc": (r"\d+(\.\d+)*", "a GCC", "13"),
    "cudnn": (r"\d+(\.\d+)*", "a version of cuDNN", "9.10.2"),
}
# What a combination holds: versions of distributions, and of python, cuda, sm, glibc; sm may have several.
Facts = Mapping[str, list[str]]


@dataclass(frozen=True)
class Reason:
    """Why a combination is allowed or refused: the rule, and what the target has."""

    rule: str
    here: str

    def __str__(self) -> str:
        return f"{self.here}: {self.rule}"


@dataclass(frozen=True)
class Verdict:
    """The answer for one combination: allowed, refused or unknown, with the reasons that it cites."""

    word: Literal["allowed", "refused", "unknown"]
    reasons: tuple[Reason, ...] = ()


def facts(
    target: Target, lock: Lock | None, replaced: Mapping[str, str], bases: Iterable[BaseFacts] = ()
) -> dict[str, list[str]]:
    """What a target holds: itself, its packages, its locked dependencies; then what a what-if puts in their place.

    The cuDNN and gcc that the target does not name are those of its wheels base, where `bases` know it.
    """
    held = {artifact.name: [artifact.version] for artifact in lock.artifacts} if lock else {}
    held |= {name: [version] for name, version in target.packages.items()}
    held |= {"python": [target.python], "cuda": [target.cuda], "glibc": [target.glibc], "sm": target.sm}
    image = target.base.wheels.image
    for base in [base for base in bases if any(image.startswith(part) or image.endswith(part) for part in base.images)]:
        gives = {"cudnn": base.cudnn, "gcc": base.gcc}
        held |= {name: [version] for name, version in gives.items() if version and name not in held}
    named = {"driver": target.driver, "cudnn": target.cudnn, "gcc": target.gcc}
    held |= {name: [version] for name, version in named.items() if version}
    return held | {name: [version] for name, version in replaced.items()}


def judge(limits: list[Limit], held: Facts, about: Collection[str]) -> Verdict:
    """Refused if a limit on these things is broken, allowed if limits cover them and none is broken, else unknown."""
    cited = [need for limit in limits for need in _applied(limit, held) if {limit.package, need.thing} & set(about)]
    broken = tuple(need.reason for need in cited if not need.holds)
    if broken:
        return Verdict("refused", broken)
    return Verdict("allowed", tuple(need.reason for need in cited)) if cited else Verdict("unknown")


def barred(limits: list[Limit], cuda: str, thing: str, version: str) -> str:
    """The rule that bars this version of a thing, such as gcc, beside that CUDA, or ""."""
    verdict = judge(limits, {"cuda": [cuda], thing: [version]}, {thing})
    return verdict.reasons[0].rule if verdict.word == "refused" else ""


def refuse(verdict: Verdict, instead: Callable[[], str] = str) -> None:
    """Raise a refusal with every reason of the verdict, if it is refused; `instead` finds what would fit."""
    if verdict.word == "refused":
        reasons = "; also, ".join(map(str, verdict.reasons))
        fitting = instead()
        raise Refusal(f"{reasons}; choose another version of one of them{f': {fitting}' if fitting else ''}.")


@dataclass(frozen=True)
class _Cited:
    """A need of a limit that the facts answer."""

    thing: str
    holds: bool
    reason: Reason


def _applied(limit: Limit, held: Facts) -> Iterator[_Cited]:
    mine = held.get(limit.package, [])
    if not mine or not all(within(version, limit.versions) for version in mine):
        return
    of_another_build = _is_of_another_build(limit, mine)
    for thing, need in needs_of(limit, mine).items():
        theirs = held.get(thing, [])
        if theirs and not (of_another_build and thing == "cuda"):
            holds = all(within(version, need) for version in theirs)
            what = f"cannot be beside {thing}" if need == "none" else f"needs {thing} {need}"
            here = f"{limit.package} {', '.join(mine)} {what}, and the target has {thing} {', '.join(theirs)}"
            rule = f"{limit.reason} ({limit.thread})"
            yield _Cited(thing, holds, Reason(rule, here))


def _is_of_another_build(limit: Limit, versions: Iterable[str]) -> bool:
    """Whether a row speaks of plain versions, and these are builds for a CUDA that they name."""
    return "+" not in limit.versions and any(built_for(version) for version in versions)


def needs_of(limit: Limit, versions: Iterable[str]) -> dict[str, str]:
    """What a row needs of others; the builds of torch that it leaves out are for the plain versions of its package."""
    if not _is_of_another_build(limit, versions):
        return limit.needs
    clauses = {thing: need.split(",") for thing, need in limit.needs.items()}
    return {
        thing: ",".join(clause for clause in parts if not (clause.startswith("!=") and "+" in clause))
        for thing, parts in clauses.items()
    }


def built_for(version: str) -> str | None:
    """The CUDA that a version names as the one it was built for: "12.8" of 2.11.0+cu128, or "none", or "rocm"."""
    label = Version(version).local or "" if is_version(version) else ""
    if match := re.match(r"cu(\d{2})(\d)(\D|$)", label):
        return f"{match[1]}.{match[2]}"
    if match := re.match(r"cu(\d{2})(\D|$)", label):
        return f"{match[1]}.0"
    return {"cpu": "none", "roc": "rocm", "xpu": "xpu"}.get(label[:3])


def constraints(limits: list[Limit], target: Target) -> list[str]:
    """What the limits require of distributions that the target does not pin; its lock has to keep to these."""
    held = facts(target, None, {})
    beside = {*FACTS, *target.packages}
    required = {
        f"{thing}{need}"
        for limit in limits
        if held.get(limit.package) and all(within(version, limit.versions) for version in held[limit.package])
        for thing, need in limit.needs.items()
        if thing not in beside and need != "none"
    }
    return sorted(required)


@cache  # the compatibility matrix asks the same question tens of thousands of times
def within(version: str, need: str) -> bool:
    """Whether a version lies in a range; none lies in "none"."""
    return need != "none" and is_version(version) and SpecifierSet(need).contains(version, prereleases=True)


def written(fact: str, version: str) -> str:
    """The version of a fact, such as sm, as it was written; refused in plain words if no such version can be."""
    pattern, what, example = SHAPES[fact]
    if not re.fullmatch(pattern, version):
        raise Refusal(f"The command line asks for {fact} {version!r}, which is not {what}: write it as {example}.")
    return version


def short(name: str, version: str) -> str:
    """A version as a target names it: python and cuda by major and minor version, driver and gcc by the major one."""
    parts = version.split(".")
    if name in ("driver", "gcc"):
        return parts[0]
    return ".".join(parts[:2]) if name in ("python", "cuda", "glibc", "sm") else version


def what_if(text: str) -> tuple[str, str]:
    """Parse PACKAGE==VERSION from a command line; anything else is refused."""
    name, equals, version = text.partition("==")
    if equals and name.strip().lower() in SHAPES:
        return name.strip().lower(), written(name.strip().lower(), version.strip())
    try:
        asked = Requirement(text)
        (only,) = asked.specifier
    except (InvalidRequirement, ValueError):
        raise Refusal(f"{text!r} is not PACKAGE==VERSION: write it as flash-attn==2.5.8.") from None
    if asked.marker:
        raise Refusal(f"{text!r} holds on some machines only: ask without what follows the semicolon.")
    if only.operator != "==" or not is_version(only.version):
        raise Refusal(f"{text!r} names no single version: write it as flash-attn==2.5.8.")
    return canonicalize_name(asked.name), only.version


def extras(texts: Iterable[str]) -> tuple[Reason, ...]:
    """What is not known of a question with an extra, such as transformers[torch]: the packages that it adds."""
    asked = [(*what_if(text), Requirement(text).extras) for text in texts if "[" in text]
    rule = "ask about each of those packages, without the extra"
    return tuple(
        Reason(rule, f"nothing says what {name}[{extra}] {version} adds")
        for name, version, named in asked
        for extra in sorted(named)
    )


def what_ifs(texts: Iterable[str]) -> dict[str, str]:
    """Parse several; two versions of one package are refused, since an environment has one."""
    asked: dict[str, str] = {}
    for package, version in map(what_if, texts):
        if Version(asked.setdefault(package, version)) != Version(version):
            raise Refusal(f"An environment cannot have {package} {asked[package]} and {version}: ask for one of them.")
    return asked
