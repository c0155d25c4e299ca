"""Learned limits answer what-ifs before any build: refused with the thread, allowed with the source, or unknown."""

from __future__ import annotations

import pytest

from recipes.catalogue import limits
from recipes.catalogue.compatibility import grid
from recipes.catalogue.limits import judge
from recipes.catalogue.load import Catalogue, what_if
from recipes.catalogue.schema import Limit
from recipes.errors import Refusal
from recipes.tests.conftest import Checkout

ROWS = Catalogue().limits
OLD = {"torch": ["2.0.1+cu117"], "cuda": ["11.4"], "python": ["3.8"], "sm": ["8.0"]}
MIDDLE = {"torch": ["2.1.2"], "cuda": ["12.1"], "python": ["3.10"], "sm": ["9.0"], "cudnn": ["8.9.0.131"]}
NEW = {"torch": ["2.11.0"], "cuda": ["13.0"], "python": ["3.12"], "sm": ["9.0"]}
REFUSED = {
    "the excluded flash-attn": MIDDLE | {"transformer-engine": ["1.7"], "flash-attn": ["2.1.0"]},
    "FP8 on CUDA 11.4": OLD | {"transformer-engine": ["1.7"]},
    "a newer flash-attn's nvcc": OLD | {"flash-attn": ["2.1.2"]},
    "cuDNN 8 for a release that wants 9": MIDDLE | {"transformer-engine": ["2.3"]},
    "MS-AMP beside another transformer-engine": MIDDLE | {"ms-amp": ["0.4.0"], "transformer-engine": ["1.7"]},
    "MS-AMP on a newer torch": MIDDLE | {"ms-amp": ["0.4.0"], "torch": ["2.2.0"]},
    "a torch without sm_90": OLD | {"sm": ["9.0"], "cuda": ["11.8"]},
    "sm_90 with nvcc 11.4": {"sm": ["9.0"], "cuda": ["11.4"], "flash-attn": ["2.1.0"]},
    "torch._six is gone": OLD | {"apex": ["22.04-dev"]},
    "xformers under CUDA 13": NEW | {"xformers": ["0.0.35"]},
    "pkg_resources is gone": OLD | {"setuptools": ["80"]},
    "pip dropped apex's options": OLD | {"apex": ["23.05"], "pip": ["25.3"]},
    "torchao without its kernels": NEW | {"torchao": ["0.16.0"]},
    "NumPy 2 and an old torch": MIDDLE | {"numpy": ["2.0.0"]},
}
ALLOWED = {
    "the last flash-attn for 11.4": OLD | {"flash-attn": ["2.1.1"]},
    "a flash-attn inside the window": MIDDLE | {"transformer-engine": ["1.7"], "flash-attn": ["2.3.6"]},
    "setuptools with pkg_resources": OLD | {"setuptools": ["69.5.1"]},
    "a pip with options": OLD | {"apex": ["23.05"], "pip": ["23.0.1"]},
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_combination_that_cannot_be_is_refused_with_both_sides_and_the_source(case: str) -> None:
    verdict = judge(ROWS, REFUSED[case], REFUSED[case])
    assert verdict.word == "refused"
    assert " needs " in verdict.reasons[0].here
    assert "https://" in verdict.reasons[0].rule


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_hangs_on_the_rows_it_cites(case: str) -> None:
    """Without every row that it breaks, the same combination is not refused."""
    held = REFUSED[case]
    others = [row for row in ROWS if judge([row], held, held).word != "refused"]
    assert len(others) < len(ROWS)
    assert judge(others, held, held).word != "refused"


@pytest.mark.parametrize("case", ALLOWED)
def test_a_combination_that_fits_is_allowed(case: str) -> None:
    assert judge(ROWS, ALLOWED[case], ALLOWED[case]).word == "allowed"


def test_what_nobody_declared_is_unknown() -> None:
    assert judge(ROWS, {"left-pad": ["1.0"], "torch": ["2.1.2"]}, ["left-pad"]).word == "unknown"


def test_only_what_was_asked_about_is_judged() -> None:
    held = REFUSED["torchao without its kernels"] | {"left-pad": ["1.0"]}
    assert judge(ROWS, held, ["left-pad"]).word == "unknown"


def test_versions_are_compared_as_versions() -> None:
    row = Limit(
        package="apex", versions="==23.5", needs={"torch": ">=2"}, reason="x", thread="https://example.invalid/"
    )
    assert judge([row], {"apex": ["23.05"], "torch": ["1.13"]}, ["apex"]).word == "refused"


def test_every_row_is_complete_and_said_once() -> None:
    assert len({(row.package, row.versions, *sorted(row.needs.items())) for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("text", ["torch", "torch>=2", "torch==2.*", "=="])
def test_a_what_if_names_one_version(text: str) -> None:
    with pytest.raises(Refusal, match=r"PACKAGE==VERSION|single version"):
        limits.what_if(text)


def test_a_what_if_holds_on_every_machine() -> None:
    with pytest.raises(Refusal, match="some machines only"):
        limits.what_if("numpy==1.26.4; python_version < '3'")


def test_what_ifs_name_one_version_of_a_package() -> None:
    assert limits.what_ifs(["numpy==1.26", "NumPy==1.26.0"]) == {"numpy": "1.26"}
    with pytest.raises(Refusal, match=r"numpy 9\.0 and 1\.26\.4"):
        limits.what_ifs(["numpy==9.0", "numpy==1.26.4"])


@pytest.mark.parametrize(
    "text", ["python==3.13t", "sm==9.0a", "sm==86", "cuda==12", "cuda==none", "glibc==3.1", "driver==new", "gcc==x"]
)
def test_a_fact_that_is_written_otherwise_is_refused_in_plain_words(text: str) -> None:
    with pytest.raises(Refusal, match=r"is not an? [A-Za-z ]+: write it as \d") as refused:
        limits.what_if(text)
    assert "match" not in str(refused.value)


def test_what_an_extra_adds_is_not_known() -> None:
    (reason,) = limits.extras(["transformers[torch]==4.40.2", "numpy==1.26.4"])
    assert "transformers[torch] 4.40.2" in str(reason)
    assert limits.extras(["numpy==1.26.4"]) == ()


# --- the real targets, asked through the command

ASKED = {
    "the excluded flash-attn": ("cu12.1-torch2.1", "flash-attn==2.1.0", "transformer-engine 1.7"),
    "FP8 on CUDA 11.4": ("cu11.4-torch2.0", "transformer-engine==1.7", "has cuda 11.4"),
    "a newer flash-attn's nvcc": ("cu11.4-torch1.12", "flash-attn==2.1.2", "has cuda 11.4"),
    "cuDNN 8 for a release that wants 9": ("cu12.1-torch2.1", "transformer-engine==2.3", "has cudnn 8.9.0"),
    "another transformer-engine beside MS-AMP": ("ms-amp", "transformer-engine==1.7", "ms-amp 0.4.0"),
    "a newer torch beside MS-AMP": ("ms-amp", "torch==2.2", "ms-amp 0.4.0"),
    "torch._six is gone": ("cu11.4-torch2.0", "apex==22.04-dev", "has torch 2.0.1+cu117"),
    "xformers under CUDA 13": ("cu13.0-torch2.11", "xformers==0.0.35", "has cuda 13.0"),
    "pkg_resources is gone": ("cu11.4-torch2.0", "setuptools==80", "torch 2.0.1+cu117"),
    "pip dropped apex's options": ("cu12.1-torch2.1", "pip==25.3", "apex 23.05"),
}
WIDER = {
    "a torch without sm_90": ("cu11.4-torch2.0", "torch 2.0.1+cu117 needs sm"),
    "sm_90 with nvcc 11.4": ("cu11.4-torch1.12", "sm 9.0 needs cuda >=11.8"),
}


@pytest.mark.parametrize("case", ASKED)
def test_a_target_refuses_what_it_cannot_hold(checkout: Checkout, case: str) -> None:
    target, asked, other_side = ASKED[case]
    checkout.refuse("plan", target, "--with", asked, naming=(asked.replace("==", " "), other_side, "https://"))


@pytest.mark.parametrize("case", WIDER)
def test_a_target_refuses_a_gpu_that_it_cannot_serve(checkout: Checkout, case: str) -> None:
    target, cited = WIDER[case]
    checkout.refuse("plan", target, "--sm", "9.0", naming=(cited, "https://"))


def test_what_the_command_changes_beside_versions_is_judged_too(checkout: Checkout) -> None:
    asked = ("plan", "cu11.4-torch1.12", "--sm", "9.0", "--with", "torch==1.13.1")
    checkout.refuse(*asked, naming=("torch 1.13.1 needs sm <9", "sm 9.0 needs cuda >=11.8"))


def test_without_the_rows_it_cites_no_cell_of_the_grid_is_refused_by_a_row() -> None:
    """What a learned limit refuses, no range of a release says again."""
    catalogue, doubled = Catalogue(), []
    for name, target in catalogue.targets.items():
        for package in catalogue.packages.values():
            for release in package.release:
                held = limits.facts(target, None, {package.name: release.version})
                broken = [row for row in ROWS if judge([row], held, [package.name]).word == "refused"]
                torch = held["torch"][0]
                met = release.obstacle(target, torch)
                doubled += [
                    f"{package.name} {release.version} on {name}: {met.need}"
                    for row in broken
                    if met and row.package == package.name and met.need.split()[1].lower() in row.needs
                ]
    assert not doubled


def test_a_release_that_fits_can_be_pinned() -> None:
    """Wherever the grid says that a target could hold another release of a package it has, the plan agrees."""
    catalogue = Catalogue()
    for (package, version), verdicts in grid(catalogue).rows.items():
        for name, verdict in verdicts.items():
            target = catalogue.targets[name]
            if verdict.word == "allowed" and package in target.packages:
                catalogue.pins(what_if(target, {"packages": {**target.packages, package: version}}))


def test_the_command_knows_three_answers(checkout: Checkout) -> None:
    refused = checkout.refuse("plan", "cpu", "--with", "torchao==0.16.0", naming=("torchao 0.16.0", "torch ==2.10.0"))
    assert "https://" in refused
    assert checkout.succeed("plan", "cpu", "--with", "torchao==0.17.0").startswith(
        "allowed: torchao 0.17.0 needs torch"
    )
    unknown = checkout.run("plan", "cpu", "--with", "left-pad==1.0")
    assert (unknown.returncode, unknown.stdout.split(":")[0]) == (3, "unknown")
    assert checkout.succeed("plan", "cpu", "--with", "deepspeed==0.19.8").startswith("allowed")


def test_deleting_the_row_turns_a_refusal_into_acceptance(checkout: Checkout) -> None:
    path = checkout.root / "recipes" / "limits.toml"
    head, *rows = path.read_text().split("[[limit]]")
    others = [row for row in rows if '"torchao"' not in row or "==0.16" not in row]
    assert len(others) == len(rows) - 1
    path.write_text("[[limit]]".join([head, *others]))
    assert checkout.run("plan", "cpu", "--with", "torchao==0.16.0").returncode == 3
