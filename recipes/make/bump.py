"""Raise a pin: find the release upstream, write it and the pin, lock again, and say what becomes of the patches."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from email.message import Message
from pathlib import Path

from packaging.version import Version

from recipes.catalogue import limits, patch
from recipes.catalogue.compatibility import consider
from recipes.catalogue.load import Catalogue
from recipes.catalogue.patch import Patch
from recipes.catalogue.plan import Plan
from recipes.catalogue.schema import Package, Pin, Release, Source, Target
from recipes.errors import Refusal
from recipes.files import write_text
from recipes.make import metadata, resolve
from recipes.make.build import Builder
from recipes.make.cache import Cache
from recipes.make.patch import apply
from recipes.progress import Steps


@dataclass(frozen=True)
class Bump:
    """One pin to raise in one target."""

    root: Path
    target: str
    package: str
    version: str

    @property
    def _targets_file(self) -> Path:
        return self.root / "recipes" / "targets.toml"

    @property
    def _recipe(self) -> Path:
        return self.root / "recipes" / "packages" / f"{self.package}.toml"

    def run(self, cache: Cache, steps: Steps, mirror: Path | None) -> list[str]:
        """Write recipe, pin and lock, or nothing; returns what is left to do, a line each."""
        catalogue = Catalogue(self.root)
        target = catalogue.target(self.target)
        if self.package not in target.packages:
            raise Refusal(f"Target {target.name} has no {self.package}: choose one of {', '.join(target.packages)}.")
        limits.refuse(consider(catalogue, target, {self.package: self.version}))
        before = target.packages[self.package]
        if before == self.version:
            raise Refusal(f"Target {target.name} already has {self.package} {before}: choose another version.")
        locked = self.root / "recipes" / "lock" / f"{self.target}.txt"
        with _restored(self._targets_file, self._recipe, locked):
            todo = self._declare(catalogue, target, cache, steps, mirror)
            self._pin(before)
            chosen = self._plan()
            resolve.write(chosen, cache, steps)
            steps.say("bump", f"{target.name}: {self.package} {before} -> {self.version}", str(self._recipe))
            self._drop_unused(steps)
            todo += self._standings(chosen, cache, steps, mirror)
        return todo

    def _plan(self) -> Plan:
        """The target with its new pin; patches are not asked yet whether they know it."""
        catalogue = Catalogue(self.root)
        target = catalogue.target(self.target)
        return Plan(root=self.root, target=target, pins=catalogue.pins(target), patches={}, lock=None)

    def _pin(self, before: str) -> None:
        """Change the version in the target's table of targets.toml."""
        text = self._targets_file.read_text(encoding="utf-8")
        table = re.search(rf'^\["?{re.escape(self.target)}"?\.packages\]\n(?:(?!\[).*\n?)*', text, re.MULTILINE)
        line = f'{self.package} = "{before}"'
        if not table or line not in table[0]:
            raise Refusal(f"{self._targets_file} [{self.target}.packages] has no line {line}: change the pin by hand.")
        changed = table[0].replace(line, f'{self.package} = "{self.version}"')
        write_text(self._targets_file, text[: table.start()] + changed + text[table.end() :])

    # --- the release

    def _declare(
        self, catalogue: Catalogue, target: Target, cache: Cache, steps: Steps, mirror: Path | None
    ) -> list[str]:
        """Have a [[release]] of that version in the recipe."""
        package = catalogue.packages[self.package]
        if any(Version(release.version) == Version(self.version) for release in package.release):
            return []
        pin = next(pin for pin in catalogue.pins(target) if pin.name == self.package)
        chosen = Plan(root=self.root, target=target, pins=[], patches={}, lock=None)
        builder = Builder(chosen, cache, steps, mirror)
        identity, described = (
            self._published(pin, builder) if pin.release.file else (self._tagged(pin.release, builder), None)
        )
        requires, todo = _requires(pin.release, described)
        text = self._recipe.read_text(encoding="utf-8")
        head, first, rest = text.partition("[[release]]\n")
        if not first:
            raise Refusal(f"{self._recipe} has no line [[release]]: write its releases as tables that begin with it.")
        write_text(self._recipe, f"{head}{first}{self._release(pin.release, identity, requires)}\n{first}{rest}")
        return [f"{self._recipe}: {line}" for line in todo]

    def _published(self, pin: Pin, builder: Builder) -> tuple[str, Message]:
        """The file of an index: its name and sha256, and what it says of itself."""
        assert pin.release.file
        like = pin.release.file.replace(pin.release.metadata_version, self.version)
        path = builder.downloads.published(self.package, self.version, like)
        return f'file = "{path.name}"\nsha256 = "{path.parent.name}"\n', metadata.metadata(path)

    def _tagged(self, current: Release, builder: Builder) -> str:
        """The commit of the tag that is named like the current one, with its submodules."""
        if not current.tag or current.version not in current.tag or not current.repository:
            raise Refusal(
                f"{self.package} {current.version} has no tag from which the tag of {self.version} follows: "
                f"add the [[release]] to {self._recipe} by hand."
            )
        tag = current.tag.replace(current.version, self.version)
        label = f"{self.package} {self.version}"
        commit = builder.git.commit_of(label, current.repository, tag)
        lines = [f'repository = "{current.repository}"', f'commit = "{commit}"', f'tag = "{tag}"']
        source = Source(
            version=self.version, repository=current.repository, commit=commit, tag=tag, without=current.without
        )
        left_out = {submodule.path: submodule.without for submodule in current.submodules}
        submodules = builder.git.submodules(label, source)
        if submodules:
            entries = []
            for submodule in submodules:
                parts = (
                    f'path = "{submodule.path}", repository = "{submodule.repository}", commit = "{submodule.commit}"'
                )
                if without := left_out.get(submodule.path):
                    parts += f", without = {json.dumps(without)}"
                entries.append(f"  {{ {parts} }},")
            lines += ["submodules = [", *entries, "]"]
        if current.without:
            lines.append(f"without = {json.dumps(current.without)}")
        return "\n".join(lines) + "\n"

    def _release(self, current: Release, identity: str, requires: list[str]) -> str:
        """The new table: identity and requirements are the new version's, the rest is the current release's."""
        identifying = {*Source.model_fields, "kind", "requires", "mib"}
        settings = current.model_dump(exclude_defaults=True, exclude=identifying)
        lines = [f'version = "{self.version}"', f'kind = "{current.kind}"', identity.rstrip()]
        for key, value in settings.items():
            lines.append(f"{key} = {inline(value)}")
        listed = "".join(f"  {json.dumps(requirement)},\n" for requirement in requires)
        lines.append(f"requires = [\n{listed}]" if requires else "requires = []")
        lines.append(f"mib = {inline(current.mib.model_dump())}")
        return "\n".join(lines) + "\n"

    def _drop_unused(self, steps: Steps) -> None:
        """Remove the releases of the package that no target pins any more."""
        catalogue = Catalogue(self.root)
        package = catalogue.packages[self.package]
        used = {id(pin.release) for target in catalogue.targets.values() for pin in _pins(catalogue, target, package)}
        head, *blocks = self._recipe.read_text(encoding="utf-8").split("[[release]]\n")
        remaining = [block for block, release in zip(blocks, package.release, strict=True) if id(release) in used]
        for release in package.release:
            if id(release) not in used:
                steps.say("bump", f"{package.name} {release.version}", "no target has it now: removed from the recipe")
        write_text(self._recipe, "[[release]]\n".join([head, *remaining]).rstrip("\n") + "\n")

    # --- the patches

    def _standings(self, chosen: Plan, cache: Cache, steps: Steps, mirror: Path | None) -> list[str]:
        """What becomes of each patch that the target had, or that is for the new version."""
        pin = next(pin for pin in chosen.pins if pin.name == self.package)
        patches = [each for each in patch.of_package(self.root, self.package) if chosen.target.applies(each.applies_to)]
        if not patches:
            return []
        builder = Builder(chosen, cache, steps, mirror)
        with cache.scratch("bump") as scratch:
            touched = [file for each in patches for file in each.files]
            tree = builder.pristine(pin, touched, scratch / "pristine")
            return [f"{each.name}: {_standing(each, self.version, tree, scratch)}" for each in patches]


