"""Patches are read strictly, selected by the target's versions, and applied exactly or not at all."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from recipes.catalogue import patch
from recipes.catalogue.load import Catalogue
from recipes.catalogue.patch import Patch
from recipes.errors import Refusal
from recipes.make.patch import apply, apply_all, tree_hash
from recipes.tests.conftest import script

SOURCE = "".join(f"line {number}\n" for number in range(1, 21))
HEADER = """Description: Shout on line ten
Origin: vendor
Forwarded: no
Last-Update: 2026-11-21
X-Applies-To: ==1.0
---
"""
DIFF = """--- a/pkg/code.py
+++ b/pkg/code.py
@@ -9,3 +9,3 @@
 line 9
-line 10
+LINE 10
 line 11
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A source tree with one file of twenty lines."""
    code = tmp_path / "tree" / "pkg" / "code.py"
    code.parent.mkdir(parents=True)
    code.write_text(SOURCE)
    return tmp_path / "tree"


def written(tmp_path: Path, text: str, newline: str = "\n") -> Path:
    path = tmp_path / "patches" / "pkg" / "0001-shout.patch"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, newline=newline)
    return path


def test_a_patch_that_fits_changes_the_tree_and_its_hash(tmp_path: Path, tree: Path) -> None:
    before = tree_hash(tree)
    apply_all([patch.read(written(tmp_path, HEADER + DIFF))], tree)
    assert (tree / "pkg" / "code.py").read_text() == SOURCE.replace("line 10", "LINE 10")
    assert tree_hash(tree) != before


@pytest.mark.parametrize(
    ("source", "diff", "message"),
    [
        ("first\n" + SOURCE, DIFF, "only at another place"),
        (SOURCE.replace("line 9", "line IX"), DIFF, "patch failed: pkg/code.py:9"),
        (SOURCE.replace("line 10", "LINE 10"), DIFF, "is already in"),
        (SOURCE, DIFF.replace("code.py", "gone.py"), "pkg/gone.py: No such file"),
        (SOURCE.replace("\n", "\r\n"), DIFF, "has CRLF: unpack"),
    ],
    ids=["offset", "fuzz", "already upstream", "no such file", "source with CRLF"],
)
def test_anything_but_an_exact_fit_is_refused(tmp_path: Path, tree: Path, source: str, diff: str, message: str) -> None:
    (tree / "pkg" / "code.py").write_text(source, newline="")
    with pytest.raises(Refusal, match=message):
        apply_all([patch.read(written(tmp_path, HEADER + diff))], tree)


def test_the_hash_of_a_patch_is_that_of_its_diff(tmp_path: Path) -> None:
    first = patch.read(written(tmp_path, HEADER + DIFF)).sha256
    assert patch.read(written(tmp_path, HEADER.replace("Shout", "Speak up") + DIFF)).sha256 == first
    assert patch.read(written(tmp_path, HEADER + DIFF.replace("LINE", "Line"))).sha256 != first


def test_a_tree_inside_a_git_repository_is_patched_all_the_same(tmp_path: Path, tree: Path) -> None:
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    apply_all([patch.read(written(tmp_path, HEADER + DIFF))], tree)
    assert "LINE 10" in (tree / "pkg" / "code.py").read_text()


def test_a_tree_that_is_a_git_repository_is_refused(tmp_path: Path, tree: Path) -> None:
    subprocess.run(["git", "init", "--quiet", str(tree)], check=True)
    with pytest.raises(Refusal, match=r"tree is a git repository, .* export the commit without"):
        apply_all([patch.read(written(tmp_path, HEADER + DIFF))], tree)
    assert "LINE 10" not in (tree / "pkg" / "code.py").read_text()


def test_a_git_that_does_nothing_and_says_well_done_is_seen(
    tmp_path: Path, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # as git does in a repository for files outside the current folder's prefix
    idle = script(tmp_path / "bin" / "git", '#!/bin/sh\ncase "$*" in *--reverse*) exit 1;; esac\n')
    monkeypatch.setenv("PATH", str(idle.parent), prepend=os.pathsep)
    with pytest.raises(Refusal, match=r"had no effect on pkg/code.py of tree: .* git repository"):
        apply_all([patch.read(written(tmp_path, HEADER + DIFF))], tree)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEADER, "holds no diff"),
        (HEADER + DIFF.partition("@@")[0], "holds no diff"),
        (HEADER + DIFF.replace("LINE 10", "line 10"), "changes nothing"),
        (HEADER + DIFF.replace("/pkg/code.py", "/../outside.py"), "outside the tree"),
        (HEADER + DIFF.replace("b/pkg/code.py", "/dev/null"), "outside the tree"),
        ("", "has no Description"),
        (DIFF, "has no Description"),
        (HEADER.replace("Origin: vendor\n", "") + DIFF, "has no Origin"),
        (HEADER.replace("==1.0", "one point oh") + DIFF, "X-Applies-To"),
        (HEADER.replace("==1.0", "==1.0\nX-Lnes: 1.0 9") + DIFF, r"0001-shout\.patch: X-Lnes is not a known field"),
        (HEADER.replace("==1.0", "==1.0\nX-Applies-To: ==2.0") + DIFF, r"0001-shout\.patch: .* X-Applies-To twice"),
        (
            HEADER.replace("==1.0", "==1.0\nsee there\nX-Lines: 1.0 8") + DIFF,
            "'see there' in its header is not a field",
        ),
    ],
    ids=[
        "empty",
        "no hunk",
        "no effect",
        "outside the tree",
        "a file goes",
        "nothing",
        "no header",
        "a field is missing",
        "no range",
        "a mistyped field",
        "a field twice",
        "no field",
    ],
)
def test_a_file_that_is_no_patch_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(Refusal, match=message):
        patch.read(written(tmp_path, text))


def test_a_patch_with_crlf_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, HEADER + DIFF)
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    with pytest.raises(Refusal, match="CRLF"):
        patch.read(path)


def test_a_patch_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, HEADER + DIFF)
    path.write_bytes(path.read_bytes().replace(b"vendor", b"vend\xf6r"))
    with pytest.raises(Refusal, match=r"0001-shout\.patch is not UTF-8 \(byte \d+\)"):
        patch.read(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(Refusal, match=r"0001-shout\.patch cannot be read \(Is a directory\)"):
        patch.read(path)


@pytest.mark.parametrize(
    ("applies_to", "selected"),
    [
        ("==4.40.2", True),
        (">=4.41", False),
        ('==4.40.2; python_version < "3.9"', False),
        ('==4.40.2; python_version >= "3.11"', True),
    ],
)
def test_range_and_marker_select_for_the_target(tmp_path: Path, applies_to: str, selected: bool) -> None:
    read = patch.read(written(tmp_path, HEADER.replace("==1.0", applies_to) + DIFF))
    assert read.selects("4.40.2", Catalogue().target("cpu")) is selected


def test_a_marker_is_evaluated_for_the_target_s_python(tmp_path: Path) -> None:
    read = patch.read(written(tmp_path, HEADER.replace("==1.0", '==1.8.0; python_version < "3.9"') + DIFF))
    old = Catalogue().target("cpu").model_copy(update={"python": "3.8"})
    assert read.selects("1.8.0", old)


def test_the_tree_hash_sees_names_bytes_and_executable_bits(tree: Path) -> None:
    code = tree / "pkg" / "code.py"
    seen = {tree_hash(tree)}
    code.chmod(0o755)
    seen.add(tree_hash(tree))
    code.write_text("other\n")
    seen.add(tree_hash(tree))
    code.rename(code.with_name("renamed.py"))
    seen.add(tree_hash(tree))
    assert len(seen) == 4


TWICE = (
    DIFF
    + """@@ -15,3 +15,4 @@
 line 15
