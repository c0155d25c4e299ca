"""Which targets have wheels for a torch, a Python and a CUDA, and the cost of building missing wheels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import Version

from recipes.catalogue import limits
from recipes.catalogue.load import Catalogue
from recipes.catalogue.plan import Plan, plan
from recipes.catalogue.schema import Target
from recipes.errors import Refusal
from recipes.make import costs
from recipes.ship import index
from recipes.ship.wheels import LIST, folder, own, version_of

HOSTED = "ubuntu-24.04"  # GitHub's runner for public repositories, as its documentation describes it
HOSTED_MACHINE, HOSTED_DISK = costs.Machine(cores=4, memory=16 * 2**30), 14 * 2**30
HOSTED_MINUTES = 360  # GitHub ends a job after that


@dataclass(frozen=True)
class Wanted:
    """What the wheels are to run beside; Python or CUDA is None if any will do."""

    torch: Requirement
    python: str | None
    cuda: str | None

    @classmethod
    def read(cls, torch: str, python: str | None, cuda: str | None) -> Wanted:
        """Of the command line; what is not a requirement on torch is refused."""
        try:
            asked = Requirement(torch)
        except InvalidRequirement:
            raise Refusal(f"--for {torch!r} is not a requirement: write torch==VERSION.") from None
        if asked.name != "torch":
            raise Refusal(f"--for {torch!r} is not about torch: write torch==VERSION.")
        if python is not None:
            python = limits.short("python", limits.written("python", python))
        if cuda is not None and cuda != "none":
            cuda = limits.short("cuda", limits.written("cuda", cuda))
        return cls(asked, python, cuda)

    def lacks(self, target: Target) -> list[str]:
        """In what the target differs: "Python 3.12", empty where it fits."""
        torch = target.packages.get("torch")
        differences = []
        builds = (torch, Version(torch).public) if torch else ()  # one that names no build takes any
        if not any(self.torch.specifier.contains(build, prereleases=True) for build in builds):
            differences.append(f"torch {torch or 'none'}")
        if self.python not in (None, target.python):
            differences.append(f"Python {target.python}")
        if self.cuda not in (None, target.cuda):
            differences.append(f"CUDA {target.cuda}")
        return differences

    def distance(self, target: Target) -> tuple[int, int]:
        """How far the target is from what is wanted: in how many things it differs, and by how many minor versions."""
        asked = next((Version(bound.version.removesuffix(".*")) for bound in self.torch.specifier), Version("0"))
        has = Version(target.packages.get("torch", "0"))
        return len(self.lacks(target)), abs(100 * (asked.major - has.major) + asked.minor - has.minor)


def answer(catalogue: Catalogue, wanted: Wanted) -> Iterator[str]:
    """A line for each wheel that fits: where it is, or what building it takes; else the targets that come nearest."""
    if fits(catalogue, wanted):
        for target in catalogue.targets.values():
            if not wanted.lacks(target):
                yield from _wheels(catalogue, plan(catalogue, target.name))
        return
    plans = [plan(catalogue, name) for name in catalogue.targets]
    ranked = sorted(filter(own, plans), key=lambda chosen: wanted.distance(chosen.target))
    yield "no target fits"
    for chosen in ranked[:3]:
        has = " and ".join(wanted.lacks(chosen.target))
        yield f"nearest: {chosen.target.name}, which has {has}; building it takes {_minutes(chosen)}"
    yield f"write a target for it with `nox -s new-target -- NAME --like {ranked[0].target.name}`"


def fits(catalogue: Catalogue, wanted: Wanted) -> bool:
    """Whether a target fits."""
    return any(not wanted.lacks(target) for target in catalogue.targets.values())


@dataclass(frozen=True)
class Missing:
    """A target with wheels that an index lacks, and the `runner` that builds them; None if there is none, and why."""

    target: str
    wheels: int
    runner: str | None
    minutes: int
    reason: str

    def __str__(self) -> str:
        if self.runner is None:
            return f"{self.target}: {self.wheels} wheels are missing, and no runner builds them: {self.reason}"
        because = f" ({self.reason})" if self.reason else ""
        return f"{self.target}: {self.wheels} wheels are missing, to be built on {self.runner}{because}"


def missing(catalogue: Catalogue, site: Path) -> Iterator[Missing]:
    """The targets with wheels whose version the index in that folder lacks; all of them if there is no index."""
    there = {(entry.target, entry.package, entry.version) for entry in index.read(site)} if site.exists() else set()
    for name in catalogue.targets:
        chosen = plan(catalogue, name)
        lacking = [pin for pin in own(chosen) if (name, pin.name, version_of(chosen, pin)) not in there]
        if lacking:
            minutes = costs.cold_minutes(chosen, HOSTED_MACHINE)
            reasons = _not_hosted(chosen, minutes)
            runner = chosen.target.runner if reasons else HOSTED
            yield Missing(name, len(lacking), runner, round(minutes), "; ".join(reasons))


def _not_hosted(chosen: Plan, minutes: float) -> list[str]:
    """Why a target is not built on GitHub's own runner, on which it would take these minutes."""
    target, (_, needed) = chosen.target, costs.disk(chosen)
    reasons = []
    if minutes > HOSTED_MINUTES:
        reasons.append(f"{HOSTED} would take {minutes / 60:.1f} of the {HOSTED_MINUTES // 60} hours that a job has")
    if needed > HOSTED_DISK:
        reasons.append(f"{HOSTED} has {HOSTED_DISK // 2**30} GiB of disk, and {needed / 2**30:.0f} are needed")
    if target.cuda != "none" and target.toolkit is None:
        reasons.append(f"{HOSTED} has no CUDA {target.cuda}")
    return reasons


def _wheels(catalogue: Catalogue, chosen: Plan) -> Iterator[str]:
    site = catalogue.root / "build" / "index"
    there = {
        (entry.target, entry.package, entry.version): (files, entry)
        for listed, files in ((site, site / "files"), (folder(chosen), folder(chosen)))
        if (listed / LIST).exists()
        for entry in index.read(listed)
    }
    proofs, missing = index.Proofs(catalogue), False
    for pin in own(chosen):
        made = there.get((chosen.target.name, pin.name, version_of(chosen, pin)))
        if made:
            place, entry = made
            proof = proofs.of(entry)
            yield f"{place / entry.file}: {proof}"
            continue
        missing = True
        if pin.release.kind == "source":
            seconds = costs.build_seconds(pin, chosen.target)
            yield f"{pin.name} {version_of(chosen, pin)}: to be built, about {_spoken(seconds)} on this machine"
        else:
            yield f"{pin.name} {version_of(chosen, pin)}: to be patched and collected"
    if missing:
        yield f'collect them with `nox -s "wheels({chosen.target.name})"`, {_minutes(chosen)} without a cache'


def _minutes(chosen: Plan) -> str:
    """How long it takes to build all packages of a target here."""
    built = [pin for pin in chosen.pins if pin.release.kind == "source"]
    return f"about {_spoken(sum(costs.build_seconds(pin, chosen.target) for pin in built))}"


def _spoken(seconds: float) -> str:
    return f"{max(1, round(seconds / 60))} min"
