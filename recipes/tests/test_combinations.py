"""Combinations with a known answer: none that cannot be is allowed, and none that works is refused."""

from __future__ import annotations

import time
import tomllib

import pytest

from recipes.catalogue.compatibility import consider, knowledge
from recipes.catalogue.limits import what_if
from recipes.catalogue.load import Catalogue
from recipes.catalogue.solve import instead
from recipes.files import ROOT
from recipes.tests.conftest import Checkout

CATALOGUE = Catalogue()
ROWS = tomllib.loads((ROOT / "recipes" / "tests" / "combinations.toml").read_text())
Row = dict[str, str]


def label(row: Row) -> str:
    return f"{row['target']} {' '.join(row['with'])}"


def answer(row: Row) -> str:
    """What the planner says, and the reasons, which a failure shows."""
    verdict = consider(CATALOGUE, CATALOGUE.target(row["target"]), dict(map(what_if, row["with"])))
    return f"{verdict.word}: {'; '.join(map(str, verdict.reasons))}"


def test_there_are_many() -> None:
    assert len(ROWS["bad"]) >= 220 and len(ROWS["good"]) >= 80
    assert len({label(row) for rows in ROWS.values() for row in rows}) == len(ROWS["bad"]) + len(ROWS["good"])


@pytest.mark.parametrize("row", ROWS["bad"], ids=label)
def test_what_cannot_be_is_not_allowed(row: Row) -> None:
    words = answer(row)
    assert not words.startswith("allowed"), row["about"]
    assert words.startswith(row["answer"]), row["about"]


@pytest.mark.parametrize("row", ROWS["good"], ids=label)
def test_what_works_is_not_refused(row: Row) -> None:
    words = answer(row)
    assert not words.startswith("refused"), row["about"]
    assert words.startswith(row["answer"]), row["about"]


def test_a_package_without_kernels_is_left_out_as_in_a_plan() -> None:
    target = CATALOGUE.target("cu13.2-torch2.15")
    verdict = consider(CATALOGUE, target, {"sm": "8.6"})
    assert verdict.word == "allowed" and "without flash-attn-3" in str(verdict.reasons[0])
    assert consider(CATALOGUE, target, {"sm": "8.6", "flash-attn-3": "3.0.0"}).word == "refused"


def test_what_is_unknown_says_what_is_not_known() -> None:
    target = CATALOGUE.target("cpu")
    verdict = consider(CATALOGUE, target, {"torchao": "0.17.0", "left-pad": "1.0"})
    assert any("left-pad 1.0: nothing says that there is such a release" in str(reason) for reason in verdict.reasons)
    verdict = consider(CATALOGUE, target, {"deepspeed": "0.18.0"})
    assert "deepspeed 0.18.0" in str(verdict.reasons[0])


def test_what_two_packages_need_of_each_other_is_unknown_unless_it_is_said() -> None:
    target = CATALOGUE.target("cpu")
    assert consider(CATALOGUE, target, {"einops": "0.8.1", "tqdm": "4.66.5"}).word == "allowed"  # independent
    assert consider(CATALOGUE, target, {"pydantic": "2.14.3", "typing-extensions": "4.16.0"}).word == "allowed"
    asked = {"pytest": "8.3.5", "certifi": "2025.1.31"}
    verdict = consider(CATALOGUE, target, asked)
    assert "pytest 8.3.5 and certifi 2025.1.31 fit together" in str(verdict.reasons[0])
    assert all(consider(CATALOGUE, target, {name: version}).word == "allowed" for name, version in asked.items())


# What is asked of a target, and what no known version of a package between the two fits.
BETWEEN = {
    "the thing is too old for it": ("cu13.0-torch2.11-dist", "huggingface-hub", "0.17.3", "which datasets fits"),
    "the thing needs another": ("cu12.1-torch2.1", "ml-dtypes", "0.6.0", "which numpy fits"),
    "the target does not have it": (
        "ms-amp",
        "trl",
        "0.24.0",
        "needs transformers >=4.56.1, which the target does not",
    ),
}


