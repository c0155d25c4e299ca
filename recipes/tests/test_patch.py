"""Patches are read strictly, selected by the target's versions, and applied exactly or not at all."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from recipes import patch
from recipes.model import Catalogue, Refusal

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
    before = patch.tree_hash(tree)
    patch.apply_all([patch.read(written(tmp_path, HEADER + DIFF))], tree)
    assert (tree / "pkg" / "code.py").read_text() == SOURCE.replace("line 10", "LINE 10")
    assert patch.tree_hash(tree) != before


@pytest.mark.parametrize(
    ("source", "diff", "said"),
    [
        ("first\n" + SOURCE, DIFF, "away from its place"),
        (SOURCE.replace("line 9", "line IX"), DIFF, "does not apply"),
        (SOURCE.replace("line 10", "LINE 10"), DIFF, "is already in"),
        (SOURCE, DIFF.replace("code.py", "gone.py"), "gone.py"),
        (SOURCE, DIFF.replace("/pkg/code.py", "/../outside.py"), "does not apply"),
        (SOURCE.replace("\n", "\r\n"), DIFF, "does not apply"),
    ],
    ids=["offset", "fuzz", "already upstream", "no such file", "outside the tree", "source with CRLF"],
)
def test_anything_but_an_exact_fit_is_refused(tmp_path: Path, tree: Path, source: str, diff: str, said: str) -> None:
    (tree / "pkg" / "code.py").write_text(source, newline="")
    with pytest.raises(Refusal, match=said):
        patch.apply_all([patch.read(written(tmp_path, HEADER + diff))], tree)


def test_a_tree_inside_a_git_repository_is_patched_all_the_same(tmp_path: Path, tree: Path) -> None:
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    patch.apply_all([patch.read(written(tmp_path, HEADER + DIFF))], tree)
    assert "LINE 10" in (tree / "pkg" / "code.py").read_text()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (HEADER, "holds no diff"),
        ("", "has no Description"),
        (DIFF, "has no Description"),
        (HEADER.replace("Origin: vendor\n", "") + DIFF, "has no Origin"),
        (HEADER.replace("==1.0", "one point oh") + DIFF, "X-Applies-To"),
    ],
    ids=["empty", "nothing", "no header", "a field is missing", "no range"],
)
def test_a_file_that_is_no_patch_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(Refusal, match=said):
        patch.read(written(tmp_path, text))


def test_a_patch_with_crlf_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, HEADER + DIFF)
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    with pytest.raises(Refusal, match="CRLF"):
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
    seen = {patch.tree_hash(tree)}
    code.chmod(0o755)
    seen.add(patch.tree_hash(tree))
    code.write_text("other\n")
    seen.add(patch.tree_hash(tree))
    code.rename(code.with_name("renamed.py"))
    seen.add(patch.tree_hash(tree))
    assert len(seen) == 4
