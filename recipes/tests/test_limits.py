"""Learned limits answer what-ifs before any build: refused with the thread, allowed with the source, or unknown."""

from __future__ import annotations

import pytest

from recipes import limits
from recipes.limits import Limit, judge
from recipes.model import ROOT, Refusal
from recipes.tests.conftest import Checkout

ROWS = limits.load(ROOT)
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
    assert " needs " in verdict.reasons[0]
    assert "https://" in verdict.reasons[0]


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_hangs_on_the_rows_it_cites(case: str) -> None:
    """Without every row that it breaks, the same combination is not refused."""
    held = REFUSED[case]
    kept = [row for row in ROWS if judge([row], held, held).word != "refused"]
    assert len(kept) < len(ROWS)
    assert judge(kept, held, held).word != "refused"


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
    with pytest.raises(Refusal, match="--with"):
        limits.what_if(text)


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
    kept = [row for row in rows if '"torchao"' not in row or "==0.16" not in row]
    assert len(kept) == len(rows) - 1
    path.write_text("[[limit]]".join([head, *kept]))
    assert checkout.run("plan", "cpu", "--with", "torchao==0.16.0").returncode == 3