@pytest.mark.parametrize("case", BETWEEN)
def test_a_package_between_two_others_counts(case: str) -> None:
    target, package, version, words = BETWEEN[case]
    verdict = consider(CATALOGUE, CATALOGUE.target(target), {package: version})
    assert verdict.word == "unknown"
    assert any(words in str(reason) for reason in verdict.reasons)


def test_a_build_for_the_cpu_goes_with_the_torch_for_the_cpu() -> None:
    target = CATALOGUE.target("cpu")
    assert consider(CATALOGUE, target, {"torchvision": "0.28.0+cpu"}).word == "allowed"
    assert consider(CATALOGUE, target, {"torchvision": "0.28.0"}).word == "refused"
    assert consider(CATALOGUE, target, {"torchvision": "0.27.0+cpu"}).word == "refused"


def test_every_pin_of_a_target_is_allowed() -> None:
    """And a package of a target that says nothing of another one there makes that one unknown."""
    for name, target in CATALOGUE.targets.items():
        for package, version in target.packages.items():
            verdict = consider(CATALOGUE, target, {package: version})
            assert verdict.word == "allowed", (name, package, list(map(str, verdict.reasons)))


def test_what_a_target_does_not_say_comes_from_its_base() -> None:
    known = knowledge(CATALOGUE)
    target = CATALOGUE.target("cu13.0-torch2.11").model_copy(update={"driver": None, "gcc": None})
    held = known.held(target, {})
    assert (held["gcc"], held["cudnn"]) == (["13"], ["9.12.0"])
    assert "driver" not in held  # the oldest that its CUDA takes may not know the GPU
    whole = CATALOGUE.target("cu13.2-torch2.15")
    assert known.held(whole, {})["cudnn"] == ["9.26.0.51"]  # torch brings it
    image = whole.base.wheels.model_copy(update={"image": "example.org/own:1"})
    base = whole.base.model_copy(update={"wheels": image})
    bare = whole.model_copy(update={"driver": None, "gcc": None, "base": base})
    verdict = known.verdict(bare, {"cuda": "13.2"})
    words = [str(reason) for reason in verdict.reasons]
    assert verdict.word == "unknown"
    for fact in ("driver", "gcc"):
        assert any(f"nothing says which {fact} the target has" in reason for reason in words), words


# What is asked for, and what would make it fit.
INSTEAD = {
    "a nearer version": ("cu12.1-torch2.1", {"flash-attn": "2.1.0"}, "flash-attn 2.1.1 fits the target"),
    "another target": ("cu11.4-torch2.0", {"transformer-engine": "1.7"}, "it fits target cu12.1-torch2.1"),
    "another package": (
        "cu12.1-torch2.1",
        {"transformer-engine": "1.1"},
        "transformer-engine 1.1 fits with flash-attn",
    ),
    "several": ("cu12.1-torch2.1", {"torch": "2.3.1"}, "with xformers 0.0.27"),
    "without one": ("ms-amp", {"torch": "2.2.0"}, "without ms-amp and msamp-arithmetic and msamp-adamw"),
}


@pytest.mark.parametrize("case", INSTEAD)
def test_a_refusal_says_what_would_fit_within_five_seconds(case: str) -> None:
    target, replaced, words = INSTEAD[case]
    started = time.process_time()
    assert words in instead(CATALOGUE, CATALOGUE.target(target), replaced)
    assert time.process_time() - started < 5


@pytest.mark.parametrize("row", ROWS["bad"], ids=label)
def test_what_would_fit_is_not_refused_itself(row: Row) -> None:
    """The nearest version that is offered is asked about again."""
    target, replaced = CATALOGUE.target(row["target"]), dict(map(what_if, row["with"]))
    for offered in instead(CATALOGUE, target, replaced).split(", or "):
        package, _, rest = offered.partition(" ")
        if rest.endswith(" fits the target"):
            assert consider(CATALOGUE, target, {package: rest.split()[0]}).word == "allowed", offered


def test_the_command_says_what_would_fit(checkout: Checkout) -> None:
    asked = ("plan", "cu12.1-torch2.1", "--with", "flash-attn==2.1.0")
    checkout.refuse(*asked, naming=("transformer-engine 1.7 needs", "flash-attn 2.1.1 fits the target"))