-line 16
+LINE 16
+LINE 16b
 line 17
--- a/pkg/other.py
+++ b/pkg/other.py
@@ -4,3 +4,3 @@
 line 4
-line 5
+LINE 5
 line 6
"""
)
RANGED = HEADER.replace("==1.0", ">=1.0,<2\nX-Lines: 1.0 9 15 4\n 1.1 10 17 6\n 1.2+local 9 15 4")


def test_hunks_are_where_x_lines_says_for_the_release(tmp_path: Path, tree: Path) -> None:
    read = patch.read(written(tmp_path, RANGED + TWICE))
    assert read.at("1.0").diff == TWICE
    assert "@@ -10,3 +10,3 @@" in read.at("1.1.0").diff  # the same version, written differently
    assert "@@ -17,3 +17,4 @@" in read.at("1.1").diff
    assert "@@ -6,3 +6,3 @@" in read.at("1.1").diff  # in another file, where no lines were added before it
    lines = SOURCE.splitlines(keepends=True)
    (tree / "pkg" / "code.py").write_text("".join(["new\n", *lines[:12], "new\n", *lines[12:]]))
    (tree / "pkg" / "other.py").write_text("new\nnew\n" + SOURCE)
    pristine = shutil.copytree(tree, tmp_path / "pristine")
    with pytest.raises(Refusal, match="only at another place"):
        apply(read.at("1.0"), tree)
    apply(read.at("1.1"), pristine)
    assert "LINE 16b" in (pristine / "pkg" / "code.py").read_text()


def test_a_new_side_is_later_by_what_earlier_hunks_added(tmp_path: Path) -> None:
    grown = DIFF.replace("+9,3", "+9,4").replace("+LINE 10\n", "+LINE 10\n+LINE 10b\n")
    text = RANGED + TWICE.replace(DIFF, grown).replace("+15,4", "+16,4")
    read = patch.read(written(tmp_path, text))
    assert read.at("1.0").diff == read.diff
    assert "@@ -17,3 +18,4 @@" in read.at("1.1").diff


@pytest.mark.parametrize("version", ["1.2", "1.3", "1.0.post1"])
def test_a_version_that_nobody_looked_at_is_refused(tmp_path: Path, version: str) -> None:
    read = patch.read(written(tmp_path, RANGED + TWICE))
    assert read.covers(version)
    with pytest.raises(Refusal, match=rf"0001-shout.patch: nobody has checked this patch on pkg {version}"):
        read.at(version)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("1.1 10 17 6", "1.1 10 17", "first line of each of 3 hunks"),
        ("1.1 10 17 6", "1.1 10 17 three", "first line of each of 3 hunks"),
        ("1.1 10 17 6", "one 10 17 6", "is not a version"),
        ("1.1 10 17 6", "1.0.0 10 17 6", "twice"),
        ("1.1 10 17 6", "2.1 10 17 6", "outside X-Applies-To"),
        ("1.0 9 15 4\n 1.1 10 17 6\n 1.2+local 9 15 4", "1.1 10 17 6", "lists for no version"),
    ],
    ids=["too few", "no number", "no version", "twice", "outside the range", "not the hunks' own"],
)
def test_x_lines_that_are_wrong_are_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in RANGED
    with pytest.raises(Refusal, match=message):
        patch.read(written(tmp_path, RANGED.replace(old, new) + TWICE))


def needing(tmp_path: Path, need: str) -> Patch:
    """A patch of another package, with that X-Needs."""
    path = tmp_path / "patches" / "other" / "0001-guard.patch"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(HEADER.replace("==1.0", f"==1.0\nX-Needs: {need}") + DIFF)
    return patch.read(path)


@pytest.mark.parametrize(
    ("torch", "pkg", "selected"), [("2.0.1", "0.9", True), ("1.12.1", "1.0", True), ("1.12.1", "0.9", False)]
)
def test_one_need_must_hold_in_the_target(tmp_path: Path, torch: str, pkg: str, selected: bool) -> None:
    written(tmp_path, HEADER + DIFF)
    packages = {"torch": torch, "pkg": pkg, "other": "1.0"}
    target = Catalogue().target("cpu").model_copy(update={"packages": packages})
    read = needing(tmp_path, "torch >=2.0,\n or patches/pkg/0001-shout.patch")
    assert read.selects("1.0", target) is selected
    alone = target.model_copy(update={"packages": {"other": "1.0"}})
    assert not read.selects("1.0", alone)


@pytest.mark.parametrize(
    ("need", "message"),
    [
        ("torch newer than 2", "is neither a requirement"),
        ("torch >=2.0, or ", "is neither a requirement"),
        ("patches/pkg/0002-gone.patch", "0002-gone.patch, which does not exist"),
        ("patches/other/0001-guard.patch", "forms a cycle"),
    ],
)
def test_a_need_that_cannot_be_read_is_refused(tmp_path: Path, need: str, message: str) -> None:
    with pytest.raises(Refusal, match=message):
        needing(tmp_path, need)
