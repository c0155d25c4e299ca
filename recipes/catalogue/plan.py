"""The plan: what a target consists of, in build order, and whether it can be built at all."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any

from recipes.catalogue import limits, patch
from recipes.catalogue.load import Catalogue, build_environment, what_if
from recipes.catalogue.lock import Lock
from recipes.catalogue.patch import Patch
from recipes.catalogue.schema import Pin, Target
from recipes.errors import Refusal
from recipes.files import digest_of

NVCC = "nvidia-cuda-nvcc"  # the distribution that holds bin/nvcc
# A release's size, and what decides how long its build takes but no byte of it: these are not part of its identity.
ESTIMATES: dict[str, Any] = {
    "mib": True,
    "build": {"core_seconds": True, "longest_seconds": True, "mib_per_job": True},
    "parallel_extensions": True,
}


@dataclass(frozen=True)
class Plan:
    """A target with everything it pins.

    `lock` is None where a what-if has none; `toolkit_lock` is of a target that pins its CUDA toolkit. `narrowed` has
    the GPU architectures if they are others than the declared ones, and `left_out` the pins that have kernels for none
    of these; the lock covers those as well.
    """

    root: Path
    target: Target
    pins: list[Pin]
    patches: dict[str, list[Patch]]
    lock: Lock | None
    toolkit_lock: Lock | None = None
    narrowed: tuple[str, ...] = ()
    left_out: tuple[Pin, ...] = ()

    @property
    def declared(self) -> list[Pin]:
        """The pins of the target, also those that are left out."""
        return [*self.pins, *self.left_out]

    @property
    def packages(self) -> str:
        """Its packages with their versions, as an image's label lists them."""
        return ", ".join(pin.label for pin in self.pins)

    @property
    def torch(self) -> Pin | None:
        return next((pin for pin in self.pins if pin.name == "torch"), None)

    @property
    def provided(self) -> list[Pin]:
        """The packages that come with the base image."""
        return [pin for pin in self.pins if pin.release.kind == "provided"]

    @property
    def on_base(self) -> bool:
        """Whether the base image provides packages, so that the target is a layer on its Python."""
        return bool(self.provided)

    @property
    def locked(self) -> Lock:
        """The lock, which everything but a what-if needs."""
        if self.lock is None:
            raise Refusal(f"Target {self.target.name} has no lock: write it with `nox -s lock -- {self.target.name}`.")
        return self.lock

    @cached_property
    def toolkit(self) -> Lock | None:
        """The locked wheels of the target's CUDA toolkit, or None where it pins none; refused if of another toolkit."""
        target, toolkit = self.target, self.toolkit_lock
        if target.toolkit is None:
            return None
        again = f"write it with `nox -s lock -- {target.name}`"
        if toolkit is None:
            path = self.locked.path.with_suffix(".toolkit.txt")
            raise Refusal(f"{path} does not exist, and target {target.name} pins its CUDA toolkit: {again}.")
        for lock, name, wanted in ((self.locked, "cuda-toolkit", target.toolkit), (toolkit, NVCC, target.cuda)):
            has = next((artifact.version for artifact in lock.artifacts if artifact.name == name), "none")
            if not f"{has}.".startswith(f"{wanted}."):
                raise Refusal(
                    f"{lock.path} has {name} {has}, and target {target.name} pins the CUDA toolkit {target.toolkit}: "
                    f"{again}."
                )
        return toolkit

    @cached_property
    def stack(self) -> str:
        """The stack key: the sha256 of every pinned input, comments aside, computable from a checkout."""
        return digest_of(
            {
                "python": self.target.python,
                "cuda": self.target.cuda,
                "sm": self.target.sm,
                "base": self.target.base.model_dump(),
                **({"variables": self.target.variables} if self.target.variables else {}),
                "packages": [
                    {
                        "release": pin.release.model_dump(exclude=ESTIMATES, exclude_defaults=True),
                        "options": pin.build.options if pin.release.kind == "source" else [],
                        "build": build_environment(pin, self.target) if pin.release.kind == "source" else None,
                        "patches": [chosen.sha256 for chosen in self.patches[pin.name]],
                    }
                    for pin in self.pins
                ],
                "lock": self.locked.pins,
                **({"toolkit": self.toolkit.pins} if self.toolkit else {}),
            }
        )

    @cached_property
    def stacks(self) -> frozenset[str]:
        """The stack keys that a run of it can have: `--sm` may leave GPU architectures out."""
        declared, keys = self.target.sm, {self.stack}
        for count in range(1, len(declared)):
            for some in combinations(declared, count):
                with suppress(Refusal):  # a package that is built beside one without kernels for these
                    keys.add(for_architectures(self, list(some)).stack)
        return frozenset(keys)


def changed(declared: Target, sm: list[str] | None, python: str | None) -> Target:
    """The target with other GPU architectures or another Python, whose patch release decides nothing here."""
    if sm and declared.cuda == "none":
        raise Refusal(
            f"Target {declared.name} compiles no GPU code, so --sm has nothing to change: choose a target with CUDA."
        )
    for architecture in sm or []:
        limits.written("sm", architecture)
    if python:
        python = limits.short("python", limits.written("python", python))
    changes = {key: value for key, value in (("sm", sm), ("python", python)) if value}
    return what_if(declared, changes) if changes else declared


def plan(catalogue: Catalogue, name: str, sm: list[str] | None = None, python: str | None = None) -> Plan:
    """The plan of a target, or of a what-if (other GPU architectures or Python); refused if it cannot be built."""
    declared = catalogue.target(name)
    target = changed(declared, None, python)
    pins = catalogue.pins(target)
    patches = {pin.name: patch.selected(catalogue.root, pin, target) for pin in pins}
    path = catalogue.root / "recipes" / "lock" / f"{name}.txt"
    lock = Lock.read(path, target) if path.exists() and target.python == declared.python else None
    beside = path.with_suffix(".toolkit.txt")
    toolkit = Lock.read(beside, target) if lock and beside.exists() else None
    chosen = for_architectures(Plan(catalogue.root, target, pins, patches, lock, toolkit), sm)
    held = limits.facts(chosen.target, lock, {}, catalogue.learned.base)
    for pin in chosen.left_out:
        held.pop(pin.name)
    limits.refuse(limits.judge(catalogue.limits, held, held))
    listed = catalogue.learned.releases.get("sm", chosen.target.sm)
    if strange := [architecture for architecture in chosen.target.sm if architecture not in listed]:
        raise Refusal(f"There is no GPU architecture {strange[0]}: choose one of {', '.join(listed)}.")
    return chosen


def for_architectures(chosen: Plan, sm: list[str] | None) -> Plan:
    """The plan for these GPU architectures, without the packages that have kernels for none of them.

    Refused if a package that stays is built beside such a package.
    """
    target = changed(chosen.target, sm, None)
    left_out = tuple(pin for pin in chosen.pins if pin.release.sm and not pin.architectures(target))
    pins = [pin for pin in chosen.pins if pin not in left_out]
    for pin in left_out:
        if beside := [each.name for each in pins if each.release.kind == "source" and pin.name in each.build.needs]:
            raise Refusal(
                f"{beside[0]} is built beside {pin.label}, which {pin.release.reach}: "
                f"pass --sm {','.join([*target.sm, *pin.release.sm])}."
            )
    narrowed = tuple(target.sm) if target.sm != chosen.target.sm else ()
    return replace(chosen, target=target, pins=pins, narrowed=narrowed, left_out=left_out)
