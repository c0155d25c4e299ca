"""A drafted recipe holds what the index has, a drafted target what another has; what they lack is told at once."""

from __future__ import annotations

import re
import shlex
import textwrap
import zipfile
from pathlib import Path

import pytest

from recipes.catalogue.load import Catalogue
from recipes.files import ROOT, read_text, sha256_of
from recipes.make import draft
from recipes.tests.conftest import Index, Tiny, sdist, wheel

METADATA = (
    "Metadata-Version: 2.2\nName: fresh\nVersion: 2.0\nSummary: A \u201cfresh\u201d one\nRequires-Python: >=3.9\n"
)


def tagged(tiny: Tiny, tags: str, version: str = "2.0", **metadata: str) -> Path:
    """Put a wheel of `fresh` with these tags on the shelf, with more lines in its metadata."""
    made = wheel(tiny.shelf, "fresh", ("torch>=2.1,<3", "tinydep", "extra; extra == 'more'"), version=version)
    more = "".join(f"{key.replace('_', '-')}: {value}\n" for key, value in metadata.items())
    with zipfile.ZipFile(made) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    named = f"fresh-{version}.dist-info/METADATA"
    files[named] = files[named].replace(b"Name: ", f"{more}Name: ".encode())
    final = made.with_name(f"fresh-{version}-{tags}.whl")
    with zipfile.ZipFile(final, "w") as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name), data)
    if final != made:
        made.unlink()
    return final


def test_a_wheel_says_nearly_all_of_its_recipe(tiny: Tiny, index: Index) -> None:
    made = tagged(tiny, "py3-none-any", Summary="A “fresh” one", Requires_Python=">=3.9")
    output = tiny.succeed("new-package", "Fresh==2.0")
    package = Catalogue(tiny.root).packages["fresh"]
    (release,) = package.release
    assert (package.module, package.summary, package.build) == ("fresh", "A “fresh” one", None)
    assert (release.kind, release.file, release.sha256) == ("wheel", made.name, sha256_of(made))
    assert (release.python, release.torch) == (">=3.9", "<3,>=2.1")
    assert release.requires == ["torch<3,>=2.1", "tinydep"]
    assert (release.mib.download, release.mib.installed) == (1, 1)
    assert "add where it needs them: cuda" in output and "add to" not in output
    tiny.targets.write_text(tiny.targets.read_text() + 'fresh = "2.0"\n')
    # Its recipe is complete, so `plan` goes on to the lock.
    tiny.refuse("plan", "tiny", naming=("tiny.txt has no torch", "fresh 2.0 needs torch<3,>=2.1", "nox -s lock"))


@pytest.mark.parametrize(
    ("tags", "python"),
    [("cp311-cp311-manylinux_2_17_x86_64", "==3.11.*"), ("cp38-abi3-manylinux1_x86_64", ">=3.8,>=3.9")],
)
def test_the_tags_of_a_wheel_bound_its_python(tiny: Tiny, index: Index, tags: str, python: str) -> None:
    tagged(tiny, tags, Summary="x", Requires_Python=">=3.9")
    tiny.succeed("new-package", "fresh==2.0")  # for the target cpu, which has Python 3.11
    (release,) = Catalogue(tiny.root).packages["fresh"].release
    assert release.python == python


def test_the_wheel_is_the_one_for_the_named_target(tiny: Tiny, index: Index) -> None:
    for minor in (8, 11, 12):
        tagged(tiny, f"cp3{minor}-cp3{minor}-manylinux_2_17_x86_64", Summary="x")
    tiny.succeed("new-package", "fresh==2.0", "--target", "ngc-23.04")
    (release,) = Catalogue(tiny.root).packages["fresh"].release
    assert release.file == "fresh-2.0-cp38-cp38-manylinux_2_17_x86_64.whl" and release.python == "==3.8.*"


def test_what_a_source_cannot_say_is_told_at_once_and_named_so_by_a_refusal(tiny: Tiny, index: Index) -> None:
    pyproject = '[build-system]\nrequires = ["setuptools>=61", "ninja", "torch"]\n'
    files = {"PKG-INFO": METADATA + "Dynamic: Requires-Dist\n", "pyproject.toml": pyproject, "a.cu": "", "b.cpp": ""}
    made = sdist(tiny.shelf / "fresh-2.0.tar.gz", files)
    output = tiny.succeed("new-package", "fresh==2.0")
    text = tiny.recipe("fresh").read_text()
    assert 'requires = ["setuptools>=61", "ninja"]\nneeds = ["torch"]\ncompiler = "nvcc"\n' in text
    assert f'kind = "source"\nfile = "fresh-2.0.tar.gz"\nsha256 = "{made}"\npython = ">=3.9"\n' in text
    missing = ["module", "build.core_seconds", "build.mib_per_job", "release[0].requires", "release[0].mib.installed"]
    assert f"{tiny.recipe('fresh')}: {', '.join(missing)}" in output and "no wheel for Python 3.11" in output
    refused = tiny.refuse("plan", "tiny", naming=("fresh.toml", "are missing: add them"))
    assert all(key in refused for key in missing)


def test_a_source_is_taken_where_it_is_asked_for(tiny: Tiny, index: Index) -> None:
    tagged(tiny, "py3-none-any")
    sdist(tiny.shelf / "fresh-2.0.tar.gz", {"PKG-INFO": METADATA})
    tiny.succeed("new-package", "fresh==2.0", "--source")
    assert 'compiler = "none"' in tiny.recipe("fresh").read_text()


