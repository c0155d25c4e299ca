"""A plan says what a target is made of, refuses what cannot be, and its stack key follows every pinned input."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from dataclasses import replace

import pytest

from recipes.catalogue.load import Catalogue, build_environment
from recipes.catalogue.plan import changed, for_architectures, plan
from recipes.catalogue.schema import Limit
from recipes.errors import Refusal
from recipes.files import ROOT
from recipes.make import costs, resolve
from recipes.make.cache import Cache
from recipes.make.costs import build_seconds, jobs, memory_limit
from recipes.pages import tables
from recipes.prove import evidence
from recipes.tests.conftest import Checkout, Tiny


def test_the_cpu_plan_is_complete() -> None:
    chosen = plan(Catalogue(), "cpu")
    assert chosen.pins[0].name == "torch"
    assert {pin.label for pin in chosen.pins} == {
        "torch 2.13.0+cpu",
        "transformers 4.40.2",
        "accelerate 1.10.1",
        "torchao 0.18.0",
        "deepspeed 0.19.8",
    }
    assert [len(chosen.patches[name]) for name in ("transformers", "deepspeed", "torch")] == [3, 1, 0]
    assert len(chosen.locked.artifacts) > 20


@pytest.mark.parametrize(
    ("what_if", "message"),
    [({"python": "3.12"}, "torch 2.13.0\\+cpu needs Python ==3.11"), ({"sm": ["9.0"]}, "compiles no GPU code")],
)
def test_a_what_if_that_cannot_be_is_refused(what_if: dict[str, object], message: str) -> None:
    with pytest.raises(Refusal, match=message):
        plan(Catalogue(), "cpu", **what_if)  # type: ignore[arg-type]


def test_a_package_with_kernels_for_some_gpus_is_compiled_for_those() -> None:
    chosen = plan(Catalogue(), "cu13.2-torch2.15")
    compiled = {pin.name: pin.architectures(chosen.target) for pin in chosen.pins if pin.release.kind == "source"}
    assert compiled["flash-attn-3"] == ["9.0"] and compiled["flash-attn"] == chosen.target.sm
    (wide,) = (pin for pin in chosen.pins if pin.name == "flash-attn")
    narrow = wide.model_copy(update={"release": wide.release.model_copy(update={"sm": ["8.0", "9.0"]})})
    assert build_environment(narrow, chosen.target)["FLASH_ATTN_CUDA_ARCHS"] == "80;90"


def test_a_package_without_kernels_for_the_gpus_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    """Its lock still fits, and evidence of such a run has the stack of such a plan."""
    whole, chosen = (plan(Catalogue(), "cu13.2-torch2.15", sm=sm) for sm in (None, ["8.9"]))
    assert {pin.name for pin in whole.pins} - {pin.name for pin in chosen.pins} == {"flash-attn-3"}
    assert [pin.name for pin in chosen.left_out] == ["flash-attn-3"] and not whole.left_out
    assert "flash-attn-3" not in chosen.packages and "flash-attn-3" in whole.packages
    resolve.check(chosen)
    costs.show(chosen, Cache())
    assert re.search(r"leave out +flash-attn-3 3\.0\.0 +it has kernels for sm 9\.0 only", capsys.readouterr().out)
    ran = {"packages": {"apex": {"built_with": {"sm": ["8.9"]}}}}
    assert evidence.built_for(whole, ran).stack == chosen.stack != whole.stack
    assert plan(Catalogue(), "cu13.2-torch2.15", sm=["9.0"]).left_out == ()


def test_a_package_that_is_left_out_breaks_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"package": "flash-attn-3", "versions": ">=3", "needs": {"torch": "<2"}, "reason": "it does not import"}
    broken = Limit.model_validate({**row, "thread": "https://github.com/Dao-AILab/flash-attention/issues/1"})
    monkeypatch.setattr(Catalogue, "limits", [broken])
    with pytest.raises(Refusal, match="it does not import"):
        plan(Catalogue(), "cu13.2-torch2.15")
    assert plan(Catalogue(), "cu13.2-torch2.15", sm=["8.9"]).left_out


def test_a_package_with_kernels_for_some_gpus_is_not_said_to_be_built_for_fewer() -> None:
    whole, built = plan(Catalogue(), "cu13.2-torch2.15"), {"compiler": "c++ 12.2.0", "sm": ["9.0"]}
    assert tables._otherwise(whole, "flash-attn-3", built) == ""
    assert tables._otherwise(whole, "apex", built) == "sm 9.0 only; "


def test_what_is_built_beside_a_package_that_is_left_out_is_refused() -> None:
    whole = plan(Catalogue(), "cu13.2-torch2.15")
    core = next(pin for pin in whole.pins if pin.name == "transformer-engine-cu13")
    narrow = core.model_copy(update={"release": core.release.model_copy(update={"sm": ["9.0"]})})
    pins = [narrow if pin is core else pin for pin in whole.pins]
    expected = r"transformer-engine-torch is built beside transformer-engine-cu13 .* sm 9\.0 only: pass --sm 8\.9,9\.0"
    with pytest.raises(Refusal, match=expected):
        for_architectures(replace(whole, pins=pins), ["8.9"])


def test_the_command_shows_every_step_within_two_seconds() -> None:
    """Seconds of the processor, so that other processes do not count; the command waits for nothing."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    shown = subprocess.run(
        [sys.executable, "-m", "recipes", "plan", "cpu"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2
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
        ("patches/deepspeed/0001-let-the-builder-name-the-cpu.patch", "'-march=' + os", "'-mtune=' + os"),
        ("recipes/packages/deepspeed.toml", 'DS_SIMD_WIDTH = "AVX256"', 'DS_SIMD_WIDTH = "AVX512"'),
        ("recipes/packages/transformers.toml", 'sha256 = "657b', 'sha256 = "757b'),
        ("recipes/lock/cpu.txt", "sha256:f072", "sha256:e072"),
        ("recipes/lock/cpu.txt", "jinja2==3", "jinja2==4"),
        ("recipes/lock/cpu.txt", "jinja2==", "jinja3=="),
        ("recipes/targets.toml", '"sha256:a', '"sha256:b'),
    ],
    ids=["a patch", "a variable", "a source", "a locked hash", "a locked version", "a locked name", "the base image"],
)
def test_the_stack_key_follows_every_input(checkout: Checkout, file: str, old: str, new: str) -> None:
    before = plan(Catalogue(checkout.root), "cpu").stack
    path = checkout.root / file
    path.write_text(path.read_text().replace(old, new, 1))
    assert plan(Catalogue(checkout.root), "cpu").stack != before


