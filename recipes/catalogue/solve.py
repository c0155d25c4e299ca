"""What would make a refused combination fit: found by a resolver over the releases and limits that are known."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from packaging.version import Version
from resolvelib import AbstractProvider, BaseReporter, Resolver
from resolvelib.resolvers import ResolutionError

from recipes.catalogue.compatibility import Knowledge, knowledge, same_cuda
from recipes.catalogue.limits import FACTS, built_for, needs_of, within
from recipes.catalogue.load import Catalogue
from recipes.catalogue.schema import Target

SECONDS = 4.0  # for the whole search
ROUNDS = 400


class Need(NamedTuple):
    """A package and the range that another one needs of it; a package that is left out meets what is not `required`."""

    package: str
    need: str
    required: bool


class Candidate(NamedTuple):
    """A package at a version, or left out of the target (None)."""

    package: str
    version: str | None


class _OutOfTime(Exception):
    pass


def instead(catalogue: Catalogue, target: Target, replaced: Mapping[str, str]) -> str:
    """What to ask for instead of a refused combination, as the end of a sentence; empty if nothing is known."""
    known, deadline = knowledge(catalogue), time.monotonic() + SECONDS
    suggestions = []
    try:
        suggestions.append(_nearest(known, target, replaced, deadline))
        suggestions.append(_elsewhere(known, replaced, deadline))
        suggestions.append(
            _changes(known, target, replaced, False, deadline) or _changes(known, target, replaced, True, deadline)
        )
    except _OutOfTime:
        pass
    return ", or ".join(filter(None, suggestions))


def _changes(
    known: Knowledge, target: Target, replaced: Mapping[str, str], may_leave_out: bool, deadline: float
) -> str:
    """Which other packages of the target to change, so that what is asked for fits."""
    provider = _Provider(known, target, replaced, may_leave_out, deadline)
    resolver: Resolver[Need, Candidate, str] = Resolver(provider, BaseReporter())
    wanted = [Need(name, "", required=False) for name in {**target.packages, **provider.asked}]
    try:
        solution = resolver.resolve(wanted, max_rounds=ROUNDS).mapping
    except ResolutionError:
        return ""
    chosen = {name: candidate.version for name, candidate in solution.items() if candidate.version}
    changed = {name: version for name, version in chosen.items() if target.packages.get(name) != version}
    left_out = [name for name in target.packages if name not in chosen]
    remaining = {
        field: {name: value for name, value in getattr(target, field).items() if name in chosen}
        for field in ("packages", "options")
    }
    smaller = target.model_copy(update=remaining)
    if set(changed) <= set(replaced) and not left_out:
        return ""
    verdict = known.verdict(smaller, {**replaced, **changed})
    if verdict.word == "refused":
        return ""
    others = [f"{name} {version}" for name, version in changed.items() if name not in replaced]
    parts = ([f"with {' and '.join(others)}"] if others else []) + (
        [f"without {' and '.join(left_out)}"] if left_out else []
    )
    asked = " and ".join(f"{name} {version}" for name, version in replaced.items())
    many = len(replaced) > 1
    fits, has = ("fit", "have") if many else ("fits", "has")
    sure = fits if verdict.word == "allowed" else f"{has} nothing known against {'them' if many else 'it'}"
    return f"{asked} {sure} {' and '.join(parts)}"


def _nearest(known: Knowledge, target: Target, replaced: Mapping[str, str], deadline: float) -> str:
    """The nearest other version of the one package that is asked for."""
    if len(replaced) != 1 or (package := next(iter(replaced))) in FACTS:
        return ""
    versions = known.versions(package)
    above = [version for version in versions if Version(version) > Version(replaced[package])]
    below = [version for version in reversed(versions) if Version(version) < Version(replaced[package])]
    unknown = ""
    for version in _alternating(below, above):
        _check(deadline)
        word = known.verdict(target, {package: version}).word
        if word == "allowed":
            return f"{package} {version} fits the target"
        unknown = unknown or (version if word == "unknown" else "")
    return f"{package} {unknown} has nothing known against it" if unknown else ""


def _elsewhere(known: Knowledge, replaced: Mapping[str, str], deadline: float) -> str:
    """The targets in which what is asked for fits as it is."""
    fitting = []
    for name, target in known.catalogue.targets.items():
        _check(deadline)
        if known.verdict(target, replaced).word == "allowed":
            fitting.append(name)
    return f"it fits target {' and '.join(fitting[:2])}" if fitting else ""


def _alternating(first: Sequence[str], second: Sequence[str]) -> Iterator[str]:
    for index in range(max(len(first), len(second))):
        yield from first[index : index + 1]
        yield from second[index : index + 1]


def _check(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise _OutOfTime


class _Provider(AbstractProvider[Need, Candidate, str]):
    """The candidates for each package, and what each needs: the target's own version first, then the newest."""

    def __init__(
        self, known: Knowledge, target: Target, replaced: Mapping[str, str], may_leave_out: bool, deadline: float
    ) -> None:
        self.known, self.deadline, self.may_leave_out = known, deadline, may_leave_out
        self.asked = {name: version for name, version in replaced.items() if name not in FACTS}
        self.target = known.changed(target, replaced)
        self.universe = {**self.target.packages, **self.asked}
        self.possible: dict[str, list[str | None]] = {}
        self.facts = {
            name: versions
            for name, versions in known.held(self.target, self.asked).items()
            if name in FACTS or name in self.asked
        }

    def identify(self, requirement_or_candidate: Need | Candidate) -> str:
        return requirement_or_candidate.package

    def get_preference(
        self,
        identifier: str,
        resolutions: Mapping[str, Candidate],
        candidates: Mapping[str, Iterator[Candidate]],
        information: Mapping[str, Iterator[object]],
        backtrack_causes: Sequence[object],
    ) -> tuple[bool, int]:
        return identifier not in self.asked, list(self.universe).index(identifier)

    def find_matches(
        self,
        identifier: str,
        requirements: Mapping[str, Iterator[Need]],
        incompatibilities: Mapping[str, Iterator[Candidate]],
    ) -> Iterable[Candidate]:
        _check(self.deadline)
        needs, barred = list(requirements[identifier]), set(incompatibilities[identifier])
        candidates = [Candidate(identifier, version) for version in self._versions(identifier)]
        candidates = [
            candidate for candidate in candidates if all(self.is_satisfied_by(need, candidate) for need in needs)
        ]
        return [candidate for candidate in candidates if candidate not in barred]

    def _versions(self, package: str) -> list[str | None]:
        """What the package can be, whatever the others are: asked for, pinned, the newest first, or left out."""
        if package not in self.possible:
            pinned = self.universe[package]
            others = [version for version in reversed(self.known.versions(package)) if version != pinned]
            possible = [version for version in (pinned, *others) if self._is_possible(package, version)]
            leave_out = [None] if self.may_leave_out and package != "torch" else []
            self.possible[package] = [pinned] if package in self.asked else [*possible, *leave_out]
        return self.possible[package]

    def _is_possible(self, package: str, version: str) -> bool:
        """Whether a version fits the target's Python, CUDA and the like."""
        if self.known.releases(package, version) and not self.known.fitting(self.target, package, version):
            return False
        if (build := built_for(version)) and not same_cuda(build, self.target.cuda):
            return False
        needs = [item for row in self.known.rows_of(package, version) for item in needs_of(row, [version]).items()]
        return all(within(fact, need) for thing, need in needs for fact in self.facts.get(thing, []))

    def is_satisfied_by(self, requirement: Need, candidate: Candidate) -> bool:
        if candidate.version is None:
            return not requirement.required
        return requirement.need == "" or within(candidate.version, requirement.need)

    def get_dependencies(self, candidate: Candidate) -> Iterable[Need]:
        package, version = candidate
        if version is None:
            return []
        needs = [
            Need(thing, need, row.required)
            for row in self.known.rows_of(package, version)
            for thing, need in needs_of(row, [version]).items()
        ]
        needs += [Need(name, need, True) for name, need in self.known.required(self.target, package, version)]
        torches = [release.torch for release in self.known.fitting(self.target, package, version) if release.torch]
        needs += [Need("torch", torch, required=True) for torch in torches]
        return [need for need in needs if need.package in self.universe]
