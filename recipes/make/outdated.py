"""The newest release upstream for each pin: what the limits say about it, and what happens to the pin's patches.

A file is asked for on pip's configured index, a git source by the tags of its repository. Nothing is kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version
from unearth.link import Link

from recipes.catalogue import patch
from recipes.catalogue.compatibility import consider
from recipes.catalogue.load import Catalogue
from recipes.catalogue.patch import Patch
from recipes.catalogue.schema import Pin, Release, Target, is_version
from recipes.errors import Refusal
from recipes.make.cache import Cache
from recipes.make.fetch import WORKERS, Downloads, wheels_for
from recipes.make.git import Git
from recipes.progress import Steps


class Question(NamedTuple):
    """What is asked of upstream: the files of a package, `own_index` beside pip's; or the tags of a repository."""

    package: str
    own_index: str | None
    repository: str | None


# The files of each release, by version (no files where tags name the releases); or why nobody answered.
Answer = Mapping[str, list[Link]] | Refusal


@dataclass(frozen=True)
class PatchStanding:
    """What becomes of a patch of a pin with the newest release."""

    name: str
    word: Literal["stays", "ends", "retires"]
    why: str


@dataclass(frozen=True)
class Standing:
    """One pin beside upstream: `verdict` is what is known of `newest`, and `fitting` the newest that is not refused.

    Both are None where nothing is newer than the pin, or where nobody answered (`verdict` "unanswered").
    """

    target: str
    package: str
    pinned: str
    newest: str | None
    verdict: Literal["current", "allowed", "refused", "unknown", "unanswered", "provided"]
    reasons: tuple[str, ...] = ()
    fitting: str | None = None
    patches: tuple[PatchStanding, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The row as `outdated --json` writes it."""
        return asdict(self)


def standings(catalogue: Catalogue, targets: Iterable[Target], cache: Cache, steps: Steps) -> list[Standing]:
    """Every pin of these targets beside upstream; refused where nobody answers at all."""
    pins = [(target, pin) for target in targets for pin in catalogue.pins(target)]
    asked = {(target.name, pin.name): _question(pin) for target, pin in pins}
    answers = _answers(catalogue, {question for question in asked.values() if question}, cache, steps)
    return [_standing(catalogue, target, pin, answers, asked[target.name, pin.name]) for target, pin in pins]


def _question(pin: Pin) -> Question | None:
    """What to ask of upstream for a pin; nothing where the base image provides it."""
    release = pin.release
    if release.kind == "provided":
        return None
    return Question(pin.name if release.file else "", release.index, release.repository)


def _answers(catalogue: Catalogue, questions: set[Question], cache: Cache, steps: Steps) -> dict[Question, Answer]:
    """The answers, several asked for at a time."""
    downloads = Downloads(cache, steps, None, next(iter(catalogue.targets.values())))
    git = Git(cache, steps)
    if any(question.package for question in questions):
        _ = downloads.settings  # read once, before the threads read it
    pool = ThreadPoolExecutor(WORKERS)
    jobs = {pool.submit(_answer, question, downloads, git): question for question in sorted(questions, key=str)}
    answers: dict[Question, Answer] = {}
    try:
        with steps.step("ask", f"upstream of {len(jobs)} packages and repositories") as step:
            for job in as_completed(jobs):
                question = jobs[job]
                answers[question] = job.result()
                step.show(f"{len(answers)} of {len(jobs)}: {question.repository or question.package}")
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    silent = [str(answer) for answer in answers.values() if isinstance(answer, Refusal)]
    if silent and len(silent) == len(jobs):
        raise Refusal(f"None of {len(jobs)} packages and repositories answered; the first: {min(silent)}")
    return answers


def _answer(question: Question, downloads: Downloads, git: Git) -> Answer:
    try:
        if question.repository:
            return {tag: [] for tag in git.tags(question.repository, question.repository)}
        releases: dict[str, list[Link]] = {}
        for package in downloads.releases(question.package, question.own_index):
            if package.version and is_version(package.version):
                releases.setdefault(package.version, []).append(package.link)
        return releases
    except Refusal as refusal:
        return refusal


def _standing(
    catalogue: Catalogue, target: Target, pin: Pin, answers: Mapping[Question, Answer], question: Question | None
) -> Standing:
    release, about = pin.release, (target.name, pin.name, pin.release.version)
    if question is None:
        return Standing(*about, None, "provided")
    answer = answers[question]
    if isinstance(answer, Refusal):
        return Standing(*about, None, "unanswered", (str(answer),))
    newer = _newer(release, answer)
    if not newer:
        return Standing(*about, None, "current")
    verdicts = ((version, *_verdict(catalogue, target, pin, version, links)) for version, links in newer.items())
    newest, word, reasons = next(verdicts)
    older = (version for version, word, _ in verdicts if word != "refused")
    fitting = newest if word != "refused" else next(older, None)
    patches = [
        patch_standing(each, newest)
        for each in patch.of_package(catalogue.root, pin.name)
        if each.selects(release.version, target)
    ]
    return Standing(*about, newest, word, reasons, fitting, tuple(patches))


def _newer(release: Release, answer: Mapping[str, list[Link]]) -> dict[str, list[Link]]:
    """The releases after the pinned one, the newest first; a pre-release counts where one is pinned."""
    versions = _of_tags(release, answer) if release.repository else answer
    pinned = Version(release.version if release.repository else release.metadata_version)

    def counts(version: Version) -> bool:
        same_build = release.repository is not None or version.local == pinned.local  # 2.13.0+cpu, not +cu130
        return version > pinned and same_build and (not version.is_prerelease or pinned.is_prerelease)

    newer = [version for version in versions if counts(Version(version))]
    return {version: versions[version] for version in sorted(newer, key=Version, reverse=True)}


def _of_tags(release: Release, tags: Iterable[str]) -> dict[str, list[Link]]:
    """The versions that tags name as the pinned release's tag names its own; else "v1.2" and "1.2" are read."""
    before, own, after = (release.tag or "").partition(release.version)
    pattern = f"{re.escape(before)}(.+){re.escape(after)}" if own else "v?(.+)"
    matches = [re.fullmatch(pattern, tag) for tag in tags]
    return {match[1]: [] for match in matches if match and is_version(match[1])}


def _verdict(
    catalogue: Catalogue, target: Target, pin: Pin, version: str, links: list[Link]
) -> tuple[Literal["allowed", "refused", "unknown"], tuple[str, ...]]:
    """What is known of a release in a target: whether a file of it fits, then what limits and recipes say."""
    if pin.release.file and (obstacle := _obstacle(pin, target, links)):
        return "refused", (f"{pin.name} {version} {obstacle}",)
    verdict = consider(catalogue, target, {pin.name: version}, published=(pin.name,))
    known = verdict.reasons if verdict.word != "unknown" else ()  # `plan --with` lists what is not known
    return verdict.word, tuple(map(str, known))


def _obstacle(pin: Pin, target: Target, links: list[Link]) -> str | None:
    """Why none of a release's files is for the target, or None."""
    fits: Callable[[Link], bool] = wheels_for(target) if pin.release.kind == "wheel" else _is_sdist
    files = [link for link in links if fits(link)]
    if not files:
        kind = "wheel" if pin.release.kind == "wheel" else "sdist"
        return f"has no {kind} for Python {target.python} and glibc {target.glibc}"
    if not any(_takes_python(link, target) for link in files):
        return f"needs Python {files[0].requires_python}, and the target has {target.python}"
    return None


def _is_sdist(link: Link) -> bool:
    return link.filename.endswith(".tar.gz")


def _takes_python(link: Link, target: Target) -> bool:
    try:
        return SpecifierSet(link.requires_python or "").contains(f"{target.python}.0")
    except InvalidSpecifier:
        return True


def patch_standing(candidate: Patch, version: str) -> PatchStanding:
    """What a patch says of itself for another release; only `bump` tries it on the files."""
    if since := candidate.in_upstream(version):
        return PatchStanding(candidate.name, "retires", f"upstream since {since}")
    if not candidate.covers(version):
        return PatchStanding(candidate.name, "ends", f"it is for {candidate.applies_to.specifier}")
    if candidate.lines and Version(version) not in candidate.lines:
        return PatchStanding(candidate.name, "ends", f"X-Lines does not have {version}")
    return PatchStanding(candidate.name, "stays", f"it is for {candidate.applies_to.specifier}")