@pytest.mark.parametrize(
    ("old", "new"),
    [("# inputs: ", "# inputs: 0"), ("# Written by", "# Made by"), ("  # ", "  # 1"), ("\n# inputs", "\n\n# inputs")],
    ids=["the inputs", "the heading", "a size", "an empty line"],
)
def test_the_stack_key_ignores_comments_of_the_lock(checkout: Checkout, old: str, new: str) -> None:
    before = plan(Catalogue(checkout.root), "cpu")
    path = checkout.root / "recipes" / "lock" / "cpu.txt"
    path.write_text(path.read_text().replace(old, new, 1))
    after = plan(Catalogue(checkout.root), "cpu")
    assert after.locked.sha256 != before.locked.sha256
    assert after.stack == before.stack


def test_the_stack_key_ignores_estimates(checkout: Checkout) -> None:
    before = plan(Catalogue(checkout.root), "cpu").stack
    path = checkout.root / "recipes" / "packages" / "deepspeed.toml"
    path.write_text(path.read_text().replace("core_seconds = 170", "core_seconds = 900"))
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


def test_time_follows_cores_and_architectures(monkeypatch: pytest.MonkeyPatch) -> None:
    """One core takes all of the work; many take the longest file, for each GPU architecture that nvcc compiles for."""
    monkeypatch.setattr("recipes.make.costs.memory_limit", lambda: 2**50)
    chosen = plan(Catalogue(), "cu12.1-torch2.1")
    narrowed = changed(chosen.target, ["9.0"], None)
    assert len(chosen.target.sm) == 2
    for pin in [pin for pin in chosen.pins if pin.release.kind == "source"]:
        longest = pin.build.longest_seconds or pin.build.core_seconds
        for cores, least in ((1, pin.build.core_seconds), (16, pin.build.core_seconds / 16), (10**6, longest)):
            monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: range(cores))
            seconds = build_seconds(pin, narrowed)
            assert max(longest, least) <= seconds <= least + longest
            assert build_seconds(pin, chosen.target) == seconds * (2 if pin.build.compiler == "nvcc" else 1)


