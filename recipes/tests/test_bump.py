"""A bump finds the release, writes recipe, pin and lock or nothing, and says what becomes of each patch."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from recipes.catalogue.load import Catalogue
from recipes.tests.conftest import PATCH, SOURCE, Checkout, Tiny, sdist, wheel
from recipes.tests.upstream import Upstream

NEXT = {name: text.replace("1.0", "1.1") for name, text in SOURCE.items()}
INFO = "Metadata-Version: 2.2\nName: tinypkg\nVersion: 1.1\nRequires-Python: >=3.9\nRequires-Dist: tinydep>=1\n"


def publish(tiny: Tiny, module: str = SOURCE["tinypkg.py"], **files: str) -> str:
    """Put tinypkg 1.1 on the shelf, with that module, and return its sha256."""
    return sdist(tiny.shelf / "tinypkg-1.1.tar.gz", {**NEXT, "PKG-INFO": INFO, "tinypkg.py": module, **files})


@pytest.fixture
def bumpable(tiny: Tiny) -> Tiny:
    """`tiny` without the build requirements of smoke tests, which the shelf does not have."""
    text = (tiny.root / "pyproject.toml").read_text()
    (tiny.root / "pyproject.toml").write_text(re.sub(r"^smoke = .*$", "smoke = []", text, flags=re.MULTILINE))
    (tiny.root / "README.md").touch()
    return tiny


def test_a_bump_writes_release_pin_and_lock(bumpable: Tiny) -> None:
    sha256 = publish(bumpable)
    output = bumpable.succeed("bump", "tiny", "tinypkg==1.1")
    (release,) = Catalogue(bumpable.root).packages["tinypkg"].release
    assert (release.version, release.sha256, release.requires) == ("1.1", sha256, ["tinydep>=1"])
    assert bumpable.declared.packages["tinypkg"] == "1.1"
    assert "tinypkg 1.0" in output and "no target has it now" in output
    lock = (bumpable.root / "recipes" / "lock" / "tiny.txt").read_text()
    assert re.search(r"^tinydep==1.0 --hash=sha256:[0-9a-f]{64}", lock, re.MULTILINE)
    assert "value is 1" not in bumpable.succeed("plan", "tiny")


STANDINGS = {
    "it fits, and nobody proved it there": (SOURCE["tinypkg.py"], PATCH, "fits: widen X-Applies-To to 1.1"),
    "it is proved there": (SOURCE["tinypkg.py"], PATCH.replace("==1.0", ">=1.0,<2"), "stays"),
    "upstream has its change": (SOURCE["tinypkg.py"].replace("1", "2"), PATCH, "retires: its change is in this"),
    "upstream says since when": (
        SOURCE["tinypkg.py"], PATCH.replace("Origin:", "Applied-Upstream: 1.1, otherwise\nOrigin:"),
        "retires: upstream since 1.1",
    ),
    "the text moved": ('"""Tiny."""\n\n\n\n\nvalue = 1\n', PATCH, "renew it: "),
    "the text changed": ('"""Tiny."""\n\nvalue = 7\n', PATCH, "renew it: "),
    "its lines are not known": (
        SOURCE["tinypkg.py"], PATCH.replace("==1.0", ">=1.0,<2\nX-Lines: 1.0 2"), "fits: add 1.1 to X-Lines",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", STANDINGS)
def test_a_bump_says_what_becomes_of_a_patch(bumpable: Tiny, case: str) -> None:
    module, text, expected = STANDINGS[case]
    publish(bumpable, module)
    path = bumpable.root / "patches" / "tinypkg" / "0001-say-two.patch"
    path.write_text(text)
    output = bumpable.succeed("bump", "tiny", "tinypkg==1.1")
    assert f"patches/tinypkg/0001-say-two.patch: {expected}" in " ".join(output.split())


def test_a_file_that_is_gone_is_named(bumpable: Tiny) -> None:
    publish(bumpable)
    patch = bumpable.root / "patches" / "tinypkg" / "0001-say-two.patch"
    patch.write_text(PATCH.replace("tinypkg.py", "other.py"))
    assert "other.py is gone in 1.1" in bumpable.succeed("bump", "tiny", "tinypkg==1.1")


def test_a_wheel_is_bumped_too(bumpable: Tiny) -> None:
    wheel(bumpable.shelf, "tinywheel", ("tinydep", "extra; extra == 'more'"), version="1.1")
    bumpable.succeed("bump", "tiny", "tinywheel==1.1")
    (release,) = Catalogue(bumpable.root).packages["tinywheel"].release
    assert (release.kind, release.file, release.requires) == ("wheel", "tinywheel-1.1-py3-none-any.whl", ["tinydep"])


def test_a_git_source_is_bumped_to_its_tag_and_submodules(bumpable: Tiny, tmp_path: Path) -> None:
    upstream = Upstream(tmp_path / "upstream", bumpable)
    inner = upstream.commit("inner", {"inner.txt": "inner\n"})
    modules = '[submodule "x"]\n\tpath = vendor/extra\n\turl = {}\n'
    extra = upstream.commit("extra", {".gitmodules": modules.format("../inner.git")}, submodule=inner)
    files = {".gitmodules": modules.format(f"{upstream.URL}extra.git"), "new.txt": ""}
    commit = upstream.commit("tinypkg", files, submodule=extra)
    upstream.git("tinypkg", "tag", "--annotate", "--message", "x", "v1.1")
    output = bumpable.succeed("bump", "tiny", "tinypkg==1.1")
    (release,) = Catalogue(bumpable.root).packages["tinypkg"].release
    assert (release.commit, release.tag) == (commit, "v1.1")
    assert [(submodule.path, submodule.repository, submodule.commit) for submodule in release.submodules] == [
        ("vendor/extra", f"{upstream.URL}extra", extra),
        ("vendor/extra/vendor/extra", f"{upstream.URL}inner", inner),
    ]
    assert "requires was taken over" in output
    bumpable.succeed("fetch", "tiny")


BAD = {
    "unknown package": ("tinypgk==1.1", ("has no tinypgk", "choose one of")),
    "no version": ("tinypkg", ("PACKAGE==VERSION",)),
    "the same": ("tinypkg==1.0", ("already has tinypkg 1.0",)),
    "nobody published it": ("tinypkg==9.9", ("tinypkg has no release 9.9", "the newest is 1.0", "correct it")),
    "nobody published the wheel": ("tinywheel==9.9", ("tinywheel has no release 9.9", "the newest is 1.0")),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bump_that_cannot_be_changes_nothing(bumpable: Tiny, case: str) -> None:
    pin, naming = BAD[case]
    before = {path: path.read_bytes() for path in (bumpable.root / "recipes").rglob("*.t*") if path.is_file()}
    bumpable.refuse("bump", "tiny", pin, naming=naming)
    assert before == {path: path.read_bytes() for path in before}


def test_a_bump_without_a_target_says_how_to_write_it(checkout: Checkout) -> None:
    checkout.refuse("bump", "torchao==0.16.0", naming=("write `nox -s bump -- TARGET torchao==0.16.0`",))
    checkout.refuse("bump", naming=("write `nox -s bump -- TARGET PACKAGE==VERSION`", "--bases"))


def test_a_bump_that_breaks_a_limit_is_refused(bumpable: Tiny) -> None:
    bumpable.refuse("bump", "cpu", "torchao==0.16.0", naming=("torchao 0.16.0 needs torch", "https://"))


def test_a_bump_whose_lock_fails_puts_everything_back(bumpable: Tiny) -> None:
    publish(bumpable, **{"PKG-INFO": INFO.replace("tinydep>=1", "tinydep>=2")})
    before = {path: path.read_bytes() for path in (bumpable.root / "recipes").rglob("*.t*") if path.is_file()}
    bumpable.refuse("bump", "tiny", "tinypkg==1.1", naming=("do not resolve", "tinydep>=2"))
    assert before == {path: path.read_bytes() for path in before}


def test_a_recipe_or_target_with_inline_tables_is_named(bumpable: Tiny) -> None:
    publish(bumpable)
    recipe, text = bumpable.recipe("tinywheel"), bumpable.recipe("tinywheel").read_text()
    head, _, table = text.partition("[[release]]\n")
    wheel(bumpable.shelf, "tinywheel", version="1.1")
    recipe.write_text(f"{head}release = [{{ {', '.join(table.strip().splitlines())} }}]\n")
    bumpable.refuse("bump", "tiny", "tinywheel==1.1", naming=(str(recipe), "has no line [[release]]"))
    targets = bumpable.targets.read_text()
    pins = '[tiny.packages]\ntinypkg = "1.0"\ntinywheel = "1.0"\n'
    inline = 'packages = { tinypkg = "1.0", tinywheel = "1.0" }\n'
    bumpable.targets.write_text(targets.replace(pins, "").replace("[tiny]\n", f"[tiny]\n{inline}"))
    bumpable.refuse("bump", "tiny", "tinypkg==1.1", naming=("targets.toml", "has no line", "change the pin by hand"))
