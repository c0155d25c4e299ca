"""A lock holds what the packages' requirements resolve to, and knows what it was resolved from."""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace

import pytest
from packaging.utils import canonicalize_name

from recipes.catalogue.load import Catalogue
from recipes.catalogue.plan import plan
from recipes.errors import Refusal
from recipes.files import ROOT
from recipes.make import resolve
from recipes.tests.conftest import Tiny, wheel


def test_requirements_leave_out_the_target_s_own_packages() -> None:
    chosen = plan(Catalogue(), "cpu")
    names = resolve.requirements(chosen)
    assert not any(name.startswith(("torch", "transformers", "deepspeed")) for name in names)
    assert {"pip", "pytest", "numpy>=1.17", "wheel", "py-cpuinfo"} <= set(names)  # to build, to test, to run


def test_what_a_package_s_metadata_leaves_out_is_locked_too() -> None:
    chosen = plan(Catalogue(), "cu13.2-torch2.15")
    assert "cuda-toolkit[curand]" in resolve.requirements(chosen)


def test_what_a_target_requires_is_locked_beside_its_packages() -> None:
    chosen = plan(Catalogue(), "cu13.0-torch2.11")
    assert "tokenizers" in resolve.requirements(chosen)
    resolve.check(chosen)
    more = replace(chosen, target=chosen.target.model_copy(update={"requires": ["tokenizers>=99"]}))
    with pytest.raises(Refusal, match=r"has tokenizers \S+, and target cu13.0-torch2.11 needs tokenizers>=99: write"):
        resolve.check(more)


def test_the_inputs_follow_python_and_the_c_library() -> None:
    chosen = plan(Catalogue(), "cpu")
    older = chosen.target.model_copy(update={"glibc": "2.17"})
    assert resolve.inputs(chosen) != resolve.inputs(
        type(chosen)(chosen.root, older, chosen.pins, chosen.patches, chosen.lock)
    )


def test_the_lock_of_the_tool_is_current_and_whole() -> None:
    """In an image, the tool's own environment is made of files with these hashes alone."""
    text = (ROOT / "recipes" / "lock" / "tool.txt").read_text()
    assert f"# inputs: {resolve.tool_inputs(ROOT)}\n" in text
    locked = {
        str(canonicalize_name(match[1])): (match[2], match[3].count("--hash=sha256:"))
        for match in re.finditer(r"^([\w.-]+)==(\S+) ((?:\\\n    \S+ ?)+)", text, re.MULTILINE)
    }
    assert len(locked) == len(re.findall(r"^[\w.-]+==", text, re.MULTILINE)) and all(n for _, n in locked.values())
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    for name, _, version in (pin.partition("==") for pin in [*groups["tool"], *groups["image"]]):
        assert locked[canonicalize_name(name)][0] == version
    assert "--require-hashes" in (ROOT / "docker" / "tool.sh").read_text()


def test_an_index_that_is_not_reached_is_no_fault_of_a_recipe(tiny: Tiny) -> None:
    tiny.variables.pop("PIP_NO_INDEX")
    tiny.variables.pop("PIP_FIND_LINKS")
    naming = ("tiny: pip's configured index cannot be reached", "check the network and `pip config list`")
    tiny.refuse("lock", "tiny", naming=naming, PIP_INDEX_URL="http://127.0.0.1:9/simple", UV_HTTP_RETRIES="0")


def test_a_lock_keeps_its_versions_until_it_is_upgraded(tiny: Tiny) -> None:
    """A new requirement moves nothing else: other packages of the target were proved with what the lock has."""
    project = tiny.root / "pyproject.toml"
    project.write_text(re.sub(r"^smoke = .*$", 'smoke = ["tinynew"]', project.read_text(), flags=re.MULTILINE))
    for name, version in (("tinydep", "1.1"), ("tinynew", "1.0")):
        wheel(tiny.shelf, name, version=version)
    lock = tiny.root / "recipes" / "lock" / "tiny.txt"
    tiny.succeed("lock", "tiny")
    assert re.findall(r"^(tiny\w+)==(\S+)", lock.read_text(), re.MULTILINE) == [("tinydep", "1.0"), ("tinynew", "1.0")]
    tiny.succeed("lock", "tiny", "--upgrade")
    assert re.findall(r"^tinydep==(\S+)", lock.read_text(), re.MULTILINE) == ["1.1"]
    recipe = tiny.recipe("tinypkg")
    recipe.write_text(recipe.read_text().replace('requires = ["tinydep"]', 'requires = ["tinydep<1.1"]'))
    tiny.succeed("lock", "tiny")  # what no longer fits moves
    assert re.findall(r"^tinydep==(\S+)", lock.read_text(), re.MULTILINE) == ["1.0"]