def _pins(catalogue: Catalogue, target: Target, package: Package) -> list[Pin]:
    if package.name not in target.packages:
        return []
    return [pin for pin in catalogue.pins(target) if pin.name == package.name]


@contextlib.contextmanager
def _restored(*paths: Path) -> Iterator[None]:
    """Put the files back as they were if anything goes wrong."""
    before = {path: path.read_text(encoding="utf-8") if path.exists() else None for path in paths}
    try:
        yield
    except BaseException:
        for path, text in before.items():
            if text is None:
                path.unlink(missing_ok=True)
            else:
                write_text(path, text)
        raise


def _standing(candidate: Patch, version: str, tree: Path, scratch: Path) -> str:
    """Whether a patch stays, retires or has to be renewed, tried on the files that it touches."""
    if since := candidate.in_upstream(version):
        return f"retires: upstream since {since}; delete it with its proof once no target needs it"
    if missing := next((file for file in candidate.files if not (tree / file).is_file()), None):
        return f"renew it: {missing} is gone in {version}"
    copy = scratch / candidate.path.stem / tree.name
    for file in candidate.files:
        (copy / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(tree / file, copy / file)
    try:
        known = candidate.at(version)
    except Refusal:
        known = candidate
    try:
        apply(known, copy)
    except Refusal as refusal:
        if "already in" in str(refusal):
            return "retires: its change is in this version; delete it with its proof once no target needs it"
        return f"renew it: {str(refusal).removeprefix(f'{candidate.name} ')}"
    if known is candidate and candidate.lines:
        return f"fits: add {version} to X-Lines and run its proof again"
    return "stays" if candidate.covers(version) else f"fits: widen X-Applies-To to {version} and run its proof again"


def _requires(current: Release, described: Message | None) -> tuple[list[str], list[str]]:
    """The new release's requirements, and what is left to do about them."""
    listed = metadata.requires(described) if described is not None else None
    if listed is None:
        return list(current.requires), ["requires was taken over; the build compares it with the wheel's metadata"]
    return listed, []


def inline(value: object) -> str:
    """A value as TOML writes it on one line."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {inline(inner)}" for key, inner in value.items() if inner is not None) + " }"
    return json.dumps(value)
