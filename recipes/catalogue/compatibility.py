"""Which versions fit together: a target with other versions, and every release of a package against every target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from packaging.version import Version

from recipes.catalogue import limits
from recipes.catalogue.limits import Reason, Verdict
from recipes.catalogue.load import Catalogue
from recipes.catalogue.schema import Target


def consider(catalogue: Catalogue, target: Target, replaced: Mapping[str, str]) -> Verdict:
    """Whether a target could contain other versions, by the learned limits and the ranges of the releases.

    Locked dependencies do not count against it, since a lock is resolved again within the limits.
    """
    held = limits.facts(target, None, replaced)
    declared = catalogue.targets[target.name]
    asked = [*replaced, *(key for key in ("sm", "python") if getattr(target, key) != getattr(declared, key))]
    verdict = limits.judge(catalogue.limits, held, asked)
    obstacles, fitting = [], []
    for package, version in {**target.packages, **replaced}.items():
        known = catalogue.packages[package].release if package in catalogue.packages else []
        releases = [release for release in known if Version(release.version) == Version(version)]
        met = [release.obstacle(target, held.get("torch", [None])[0]) for release in releases]
        recipe = f"recipes/packages/{package}.toml"
        if not releases:
            continue
        if all(met):
            obstacles += [Reason(recipe, f"{package} {version} {obstacle}") for obstacle in met[:1]]
        elif package in replaced:
            fitting.append(Reason(recipe, f"{package} {version} fits this target by its ranges"))
    if obstacles:
        return Verdict("refused", (*(verdict.reasons if verdict.word == "refused" else ()), *obstacles))
    if fitting and verdict.word == "unknown":
        return Verdict("allowed", tuple(fitting))
    return verdict


@dataclass(frozen=True)
class Grid:
    """Every release of every package against every target; `holds` lists the releases that a target contains."""

    targets: tuple[str, ...]
    rows: dict[tuple[str, str], dict[str, Verdict]]
    holds: frozenset[tuple[str, str, str]]


def grid(catalogue: Catalogue) -> Grid:
    """The whole compatibility matrix, by package and version, then target."""
    rows: dict[tuple[str, str], dict[str, Verdict]] = {}
    for package in catalogue.packages.values():
        for version in dict.fromkeys(release.version for release in package.release):
            rows[package.name, version] = {
                name: consider(catalogue, target, {package.name: version}) for name, target in catalogue.targets.items()
            }
    holds = {(name, *pinned) for name, target in catalogue.targets.items() for pinned in target.packages.items()}
    return Grid(tuple(catalogue.targets), rows, frozenset(holds))
