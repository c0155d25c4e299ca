"""An environment holds exactly the pinned wheels, describes itself, and is replaced when a pin changes."""

from __future__ import annotations

import hashlib
import json

from recipes.tests.conftest import Tiny


def test_it_describes_itself(tiny: Tiny) -> None:
    tiny.succeed("build", "tiny")
    folder = tiny.root / "build" / "tiny" / "env" / "fusebox"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert list(manifest["packages"]) == ["tinypkg", "tinywheel"]
    for name, package in manifest["packages"].items():
        record = (folder / f"{name}.RECORD").read_bytes()
        assert hashlib.sha256(record).hexdigest() == package["record_sha256"]


def test_it_holds_the_lock_and_the_packages_and_nothing_else(tiny: Tiny) -> None:
    tiny.succeed("build", "tiny")
    listing = tiny.succeed("shell", "tiny", "--", "python", "-m", "pip", "list", "--format=freeze")
    assert {line.split("==")[0] for line in listing.splitlines() if "==" in line} == {
        "pip",
        "tinydep",
        "tinypkg",
        "tinywheel",
    }


def test_a_changed_pin_replaces_it(tiny: Tiny) -> None:
    tiny.succeed("build", "tiny")
    tiny.edit(tiny.root / "patches" / "tinypkg" / "0001-say-two.patch", "+value = 2", "+value = 3")
    tiny.succeed("build", "tiny")
    value = tiny.succeed("shell", "tiny", "--", "python", "-c", "import tinypkg; print(tinypkg.value)")
    assert value.strip().endswith("3")


def test_an_unmet_requirement_is_refused(tiny: Tiny) -> None:
    lock = tiny.root / "recipes" / "lock" / "tiny.txt"
    lock.write_text("".join(line for line in lock.read_text().splitlines(keepends=True) if "tinydep" not in line))
    assert "tinydep" in tiny.refuse("build", "tiny")
    assert not (tiny.root / "build" / "tiny" / "env").exists()


def test_nothing_of_the_caller_s_python_gets_in(tiny: Tiny) -> None:
    (tiny.root / "intruder").mkdir()
    (tiny.root / "intruder" / "tinypkg.py").write_text("value = 99\n")
    script = "import tinypkg; print(tinypkg.value)"
    value = tiny.succeed("shell", "tiny", "--", "python", "-c", script, PYTHONPATH=str(tiny.root / "intruder"))
    assert value.strip().endswith("2")