def test_costs_are_what_was_measured() -> None:
    """What a recipe says of a core's seconds and of memory is what the builds that the evidence holds have taken.

    A core that shares its arithmetic takes up to about twice as long: 147 to 325 s for deepspeed. On a slow machine, on
    which three or four processes shared two cores, all took longer: 2.1 to 3.75 times what the recipes say.
    """
    catalogue = Catalogue()
    count = 0
    for path in (catalogue.root / "smoke_tests" / "evidence").rglob("*.json"):
        packages = json.loads(path.read_text()).get("packages")
        if not isinstance(packages, dict):  # evidence of mutants or training
            continue
        held = {pin.label: pin for pin in plan(catalogue, path.stem.partition("--")[0]).pins}
        for name, row in packages.items():
            built, pin = row["built_with"], held.get(f"{name} {row['release']}")
            if "cpu_seconds" in built and pin:  # an older stack may have other costs
                count += 1
                estimate = pin.build.core_seconds * len(built.get("sm", [""]))
                assert 1 / 1.5 < built["cpu_seconds"] / estimate < 4, (path.name, name)
                assert built["peak_mib_per_process"] <= pin.build.mib_per_job, (path.name, name)
    assert count > 20


WHEELS = {
    "another package": ("tinywhale-1.0-py3-none-any.whl", "is a wheel of tinywhale 1.0"),
    "another version": ("tinywheel-1.1-py3-none-any.whl", "is a wheel of tinywheel 1.1"),
    "another Python": ("tinywheel-1.0-cp39-cp39-manylinux_2_28_x86_64.whl", "does not fit target tiny (Python 3."),
    "another system": ("tinywheel-1.0-cp311-cp311-win_amd64.whl", "does not fit target tiny"),
    "another machine": ("tinywheel-1.0-py3-none-manylinux_2_28_aarch64.whl", "x86-64"),
    "a newer C library": ("tinywheel-1.0-py3-none-manylinux_2_29_x86_64.whl", "glibc 2.28"),
    "no wheel": ("tinywheel-1.0.whl", "is not the name of a wheel"),
}


@pytest.mark.parametrize("case", WHEELS)
def test_a_wheel_that_its_name_rules_out_is_refused(tiny: Tiny, case: str) -> None:
    file, named = WHEELS[case]
    tiny.edit(tiny.recipe("tinywheel"), "tinywheel-1.0-py3-none-any.whl", file)
    tiny.refuse("plan", "tiny", naming=("recipes/packages/tinywheel.toml", file, named))


@pytest.mark.parametrize(
    "name", [f"tinywheel-1.0-{tags}.whl" for tags in ("py3-none-manylinux_2_28_x86_64", "py2.py3-none-any")]
)
def test_a_wheel_that_fits_is_planned(tiny: Tiny, name: str) -> None:
    tiny.edit(tiny.recipe("tinywheel"), "tinywheel-1.0-py3-none-any.whl", name)
    tiny.succeed("plan", "tiny")


@pytest.mark.parametrize("verb", ["plan", "build"])
@pytest.mark.parametrize(
    ("required", "named"),
    [
        ("tinydep>=2", "has tinydep 1.0, and tinywheel 1.0 needs tinydep>=2"),
        ("other", "has no other, and tinywheel 1.0"),
    ],
)
def test_a_lock_that_does_not_fit_a_recipe_is_refused(tiny: Tiny, verb: str, required: str, named: str) -> None:
    tiny.edit(tiny.recipe("tinywheel"), "requires = []", f'requires = ["{required}"]')
    tiny.refuse(verb, "tiny", naming=("recipes/lock/tiny.txt", named, "nox -s lock -- tiny"))


@pytest.mark.parametrize("verb", ["plan", "build"])
def test_a_lock_that_was_written_for_other_inputs_is_refused(tiny: Tiny, verb: str) -> None:
    """Also where each requirement happens to be met, since a new lock could differ."""
    tiny.succeed("plan", "tiny")
    tiny.edit(tiny.recipe("tinywheel"), "requires = []", 'requires = ["tinydep>=1"]')
    tiny.refuse(verb, "tiny", naming=("recipes/lock/tiny.txt is out of date", "`# inputs:`", "nox -s lock -- tiny"))
    tiny.renew_inputs()
    tiny.succeed("plan", "tiny")