BAD = {
    "no version": ("fresh", ("PACKAGE==VERSION",)),
    "one that nobody published": ("fresh==9.0", ("fresh has no release 9.0", "the newest is 2.0")),
    "a package that nobody published": ("frsh==2.0", ("frsh has no file on pip's configured index",)),
    "a recipe that is there": ("tinywheel==1.0", ("tinywheel.toml is there already", "nox -s bump")),
    "neither wheel nor sdist": ("fresh==1.0", ("fresh 1.0 has no sdist and no wheel for Python 3.11", "--target")),
    "no sdist": ("fresh==2.0 --source", ("fresh 2.0 has no sdist: choose another version",)),
    "unknown target": ("fresh==2.0 --target cqu", ("no target 'cqu'", "did you mean 'cpu'")),
    "another package's file": ("other==1.0", ("calls itself fresh", "check the name")),
    "damaged pyproject": ("broken==1.0", ("broken-1.0.tar.gz", "pyproject.toml cannot be read", "by hand")),
}


@pytest.mark.parametrize("case", BAD)
def test_a_recipe_that_cannot_be_begun_is_refused(tiny: Tiny, index: Index, case: str) -> None:
    words, naming = BAD[case]
    tagged(tiny, "cp38-cp38-manylinux_2_17_x86_64", version="1.0")
    tagged(tiny, "py3-none-any").rename(tiny.shelf / "fresh-2.0-py3-none-any.whl")
    sdist(tiny.shelf / "other-1.0.tar.gz", {"PKG-INFO": METADATA})
    sdist(tiny.shelf / "broken-1.0.tar.gz", {"pyproject.toml": "x = ["})
    before = sorted(tiny.recipe("x").parent.iterdir())
    done = tiny.refuse("new-package", *words.split(), naming=naming)
    assert "Traceback" not in done and before == sorted(tiny.recipe("x").parent.iterdir())


@pytest.mark.parametrize(("code", "suspect"), [(404, "its name"), (403, "the network")])
def test_a_package_that_the_index_lacks_is_no_fault_of_the_network(
    tiny: Tiny, index: Index, code: int, suspect: str
) -> None:
    index.faults["frsh"] = lambda handler, _: handler.send_error(code)
    tiny.refuse("new-package", "frsh==2.0", naming=(f"({code})", f": check {suspect} and `pip config list`."))


def test_a_target_like_another_one(tiny: Tiny) -> None:
    output = tiny.succeed("new-target", "cpu-2", "--like", "cpu", "--without", "torchao", "--reason", 'a "new" one')
    before, now = Catalogue(tiny.root).targets["cpu"], Catalogue(tiny.root).targets["cpu-2"]
    assert now.reason == 'a "new" one' and not now.publish and now.runner is None
    assert now.packages == {name: version for name, version in before.packages.items() if name != "torchao"}
    assert (now.base, now.python, now.sm) == (before.base, before.python, before.sm)
    assert "add to" not in output and "nox -s lock -- cpu-2" in output


def test_the_page_shows_the_target_that_the_command_writes() -> None:
    """Without the bounds of layers, which hold the packages that it leaves out."""
    page = (ROOT / "docs" / "extend" / "target.md").read_text(encoding="utf-8")
    words = shlex.split(re.findall(r"^    nox -s new-target -- (.*)$", page, re.MULTILINE)[0])
    whole = read_text(ROOT / "recipes" / "targets.toml")
    written = draft._copied(whole, words[0], "cpu", ["torchao", "deepspeed"], words[-1])
    assert textwrap.indent(written, "    ") in page and "layers" not in written


@pytest.mark.parametrize("name", Catalogue().targets)
def test_every_target_can_be_copied(tiny: Tiny, name: str) -> None:
    tiny.succeed("new-target", "a.new.one", "--like", name, "--reason", "x")
    before, now = Catalogue(tiny.root).targets[name], Catalogue(tiny.root).targets["a.new.one"]
    apart = {"name", "reason", "publish", "unpublished", "runner"}
    assert now.model_dump(exclude=apart) == before.model_dump(exclude=apart)


def test_what_a_target_lacks_is_told(tiny: Tiny) -> None:
    assert f"add to {tiny.targets}: cpu-2.reason" in tiny.succeed("new-target", "cpu-2", "--like", "cpu")
    tiny.refuse("plan", "cpu-2", naming=("cpu-2.reason is missing",))


def test_all_keys_that_a_target_lacks_are_named_at_once(tiny: Tiny) -> None:
    tiny.targets.write_text(tiny.targets.read_text() + '\n[bare]\npython = "3.11"\n')
    tiny.refuse("plan", "bare", naming=("bare.reason, bare.cuda, bare.glibc, bare.sm", "bare.packages are missing"))


def test_a_target_cannot_have_the_name_of_another_folder(tiny: Tiny) -> None:
    tiny.targets.write_text(tiny.targets.read_text().replace("cpu", "claims"))
    tiny.refuse("plan", "claims", naming=("claims.name", "something other than a target", "choose another name"))


@pytest.mark.parametrize(
    ("words", "naming"),
    [
        (("cpu", "--like", "tiny"), ("a target cpu already", "another name")),
        (("tool", "--like", "cpu"), ("something other than a target", "another name")),
        (("cpu-2", "--like", "cqu"), ("no target 'cqu'",)),
        (("cpu-2", "--like", "cpu", "--without", "torcha"), ("no such package", "did you mean 'torch")),
        (("a b", "--like", "cpu", "--reason", "x"), ("a b.name", "does not match")),
        (("-", "--like", "cpu", "--reason", "x"), ("-.name", "does not match")),
    ],
)
def test_a_target_that_cannot_be_begun_is_refused(tiny: Tiny, words: tuple[str, ...], naming: tuple[str, ...]) -> None:
    before = tiny.targets.read_text()
    tiny.refuse("new-target", *words, naming=naming)
    assert tiny.targets.read_text() == before
