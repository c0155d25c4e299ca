"""A wheel is patched by an archive that differs in the patched files and RECORD only; a RECORD that lies is refused."""

from __future__ import annotations

import csv
import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recipes.errors import Refusal
from recipes.files import sha256_of
from recipes.make import wheel
from recipes.tests.conftest import PATCH, Tiny, entry

FILES = {
    "pkg/__init__.py": b"",
    "pkg/code.py": b"value = 1\n" * 999,
    "pkg/data.bin": bytes(range(256)) * 999,
    'pkg/a,"b".txt': b"a name to be quoted",
    "pkg-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: pkg\nVersion: 1.0\n",
}
RECORD = "pkg-1.0.dist-info/RECORD"


def archive(path: Path, edit: Callable[[str], str] = lambda record: record) -> Path:
    """A wheel as publishers make them: a folder's entry, dates and modes of their own, RECORD in the middle."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerows([name, *entry(data).split(",")] for name, data in FILES.items())
    rows.writerow([RECORD, "", ""])
    files = {"pkg/": b"", **FILES}
    files = dict([*list(files.items())[:3], (RECORD, edit(text.getvalue()).encode()), *list(files.items())[3:]])
    with zipfile.ZipFile(path, "w") as made:
        for day, (name, data) in enumerate(files.items(), 1):
            info = zipfile.ZipInfo(name, (2022, 8, day, 9, 52, 50))
            info.external_attr = (0o40755 if name.endswith("/") else 0o100755 if day % 2 else 0o100644) << 16
            info.compress_type = zipfile.ZIP_STORED if name.endswith("/") else zipfile.ZIP_DEFLATED
            made.writestr(info, data)
    return path


def repacked(tmp_path: Path, came: Path, text: bytes = b"value = 2\n") -> Path:
    tree = tmp_path / "tree"
    wheel.extract(came, ["pkg/code.py"], tree)
    assert [path.name for path in tree.rglob("*") if path.is_file()] == ["code.py"]
    (tree / "pkg" / "code.py").write_bytes(text)
    wheel.repack(came, tree, ["pkg/code.py"], tmp_path / "made.whl")
    return tmp_path / "made.whl"


def test_only_the_changed_file_and_record_differ(tmp_path: Path) -> None:
    came = archive(tmp_path / "pkg-1.0-py3-none-any.whl")
    with zipfile.ZipFile(came) as old, zipfile.ZipFile(repacked(tmp_path, came)) as new:
        assert new.testzip() is None
        for before, after in zip(old.infolist(), new.infolist(), strict=True):
            for name in ("filename", "date_time", "external_attr", "create_system"):
                assert getattr(before, name) == getattr(after, name)
            changed = before.filename in ("pkg/code.py", RECORD)
            assert (old.read(before) != new.read(after)) is changed
            assert changed or before.compress_size == after.compress_size
        assert new.read("pkg/code.py") == b"value = 2\n"
        assert read_record(new) == {name: entry(new.read(name)) for name in FILES} | {RECORD: ","}
        lines = zip(old.read(RECORD).splitlines(), new.read(RECORD).splitlines(), strict=True)
        assert [before.split(b",")[0] for before, after in lines if before != after] == [b"pkg/code.py"]


def read_record(opened: zipfile.ZipFile) -> dict[str, str]:
    """RECORD as name -> "hash,size"."""
    return {row[0]: ",".join(row[1:]) for row in csv.reader(io.StringIO(opened.read(RECORD).decode()))}


def test_the_same_patch_makes_the_same_bytes(tmp_path: Path) -> None:
    came = archive(tmp_path / "pkg-1.0-py3-none-any.whl")
    first = sha256_of(repacked(tmp_path, came))
    assert sha256_of(repacked(tmp_path, came)) == first != sha256_of(repacked(tmp_path, came, b"value = 3\n"))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda text: text.replace("pkg/code.py,sha256=", "pkg/code.py,sha256=x"), "RECORD says sha256=x"),
        (lambda text: text.replace(",9990\n", ",9991\n"), ",9991 of pkg/code.py, which has .*,9990"),
        (lambda text: text.replace("pkg/code.py", "pkg/kode.py"), "RECORD lacks pkg/code.py"),
        (lambda text: text + "pkg/gone.py,,\n", "lists the missing pkg/gone.py"),
        (lambda text: "", "RECORD lacks pkg-1.0.dist-info/METADATA|RECORD lacks pkg/"),
    ],
    ids=["hash", "size", "unlisted", "missing", "empty"],
)
def test_a_record_that_lies_is_refused(tmp_path: Path, edit: Callable[[str], str], message: str) -> None:
    with pytest.raises(Refusal, match=message):
        repacked(tmp_path, archive(tmp_path / "pkg-1.0-py3-none-any.whl", edit))


def test_a_file_that_the_wheel_lacks_is_refused(tmp_path: Path) -> None:
    came = archive(tmp_path / "pkg-1.0-py3-none-any.whl")
    (tmp_path / "new.py").touch()
    with pytest.raises(Refusal, match=r"has no file new\.py"):
        wheel.repack(came, tmp_path, ["new.py"], tmp_path / "made.whl")


def patched(tiny: Tiny) -> Tiny:
    """`tiny` with a patch on its wheel, too."""
    folder = tiny.root / "patches" / "tinywheel"
    folder.mkdir()
    diff = PATCH.replace("tinypkg.py", "tinywheel.py").replace("@@ -2,2 +2,2 @@\n\n", "@@ -1 +1 @@\n")
    (folder / "0001-say-two.patch").write_text(diff)
    return tiny


def records(tiny: Tiny) -> list[dict[str, Any]]:
    """The records of the repacked wheels."""
    written = [json.loads(path.read_text()) for path in tiny.cache.glob("wheels/*/wheel.json")]
    return [record for record in written if "wheel" in record["inputs"]]


def test_a_patched_wheel_is_installed_and_says_so(tiny: Tiny) -> None:
    patched(tiny).succeed("build", "tiny")
    output = tiny.succeed("shell", "tiny", "--", "python", "-c", "import tinywheel; print(tinywheel.value)")
    assert output.strip().endswith("2")
    (record,) = records(tiny)
    manifest = tiny.result()["packages"]["tinywheel"]
    assert manifest["sha256"] == record["sha256"] != record["inputs"]["wheel"]
    assert manifest["wheel"] == "tinywheel-1.0-py3-none-any.whl"
    assert manifest["patches"] == record["patches"]
    (patch,) = record["patches"]
    assert patch["file"] == "patches/tinywheel/0001-say-two.patch"
    assert list(patch["installed"]) == ["tinywheel.py"]
    times = {path: path.stat().st_mtime_ns for path in tiny.cache.glob("wheels/*/*")}
    tiny.succeed("build", "tiny")
    assert {path: path.stat().st_mtime_ns for path in tiny.cache.glob("wheels/*/*")} == times


def test_a_patched_wheel_is_the_same_in_another_cache_and_travels(tiny: Tiny, tmp_path: Path) -> None:
    patched(tiny).succeed("build", "tiny")
    first = [record["sha256"] for record in records(tiny)]
    tiny.succeed("cache", "export", tmp_path / "exported")
    for name, verb in (("second", ("cache", "import", tmp_path / "exported")), ("third", ("build", "tiny"))):
        tiny.cache = tmp_path / name / "cache"
        tiny.variables["FUSEBOX_CACHE"] = str(tiny.cache)
        tiny.succeed(*verb)
        assert [record["sha256"] for record in records(tiny)] == first


def test_a_patch_that_does_not_fit_the_wheel_is_refused(tiny: Tiny) -> None:
    patched(tiny)
    tiny.edit(tiny.root / "patches" / "tinywheel" / "0001-say-two.patch", "-value = 1", "-value = 7")
    tiny.refuse("build", "tiny", naming=("patches/tinywheel/0001-say-two.patch", "tinywheel-1.0"))
    assert not records(tiny)


def test_a_wheel_without_patches_is_installed_as_it_came(tiny: Tiny) -> None:
    tiny.succeed("build", "tiny")
    assert not records(tiny)
    came = tiny.result()["packages"]["tinywheel"]
    assert came["sha256"] == sha256_of(tiny.shelf / "tinywheel-1.0-py3-none-any.whl")
    assert came["patches"] == []
