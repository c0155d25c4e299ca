"""The data agree with each other and with the tree."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib

import pytest

from recipes.catalogue import patch
from recipes.catalogue.load import Catalogue
from recipes.catalogue.plan import Plan, plan
from recipes.files import ROOT
from recipes.make import resolve
from recipes.prove import evidence, proofs
from recipes.tests.conftest import Checkout

CATALOGUE = Catalogue()
PLANS = [plan(CATALOGUE, name) for name in CATALOGUE.targets]
for_each_plan = pytest.mark.parametrize("chosen", PLANS, ids=lambda chosen: chosen.target.name)


@for_each_plan
def test_the_lock_is_of_these_requirements(chosen: Plan) -> None:
    assert chosen.locked.inputs == resolve.inputs(chosen), f"run `nox -s lock -- {chosen.target.name}`"


def test_the_bases_of_what_is_published_are_pinned() -> None:
    assert not [planned.target.name for planned in PLANS if planned.target.publish and planned.target.base.unresolved]


def test_the_matrix_of_ci_is_what_is_published_and_where() -> None:
    command = [sys.executable, "-m", "nox", "--list", "--json", "--session", "publish"]
    listed = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout)
    matrix = {session["call_spec"]["target"]: session["tags"] for session in listed if session["name"] == "publish"}
    assert matrix == {planned.target.name: [planned.target.runner] for planned in PLANS if planned.target.publish}
    (watched,) = re.findall(r"paths: \[(.*)\]", (ROOT / ".github" / "workflows" / "images.yml").read_text())
    assert {"noxfile.py", "recipes/**"} < set(watched.split(", "))


def test_nox_is_the_same_everywhere() -> None:
    (pinned,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]["nox"]
    assert f" {pinned}\n" in (ROOT / ".ci" / "run").read_text()


def test_every_package_and_release_is_used() -> None:
    used = {
        (pin.name, pin.release.version, pin.release.sha256 or pin.release.commit)
        for planned in PLANS
        for pin in planned.pins
    }
    declared = {
        (package.name, release.version, release.sha256 or release.commit)
        for package in CATALOGUE.packages.values()
        for release in package.release
    }
    assert declared == used


def test_every_patch_is_used_or_proved_on_a_listed_release() -> None:
    """A target applies it, or its record says that it was proved on a release of its package's proved_on."""
    used = {chosen.path for planned in PLANS for patches in planned.patches.values() for chosen in patches}
    for each in patch.every(ROOT):
        listed = [source for source in CATALOGUE.packages[each.package].proved_on if each.covers(source.version)]
        entries = [proofs.entry(proofs.written(each), source) for source in listed]
        assert each.path in used or any(entry and "unproven" not in entry for entry in entries), each.name


def test_the_patch_for_python_38_goes_to_that_python_only() -> None:
    """functools.cache came with Python 3.9: ngc-23.10 would not be patched even with the same release (A06)."""
    name = "0001-cache-with-lru-cache"
    users = {
        planned.target.name: planned.target.python
        for planned in PLANS
        if name in [chosen.path.stem for chosen in planned.patches.get("transformer-engine", [])]
    }
    assert users == {"ngc-23.04": "3.8"}
    (needed,) = [each for each in patch.every(ROOT) if each.path.stem == name]
    selected = {target: needed.selects("1.8.0", CATALOGUE.targets[target]) for target in ("ngc-23.04", "ngc-23.10")}
    assert selected == {"ngc-23.04": True, "ngc-23.10": False}


def test_every_patch_has_its_proof() -> None:
    for each in patch.every(ROOT):
        assert proofs.test_of(each).exists(), f"{each.name} has no proof {proofs.test_of(each).name}"
        assert re.fullmatch(r"\d{4}(-[a-z0-9]+)+", each.path.stem)


def test_patches_of_a_package_are_numbered_without_gaps() -> None:
    for package in {each.package for each in patch.every(ROOT)}:
        numbers = [int(each.path.name[:4]) for each in patch.every(ROOT) if each.package == package]
        assert numbers == list(range(1, len(numbers) + 1))


def test_every_package_of_a_target_with_evidence_has_its_smoke_test() -> None:
    proved = [planned for planned in PLANS if evidence.promoted(ROOT, planned.target.name)]
    assert proved
    for pin in {pin.name: pin for planned in proved for pin in planned.pins}.values():
        assert (ROOT / "smoke_tests" / f"test_{pin.package.module.split('.')[0]}.py").exists(), pin.name


def test_flash_attention_is_compiled_with_ninja_and_packaging() -> None:
    """flash-attention's parts, as its guide asks; without ninja torch compiles one file after another, for hours."""
    upstream = "https://github.com/Dao-AILab/flash-attention"
    pins = {pin.label: pin for planned in PLANS for pin in planned.pins if pin.release.repository == upstream}
    compiled = [pin for pin in pins.values() if pin.build.compiler == "nvcc"]
    assert "flash-attn 2.1.0" in pins and len(compiled) >= 8
    for pin in compiled:
        assert {"ninja", "packaging"} <= set(pin.build.requires), pin.label


def test_no_package_index_is_named() -> None:
    hosts = re.compile("|".join(["py" + "pi.org", "python" + "hosted", "deb." + "debian.org", "registry." + "npmjs"]))
    for path in [
        *ROOT.glob("recipes/**/*.*"),
        *ROOT.glob("docker/*"),
        *ROOT.glob("*.*"),
        *ROOT.glob("smoke_tests/**/*.*"),
    ]:
        if path.suffix in (".py", ".toml", ".txt", ".md", ".sh", ".json", ".log"):
            assert not hosts.search(path.read_text(encoding="utf-8")), path


NEW_PACKAGE = """
module = "tiny"
summary = "A package that only this test knows"

[build]
requires = ["setuptools"]
compiler = "none"
core_seconds = 6
mib_per_job = 100

[[release]]
version = "1.0"
kind = "source"
file = "tiny-1.0.tar.gz"
sha256 = "{sha256}"
python = ">=3.8"
requires = ["packaging"]
mib = {{ download = 1, installed = 1 }}
"""


def test_a_package_and_a_target_are_data_only(checkout: Checkout) -> None:
    checkout.recipe("tiny").write_text(NEW_PACKAGE.format(sha256="0" * 64))
    declared = checkout.targets.read_text()
    table = declared.partition("[cpu]")[2].partition("[cpu.packages]")[0]
    added = f'[small]{table.replace("[cpu.", "[small.")}[small.packages]\ntiny = "1.0"\n'
    checkout.targets.write_text(f"{declared}\n{added}")
    assert "tiny 1.0" in checkout.succeed("plan", "small")
    checkout.succeed("render")
    checkout.succeed("render", "--check")
    assert re.search(r"^\| \[`small`\]\(.*\| tiny \|", (checkout.root / "README.md").read_text(), re.MULTILINE)
    section = (checkout.root / "docs" / "status" / "targets.md").read_text().partition("\n## `small`\n")[2]
    assert "\n| tiny | 1.0 | source |" in section.partition("\n## ")[0]
