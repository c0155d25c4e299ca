"""A plan says what a target is made of, refuses what cannot be, and its stack key follows every pinned input."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from recipes.model import ROOT, Catalogue, Refusal
from recipes.plan import changed, jobs, memory_limit, minutes, plan
from recipes.tests.conftest import Checkout


def test_the_cpu_plan_is_complete() -> None:
    chosen = plan(Catalogue(), "cpu")
    assert chosen.pins[0].name == "torch"
    assert {pin.label for pin in chosen.pins} == {
        "torch 2.13.0+cpu",
        "transformers 4.40.2",
        "torchao 0.18.0",
        "deepspeed 0.19.8",
    }
    assert [len(chosen.patches[name]) for name in ("transformers", "deepspeed", "torch")] == [2, 1, 0]
    assert len(chosen.locked.artifacts) > 20


@pytest.mark.parametrize(
    ("what_if", "said"),
    [({"python": "3.12"}, "torch 2.13.0\\+cpu needs Python ==3.11"), ({"sm": ["9.0"]}, "compiles no GPU code")],
)
def test_a_what_if_that_cannot_be_is_refused(what_if: dict[str, object], said: str) -> None:
    with pytest.raises(Refusal, match=said):
        plan(Catalogue(), "cpu", **what_if)  # type: ignore[arg-type]


def test_the_command_shows_every_step_within_two_seconds() -> None:
    started = time.monotonic()
    shown = subprocess.run(
        [sys.executable, "-m", "recipes", "plan", "cpu"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert time.monotonic() - started < 2
    for word in (
        "fetch",
        "patch",
        "build",
        "install",
        "smoke",
        "disk",
        "peak memory",
        "min cold",
        "transformers-4.40.2.tar.gz",
    ):
        assert word in shown.stdout


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("patches/deepspeed/0001-let-the-builder-name-the-cpu.patch", "Description: Let", "Description: Make"),
        ("recipes/packages/deepspeed.toml", 'DS_SIMD_WIDTH = "AVX256"', 'DS_SIMD_WIDTH = "AVX512"'),
        ("recipes/packages/transformers.toml", 'sha256 = "657b', 'sha256 = "757b'),
        ("recipes/lock/cpu.txt", "--hash=sha256:", "--hash=sha256:"),
        ("recipes/targets.toml", '"sha256:a', '"sha256:b'),
    ],
    ids=["a patch", "a variable", "a source", "the lock", "the base image"],
)
def test_the_stack_key_follows_every_input(checkout: Checkout, file: str, old: str, new: str) -> None:
    before = plan(Catalogue(checkout.root), "cpu").stack
    path = checkout.root / file
    text = path.read_text()
    path.write_text(text.replace(old, new, 1) if old != new else text + "# more\n")
    assert plan(Catalogue(checkout.root), "cpu").stack != before


def test_the_stack_key_ignores_estimates(checkout: Checkout) -> None:
    before = plan(Catalogue(checkout.root), "cpu").stack
    path = checkout.root / "recipes" / "packages" / "deepspeed.toml"
    path.write_text(path.read_text().replace("minutes = 1.5", "minutes = 9"))
    assert plan(Catalogue(checkout.root), "cpu").stack == before


def test_jobs_fit_memory_and_cores() -> None:
    pin = next(pin for pin in plan(Catalogue(), "cpu").pins if pin.name == "deepspeed")
    hungry = pin.model_copy(
        update={
            "package": pin.package.model_copy(
                update={"build": pin.build.model_copy(update={"mib_per_job": memory_limit() // 2**20})}
            )
        }
    )
    assert jobs(hungry) == 1
    assert 1 <= jobs(pin) <= len(os.sched_getaffinity(0))


def test_time_follows_jobs_and_architectures() -> None:
    """A recipe's minutes are of two jobs and one GPU architecture; what compiles nothing takes the same anywhere."""
    chosen = plan(Catalogue(), "cu12.1-torch2.1")
    assert len(chosen.target.sm) == 2
    one = changed(chosen.target, ["9.0"], None)
    for pin in chosen.pins:
        if pin.release.kind == "source" and pin.build.compiler == "nvcc":
            assert minutes(pin, chosen.target) == 2 * minutes(pin, one)
            assert minutes(pin, one) * jobs(pin) == pytest.approx(2 * pin.build.minutes)
        elif pin.release.kind == "source":
            assert minutes(pin, chosen.target) == minutes(pin, one) == pin.build.minutes
