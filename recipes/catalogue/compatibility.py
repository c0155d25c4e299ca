"""Which versions fit together: a target with other versions, and every release of a package against every target.

A combination is refused if a learned limit, a release's range, its requirements or its wheel's tags are against it. It
is allowed only if every package of the target also confirms the change: by a range with two ends, by what was tried,
or by what a target has together already. A range with one end counts up to the versions that existed when it was
written, and so up to the versions that a target combines. Any other combination is unknown, and the answer lists what
is not known.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import combinations
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from recipes.catalogue import limits
from recipes.catalogue.limits import FACTS, Reason, Verdict, built_for, needs_of, within
from recipes.catalogue.load import Catalogue, what_if
from recipes.catalogue.lock import Lock
from recipes.catalogue.schema import Limit, Release, Target, Tried, is_version

# Newer versions keep what older ones have, so a lower bound is enough.
_LASTING = ("python", "glibc", "driver", "gcc")
_COMPILED_AGAINST = ("torch", "cuda", "cudnn", "sm")


class Statement(NamedTuple):
    """What `source` says of a package beside a thing: the range that it needs, or that was tried."""

    need: str
    source: str
    tried: bool = False


def consider(
    catalogue: Catalogue, target: Target, replaced: Mapping[str, str], published: Collection[str] = ()
) -> Verdict:
    """Whether a target could contain other versions. `published` are packages whose version upstream was seen to have.

    Locked dependencies do not count against it, since a lock is resolved again within the limits.
    """
    return knowledge(catalogue).verdict(target, replaced, published)


@lru_cache(maxsize=4)
def knowledge(catalogue: Catalogue) -> Knowledge:
    """What a catalogue knows of versions, made once."""
    return Knowledge(catalogue)


class Knowledge:
    """What the limits, the recipes and the targets of a catalogue say of versions beside each other."""

    def __init__(self, catalogue: Catalogue) -> None:
        self.catalogue = catalogue
        self._rows_of: dict[tuple[str, str], list[Limit]] = {}
        self.rows: dict[str, list[Limit]] = defaultdict(list)
        for row in catalogue.limits:
            self.rows[row.package].append(row)
        self.tried: dict[str, list[Tried]] = defaultdict(list)
        for tried in catalogue.learned.tried:
            self.tried[tried.package].append(tried)
        self.together: dict[tuple[str, str], dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
        self.locked: dict[str, set[str]] = defaultdict(set)
        self._locked_of: dict[str, set[str]] = {}
        for name, target in catalogue.targets.items():
            path = catalogue.root / "recipes" / "lock" / f"{name}.txt"
            lock = Lock.read(path, target) if path.exists() else None
            for artifact in lock.artifacts if lock else ():
                self.locked[artifact.name].add(artifact.version)
            locked = {artifact.name: [artifact.version] for artifact in lock.artifacts} if lock else {}
            self._locked_of[name] = set(locked)
            held = locked | self.held(target, {})
            for package in [*target.packages, *locked, "cuda", "sm"]:
                for version in held.get(package, []):
                    for thing, versions in held.items():
                        self.together[package, version][thing] |= set(versions)

    # --- the verdict

    def verdict(self, target: Target, replaced: Mapping[str, str], published: Collection[str] = ()) -> Verdict:
        """The answer for a target with other versions; the declared target of that name does not count."""
        declared = self.catalogue.targets[target.name]
        others = {name: version for name, version in replaced.items() if name not in FACTS}
        target = self.changed(target, replaced)
        target, left_out = self._with_kernels(target, others)
        held = self.held(target, others)
        asked = [*replaced, *(key for key in ("sm", "python") if getattr(target, key) != getattr(declared, key))]
        ruled = limits.judge(self.catalogue.limits, held, asked)
        broken = list(ruled.reasons) if ruled.word == "refused" else []
        broken += self.obstacles(target, held, asked)
        if broken:
            return Verdict("refused", tuple(dict.fromkeys(broken)))
        unknown, spoken = [*self._strangers(others, published), *self.unlisted(target)], []
        unknown += self._of_another_base(declared, others)
        unknown += self._beside_each_other(target, others)
        without = [thing for thing in asked if thing not in held]  # facts about a GPU, in a target without CUDA
        unknown += [
            Reason("choose a target with CUDA", f"{thing} says nothing of a target without CUDA") for thing in without
        ]
        unknown += self._of_another_cuda(target, others)
        unknown += [*self._older_libraries(declared, target, held), *self._newer_libraries(declared, target, held)]
        needs = self._needs(target, held)
        for thing in dict.fromkeys(name for name in asked if name in held):
            for package, version, about in self._pairs(target, held, thing):
                reason = self.speaks(target, package, version, about, held[about])
                if reason:
                    spoken.append(reason)
                else:
                    unknown.append(self._silence(package, version, about, held[about]))
            unknown += self._missing(target, held, thing)
            unknown += self._absent(target, held, thing)
            unknown += self._through_others(target, held, thing, needs)
        if unknown:
            return Verdict("unknown", tuple(dict.fromkeys((*unknown, *left_out))))
        cited = ruled.reasons if ruled.word == "allowed" else ()
        return Verdict("allowed", tuple(dict.fromkeys((*left_out, *cited, *spoken))))

    def changed(self, target: Target, replaced: Mapping[str, str]) -> Target:
        """The target with other facts, such as python; a toolkit of another CUDA is not the target's any more."""
        given = {name: limits.short(name, version) for name, version in replaced.items() if name in FACTS}
        if not given:
            return target
        changes = {name: [version] if name == "sm" else version for name, version in given.items()}
        return what_if(target, {**changes, **({"toolkit": None} if "cuda" in given else {})})

    def _with_kernels(self, target: Target, others: Mapping[str, str]) -> tuple[Target, list[Reason]]:
        """The target without packages that have kernels for none of its GPU architectures, as a plan leaves them out.

        A package stays if the question names it, or if another one that stays is built beside it.
        """
        packages, reasons = dict(target.packages), []
        beside = {need for name in packages if (build := self.catalogue.packages[name].build) for need in build.needs}
        for name, version in target.packages.items():
            releases = self.releases(name, version)
            kernels = [release for release in releases if not release.sm or set(release.sm) & set(target.sm)]
            if releases and not kernels and name not in {*others, *beside}:
                del packages[name]
                here = f"without {name} {version}, which {releases[0].reach}"
                reasons.append(Reason(f"a build for sm {', '.join(target.sm)} leaves it out", here))
        options = {name: text for name, text in target.options.items() if name in packages}
        changes = {"packages": packages, "options": options}
        return (target.model_copy(update=changes) if reasons else target), reasons

    def held(self, target: Target, others: Mapping[str, str]) -> dict[str, list[str]]:
        """What the target contains with other versions; without CUDA, no facts about a GPU."""
        held = limits.facts(target, None, others, self.catalogue.learned.base)
        pinned = self._pinned_by_requirements(target, held)
        own = next((version for name, version in pinned.items() if name.startswith("nvidia-cudnn-cu")), None)
        held = pinned | ({"cudnn": own} if own else {}) | held  # torch's own cuDNN, where the base has none
        if target.cuda == "none":
            held = {name: versions for name, versions in held.items() if name not in ("cudnn", "driver", "sm")}
        return held

    def _pinned_by_requirements(self, target: Target, held: limits.Facts) -> dict[str, list[str]]:
        """The only version of a package that others in the target pin exactly, as torch pins triton."""
        pinned = {}
        for package in [name for name in held if name not in FACTS]:
            version = held[package][0]
            needs = [(name, need) for row in self.rows_of(package, version) for name, need in row.needs.items()]
            for name, need in [*needs, *self.required(target, package, version)]:
                if name not in {*FACTS, *self.catalogue.packages} and (match := re.fullmatch(r"==([^*,]+)", need)):
                    pinned[name] = [match[1]]
        return pinned

    def rows_of(self, package: str, version: str) -> list[Limit]:
        if (package, version) not in self._rows_of:
            self._rows_of[package, version] = [row for row in self.rows[package] if within(version, row.versions)]
        return self._rows_of[package, version]

    def obstacles(self, target: Target, held: limits.Facts, asked: Collection[str]) -> Iterator[Reason]:
        """Why releases cannot be in the target, or which of their requirements conflict with the change."""
        torch = held.get("torch", [None])[0]
        for package in [name for name in held if name not in FACTS]:
            version = held[package][0]
            recipe = f"recipes/packages/{package}.toml"
            build = built_for(version)
            if build and not same_cuda(build, target.cuda):
                what = "ROCm" if build == "rocm" else "no CUDA" if build == "none" else f"CUDA {build}"
                here = f"{package} {version} is built for {what}, and the target has CUDA {target.cuda}"
                yield Reason("the version says so", here)
            for row in [row for row in self.rows_of(package, version) if row.required]:
                for thing in [thing for thing in row.needs if thing in self.catalogue.packages and thing not in held]:
                    if {package, thing} & set(asked):
                        here = f"{package} {version} needs {thing} {row.needs[thing]}, and the target has none"
                        yield Reason(f"{row.reason} ({row.thread})", here)
            releases = self.releases(package, version)
            met = [release.unfit(target, torch) for release in releases]
            if met and all(met):
                # If the target has CUDA, a release without it says nothing useful, and the other way round.
                nearest = min(releases, key=lambda release: (release.cuda == "none") != (target.cuda == "none"))
                yield Reason(recipe, f"{package} {version} {nearest.unfit(target, torch)}")
                continue
            for release in [release for release in releases if release.unfit(target, torch) is None]:
                for requirement in filter(target.applies, self._requirements(package, release)):
                    other = canonicalize_name(requirement.name)
                    theirs, need = held.get(other, []), str(requirement.specifier)
                    concerned = other in (*asked, *target.packages) and bool({package, other} & set(asked))
                    if concerned and not all(within(held_version, need) for held_version in theirs):
                        here = f"{package} {version} needs {other} {need}, and the target has {other} {theirs[0]}"
                        yield Reason(recipe, here)

    # --- which packages a change affects

    def _pairs(self, target: Target, held: limits.Facts, thing: str) -> Iterator[tuple[str, str, str]]:
        """The packages that a change affects: those that depend on the thing, and its own dependencies."""
        without = ("cuda",) if target.cuda == "none" else ()
        for package in [name for name in held if name not in (thing, "cudnn", *without, *_LASTING)]:
            for version in held[package]:
                if self._concerns(target, package, version, thing):
                    yield package, version, thing
        if thing not in ("cudnn", *_LASTING):
            for version in held[thing]:
                for about in [name for name in held if name != thing]:
                    if self._concerns(target, thing, version, about):
                        yield thing, version, about

    def _concerns(self, target: Target, package: str, version: str, thing: str) -> bool:
        """Whether a package depends on a thing; by the limits, in any of its versions."""
        if any(thing in row.needs for row in self.rows[package]):
            return True
        works_without = any(release.cuda == "none" for release in self._every_release(package))
        aside = thing == "cuda" and target.cuda == "none" and works_without
        if not aside and any(thing in tried.beside for tried in self.tried[package]):
            return True
        if package in FACTS or thing == package:
            return False
        recipe = self.catalogue.packages.get(package)
        if thing == "python":
            return True
        if recipe is None:
            return False
        if thing == "torch":
            return True
        if thing in ("cuda", "sm"):
            compiled = recipe.build is not None and recipe.build.compiler == "nvcc"
            compiled |= any(release.build.compiler == "nvcc" for release in recipe.release)
            return target.cuda != "none" and (compiled or any(release.cuda for release in recipe.release))
        return any(
            canonicalize_name(requirement.name) == thing
            for release in self.fitting(target, package, version) or recipe.release
            for requirement in self._requirements(package, release)
        )

    def statements(self, target: Target, package: str, version: str, thing: str) -> Iterator[Statement]:
        """What is said of a version of a package beside a thing."""
        for row in self.rows_of(package, version):
            if thing in row.needs:
                yield Statement(needs_of(row, [version])[thing], f"{row.reason} ({row.thread})")
        for tried in self.tried[package]:
            if thing in tried.beside and within(version, tried.versions):
                yield Statement(tried.beside[thing], f"so it was built or run ({tried.thread})", tried=True)
        for release in self.fitting(target, package, version):
            recipe = f"recipes/packages/{package}.toml"
            ranges = {"python": release.python, "torch": release.torch, "cuda": release.cuda}
            if ranges.get(thing, "") not in ("", "none"):
                yield Statement(ranges[thing], recipe)
            for requirement in self._requirements(package, release):
                if canonicalize_name(requirement.name) == thing and target.applies(requirement):
                    yield Statement(str(requirement.specifier), recipe)

    def speaks(
        self, target: Target, package: str, version: str, thing: str, versions: Collection[str]
    ) -> Reason | None:
        """Who says that a package version fits these versions of a thing, or None. This finds no refusals."""
        spoken = [self._speaks(target, package, version, thing, beside) for beside in versions]
        return spoken[0] if spoken and all(spoken) else None

    def _speaks(self, target: Target, package: str, version: str, thing: str, beside: str) -> Reason | None:
        about = f"{package} {version} beside {thing} {beside}"
        if thing == "cuda" and same_cuda(built_for(version) or "", beside):
            return Reason("the version says so", f"{package} {version} fits cuda {beside}")
        if thing == "cuda" and beside == "none":
            free = any(release.cuda in ("", "none") for release in self.releases(package, version))
            return Reason(f"recipes/packages/{package}.toml", f"{package} {version} needs no CUDA") if free else None
        admitting = [
            statement
            for statement in self.statements(target, package, version, thing)
            if within(beside, statement.need)
        ]
        for statement in admitting:
            low, high = _ends(statement.need)
            if statement.tried or (low and high) or (low and thing in _LASTING):
                return Reason(
                    statement.source,
                    f"{package} {version} needs {thing} {statement.need}, and the target has {thing} {beside}",
                )
        seen = [Version(text) for text in self._seen(package, version)[thing] if is_version(text)]
        if not seen or not is_version(beside):
            return None
        # Metadata names the oldest and newest torch or CUDA that its author knew, not the first version that fails.
        mine, ends = (
            _public(beside),
            [] if thing in _COMPILED_AGAINST else [_ends(statement.need) for statement in admitting],
        )
        if thing not in (*FACTS, "torch") and any(statement.need == "" for statement in admitting):
            ends.append((True, False))  # a requirement without a range covers every version published until then
        lowest, highest = min(map(_public, seen)), max(map(_public, seen))
        from_below = mine >= lowest or any(low for low, _ in ends)
        from_above = mine <= highest or any(high for _, high in ends)
        if from_below and from_above:
            return Reason("recipes/targets.toml", f"{about}: targets have it beside {_span(lowest, highest)}")
        return None

    def _seen(self, package: str, version: str) -> Mapping[str, set[str]]:
        """The versions that targets combine with a version of a package."""
        return self.together.get((package, version)) or defaultdict(set)

    # --- what is not known

    def _of_another_base(self, declared: Target, others: Mapping[str, str]) -> Iterator[Reason]:
        """A torch in place of one that the base image provides."""
        pinned = self.fitting(declared, "torch", declared.packages.get("torch", "0"))
        provided = "provided" in [release.kind for release in pinned]
        if provided and "torch" in others and others["torch"] not in declared.packages.values():
            here = f"nothing says whether torch {others['torch']} can take the place of the base image's own"
            yield Reason("what the base has beside it was compiled for that", here)

    def _strangers(self, others: Mapping[str, str], published: Collection[str]) -> Iterator[Reason]:
        """Versions that no data list as existing."""
        for package, version in others.items():
            if package not in published and not self.exists(package, version):
                is_listed = package in self.catalogue.learned.releases
                what = "this version exists" if is_listed else "there is such a release"
                yield Reason(
                    "add it to a recipe, or to [releases] of recipes/limits.toml",
                    f"{package} {version}: nothing says that {what}",
                )

    def _beside_each_other(self, target: Target, others: Mapping[str, str]) -> Iterator[Reason]:
        """Packages asked about together, where no data say what one needs of the other: no recipe lists their needs."""
        unlisted = [item for item in others.items() if item[0] not in self.catalogue.packages]
        for (first, version), (second, beside) in combinations(unlisted, 2):
            concerned = self._concerns(target, first, version, second) or self._concerns(target, second, beside, first)
            together = beside in self._seen(first, version)[second]
            if not (concerned or together or {first, second} <= set(self.catalogue.learned.independent)):
                here = f"nothing says whether {first} {version} and {second} {beside} fit together"
                yield Reason("ask about one of them at a time, or add a row to recipes/limits.toml", here)

    def _of_another_cuda(self, target: Target, others: Mapping[str, str]) -> Iterator[Reason]:
        """CUDA's libraries for another CUDA: several have the file names of the target's own."""
        for package, version in others.items():
            match = re.fullmatch(r"nvidia-(?!cutlass-).*-cu(\d+)", package)
            if match and not same_cuda(match[1], target.cuda):
                here = f"nothing says whether {package} {version} can be beside CUDA {target.cuda}"
                yield Reason(f"it is a library of CUDA {match[1]}", here)

    def unlisted(self, target: Target) -> Iterator[Reason]:
        """The GPU architectures, compilers, C libraries and driver branches that no data list as existing."""
        branch = [target.driver.split(".")[0]] if target.driver else []
        asked = {
            "sm": target.sm,
            "gcc": [target.gcc] if target.gcc else [],
            "glibc": [target.glibc],
            "driver": branch,
        }
        called = {"sm": "GPU architecture", "gcc": "GCC", "glibc": "C library", "driver": "driver of branch"}
        for fact, versions in asked.items():
            known = self.catalogue.learned.releases.get(fact, versions)
            for version in [version for version in versions if version not in known]:
                here = f"nothing says that there is a {called[fact]} {version}"
                yield Reason(f"it is none of {', '.join(known)}", here)

    def _older_libraries(self, declared: Target, target: Target, held: limits.Facts) -> Iterator[Reason]:
        """What is compiled on the base needs the C library of the base."""
        if Version(target.glibc) < Version(declared.glibc):
            for name in self._compiled(held, "c++", "nvcc"):
                here = f"nothing says whether {name}, compiled on the base, runs with glibc {target.glibc}"
                yield Reason(f"its C library is {declared.glibc}", here)

    def _newer_libraries(self, declared: Target, target: Target, held: limits.Facts) -> Iterator[Reason]:
        """Headers of nvcc and of the C library can declare the same functions, and differently."""
        spoken = any("glibc" in row.needs for row in self.rows_of("cuda", target.cuda))
        if Version(target.glibc) > Version(declared.glibc) and not spoken:
            for name in self._compiled(held, "nvcc"):
                here = f"nothing says whether nvcc {target.cuda} compiles {name} with glibc {target.glibc}"
                yield Reason(f"the C library of its base is {declared.glibc}", here)

    def _compiled(self, held: limits.Facts, *compilers: str) -> list[str]:
        """The packages of a target that one of these compilers makes."""
        recipes = [self.catalogue.packages[name] for name in held if name in self.catalogue.packages]
        return [recipe.name for recipe in recipes if recipe.build and recipe.build.compiler in compilers]

    def versions(self, package: str) -> list[str]:
        """The versions that recipes and the list of releases have of a package, from the oldest."""
        listed = {*self.catalogue.learned.releases.get(package, [])}
        own = {release.version for release in self._every_release(package)}
        return sorted(own | {text for text in listed if Version(text) not in map(Version, own)}, key=Version)

    def exists(self, package: str, version: str) -> bool:
        """Whether a recipe, a lock or the list of releases has this version, and upstream the build that it names."""
        listed = self.catalogue.learned.releases.get(package, [])
        known = {Version(text) for text in {*listed, *self.locked[package]} if is_version(text)}
        own = {Version(release.version) for release in self._every_release(package)}
        public = {*map(_public, known), *(_public(release) for release in own if release.local is None)}
        return Version(version) in own | known or (_public(version) in public and self._is_built(package, version))

    def _is_built(self, package: str, version: str) -> bool:
        """Whether the version names no build of its own, or one that upstream publishes."""
        label = Version(version).local
        rows = [row for row in self.catalogue.learned.built if row.package == package and within(version, row.versions)]
        return label is None or any(label in row.labels for row in rows)

    def _silence(self, package: str, version: str, thing: str, versions: Collection[str]) -> Reason:
        what = f"{package} {version} fits {thing} {', '.join(versions)}"
        return Reason("try it, and add what you learn to recipes/limits.toml", f"nothing says whether {what}")

    def _missing(self, target: Target, held: limits.Facts, thing: str) -> Iterator[Reason]:
        """What limits require of the base, where neither the target nor its base declares that fact."""
        for row in self.rows[thing]:
            if held.get(thing) and all(within(version, row.versions) for version in held[thing]):
                for fact in [fact for fact in row.needs if fact in FACTS and fact not in held]:
                    if target.cuda != "none":
                        needs = f"{thing} {', '.join(held[thing])} needs {fact} {row.needs[fact]}"
                        here = f"{needs}, and nothing says which {fact} the target has"
                        yield Reason(f"give {fact} in recipes/targets.toml", here)

    def _absent(self, target: Target, held: limits.Facts, package: str) -> Iterator[Reason]:
        """The required packages that have a recipe but are missing from the target.

        The rows of a package without a recipe are its metadata, so what they need is required too.
        """
        for version in held.get(package, []):
            needs = self.required(target, package, version)
            if package not in self.catalogue.packages:
                needs += self._ruled(package, version)
            for name, need in needs:
                missing = name in self.catalogue.packages and name not in held
                if missing and name not in self._locked_of[target.name]:
                    here = f"{package} {version} needs {name} {need}, which the target does not have"
                    yield Reason(f"ask with it too: --with {name}==VERSION", here)

    def required(self, target: Target, package: str, version: str) -> list[tuple[str, str]]:
        """What the releases of a version that fit the target require, by its recipe."""
        return [
            (str(canonicalize_name(requirement.name)), str(requirement.specifier))
            for release in self.fitting(target, package, version)
            for requirement in filter(target.applies, map(_parsed, release.needs))
        ]

    def _ruled(self, package: str, version: str) -> list[tuple[str, str]]:
        """What the rows of a version need of other distributions."""
        if package in FACTS:
            return []
        needs = [item for row in self.rows_of(package, version) for item in row.needs.items()]
        return [(name, need) for name, need in needs if name not in FACTS and need != "none"]

    def _needs(self, target: Target, held: limits.Facts) -> list[tuple[str, str, str, str]]:
        """Each package and version, a package that it requires and the target does not name, and the range."""
        return [
            (name, version, between, need)
            for name in held
            if name not in FACTS
            for version in held[name]
            for between, need in (*self.required(target, name, version), *self._ruled(name, version))
            if between not in held and between not in self.catalogue.packages
        ]

    def _through_others(
        self, target: Target, held: limits.Facts, thing: str, needs: list[tuple[str, str, str, str]]
    ) -> Iterator[Reason]:
        """What packages require that the target does not name, where no known version of that fits them all.

        A package of the target requires it, and the thing is beside it; or the thing requires it too.
        """
        for name, version, between, need in needs:
            if any(thing in row.needs for row in self.rows[between]):
                known = self._listed(target, between, need)
                fits = any(self._admits(target, between, text, thing, held[thing]) for text in known)
            elif name == thing:
                ranges = [text for _, _, wanted, text in needs if wanted == between]
                fits = any(all(within(text, each) for each in ranges) for text in self._listed(target, between, need))
            else:
                continue
            if not fits and self._listed(target, between, ""):
                here = f"nothing says which {between} fits {thing} {', '.join(held[thing])} and what is beside it"
                yield Reason(f"{name} {version} needs {between} {need}", here)

    def _listed(self, target: Target, package: str, need: str) -> list[str]:
        """The versions in a range that exist by the data, without those that a row bars from the target's Python."""
        return [
            text
            for text in {*self.versions(package), *self.locked[package]}
            if within(text, need)
            and all(within(target.python, row.needs.get("python", "")) for row in self.rows_of(package, text))
        ]

    def _admits(self, target: Target, package: str, version: str, thing: str, versions: Collection[str]) -> bool:
        """Whether a version of a package is said to fit these versions of a thing, and by no row to be unfit."""
        needs = [statement.need for statement in self.statements(target, package, version, thing)]
        if needs:
            return all(within(text, need) for text in versions for need in needs)
        return set(versions) <= self._seen(package, version)[thing]

    # --- releases

    def _every_release(self, package: str) -> list[Release]:
        recipe = self.catalogue.packages.get(package)
        return recipe.release if recipe else []

    def releases(self, package: str, version: str) -> list[Release]:
        """The releases of a version in the package's recipe."""
        return [release for release in self._every_release(package) if Version(release.version) == Version(version)]

    def fitting(self, target: Target, package: str, version: str) -> list[Release]:
        """The releases that fit the target's Python, CUDA and C library."""
        return [release for release in self.releases(package, version) if release.unfit(target, None) is None]

    def _requirements(self, package: str, release: Release) -> Iterator[Requirement]:
        """What a release needs to run, and what its build imports."""
        yield from map(_parsed, release.needs)
        recipe = self.catalogue.packages[package]
        if release.kind == "source" and recipe.build:
            yield from map(_parsed, recipe.build.requires)


def same_cuda(build: str, cuda: str) -> bool:
    """Whether a package built for a CUDA runs in a target of that CUDA: its major version is the same."""
    return build.partition(".")[0] == cuda.partition(".")[0] if build else False


@cache
def _parsed(requirement: str) -> Requirement:
    return Requirement(requirement)


@cache
def _ends(need: str) -> tuple[bool, bool]:
    """Whether a range has a lower and an upper end."""
    operators = {clause.operator for clause in SpecifierSet(need)} if need != "none" else set()
    exact = bool(operators & {"==", "===", "~="})
    return exact or bool(operators & {">", ">="}), exact or bool(operators & {"<", "<="})


@cache
def _public(version: Version | str) -> Version:
    """The version without its local part."""
    return Version(Version(str(version)).public)


def _span(lowest: Version, highest: Version) -> str:
    return str(lowest) if lowest == highest else f"{lowest} to {highest}"


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
