"""An environment holds exactly the pinned wheels, describes itself, and is replaced when a pin changes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import uv

from recipes.catalogue.load import Catalogue
from recipes.catalogue.plan import plan
from recipes.catalogue.schema import Pin
from recipes.errors import Refusal
from recipes.files import sha256_of
from recipes.make import environment
from recipes.make.cache import Cache
from recipes.make.environment import Wheel, refuse_clashes
from recipes.progress import Steps
from recipes.tests.conftest import Tiny, wheel


def test_it_describes_itself(undisturbed: Tiny) -> None:
    folder = undisturbed.root / "build" / "tiny" / "env" / "fusebox"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert list(manifest["packages"]) == ["tinypkg", "tinywheel"]
    for name, package in manifest["packages"].items():
        record = (folder / f"{name}.RECORD").read_bytes()
        assert hashlib.sha256(record).hexdigest() == package["record_sha256"]


def test_it_holds_the_lock_and_the_packages_and_nothing_else(undisturbed: Tiny) -> None:
    listing = undisturbed.succeed("shell", "tiny", "--", "python", "-B", "-m", "pip", "list", "--format=freeze")
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


def test_two_wheels_that_bring_one_file_have_to_agree(tmp_path: Path) -> None:
    """transformer-engine and transformer-engine-cu13 do: a patch to one of them would vanish under the other."""
    paths = [
        wheel(tmp_path, "tiny", payload=b"value = %d\n" % value, version=version)
        for value, version in ((1, "1.0"), (1, "1.1"), (2, "2.0"))
    ]
    pins = [SimpleNamespace(name=f"tiny-{number}") for number in range(3)]
    wheels = [Wheel(cast(Pin, pin), path, "", {}) for pin, path in zip(pins, paths, strict=True)]
    refuse_clashes(wheels[:2])
    with pytest.raises(Refusal, match=r"tiny-0 and tiny-2 both contain tiny\.py and differ: patch both alike"):
        refuse_clashes(wheels)


def test_ready_wheels_that_differ_are_refused_before_anything_is_built(tiny: Tiny) -> None:
    other = wheel(tiny.shelf, "tinyother", more={"tinywheel.py": b"value = 3\n"})
    tiny.plant("tinyother", identity=f'file = "{other.name}"\nsha256 = "{sha256_of(other)}"')
    tiny.edit(tiny.targets, 'tinypkg = "1.0"', 'tinypkg = "1.0"\ntinyother = "1.0"')
    tiny.lock()
    tiny.refuse("build", "tiny", naming=("both contain tinywheel.py and differ",))
    assert not list(tiny.cache.glob("wheels/*")), "it was built first"


def test_a_file_where_a_folder_should_be_is_named(tiny: Tiny, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    tiny.succeed("build", "tiny")
    assert f"{file}/x" in tiny.refuse("cache", "export", str(file / "x"))
    shutil.rmtree(tiny.root / "build")
    (tiny.root / "build").touch()
    assert "is there already, or a file is where its folder should be" in tiny.refuse("build", "tiny")


def test_nothing_of_the_caller_s_python_gets_in(tiny: Tiny) -> None:
    (tiny.root / "intruder").mkdir()
    (tiny.root / "intruder" / "tinypkg.py").write_text("value = 99\n")
    script = "import tinypkg; print(tinypkg.value)"
    value = tiny.succeed("shell", "tiny", "--", "python", "-c", script, PYTHONPATH=str(tiny.root / "intruder"))
    assert value.strip().endswith("2")


def test_a_run_has_the_target_s_variables_unless_the_caller_sets_others(tiny: Tiny) -> None:
    tiny.targets.write_text(
        tiny.targets.read_text().replace("[tiny]\n", '[tiny]\nvariables = { TINY = "target", PLACE = "{site}/x" }\n')
    )
    asked = ("shell", "tiny", "--", "python", "-c", "import os; print(os.environ['TINY'])")
    assert tiny.succeed(*asked).strip().endswith("target")
    assert tiny.succeed(*asked, TINY="caller").strip().endswith("caller")
    place = tiny.succeed(*asked[:-1], "import os, sysconfig; print(os.environ['PLACE'], sysconfig.get_path('purelib'))")
    assert len(set(place.split()[-2:])) == 2 and place.split()[-2] == f"{place.split()[-1]}/x"


# --- a layer on the Python of a base image; here the base is a virtual environment with a history of its own


class Base:
    """A Python with what the base image provides: tinybase 1.0, an older tinypkg, and a requirement nobody meets."""

    def __init__(self, folder: Path, tiny: Tiny, **versions: str) -> None:
        self.tiny, shelf = tiny, folder / "base-wheels"
        shelf.mkdir()
        self.python = folder / "base" / "bin" / "python"
        own = os.environ | tiny.variables | {"UV_NO_INDEX": "1", "UV_FIND_LINKS": str(tiny.shelf)}
        uv_bin = [uv.find_uv_bin(), "--no-cache", "--quiet"]
        command = [*uv_bin, "venv", "--seed", "--python", sys.executable, str(folder / "base")]
        subprocess.run(command, env=own, check=True)
        held = {"tinybase": "1.0", "tinypkg": "0.9", "tinydep": "0.5", "lonely": "1.0"} | versions
        needs = {"lonely": ("absent",), "strict": ("tinypkg<1.0",)}
        made = [
            str(wheel(shelf, name, needs.get(name, ()), f"value = {version!r}\n".encode(), version))
            for name, version in held.items()
        ]
        command = [*uv_bin, "pip", "install", "--no-deps", "--python", str(self.python), *made]
        subprocess.run(command, env=own, check=True)
        provided = 'module = "tinybase"\nsummary = "a test"\n\n[[release]]\nversion = "1.0"\nkind = "provided"\n'
        tiny.recipe("tinybase").write_text(f"{provided}requires = []\nmib = {{ download = 0, installed = 0 }}\n")
        tiny.edit(tiny.targets, 'tinywheel = "1.0"', 'tinywheel = "1.0"\ntinybase = "1.0"')

    def layer(self) -> Path:
        """Install the target's wheels onto the base."""
        chosen, cache = plan(Catalogue(self.tiny.root), "tiny"), Cache(self.tiny.cache)
        wheels = [
            environment.Wheel(pin, path, sha256_of(path), {})
            for pin in chosen.pins
            for path in self.tiny.shelf.glob(f"{pin.name}-1.0-*.whl")
            if pin.release.kind != "provided"
        ]
        locked = [
            (artifact, next(self.tiny.shelf.glob(f"{artifact.name}-*.whl"))) for artifact in chosen.locked.artifacts
        ]
        with Steps() as steps, cache.held(steps.wait):
            return environment.layer(chosen, self.python, locked, wheels, cache, steps)

    def value(self, name: str) -> str:
        """What a module of the base says."""
        command = [str(self.python), "-c", f"import {name}; print({name}.value)"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def planted(tiny: Tiny) -> Tiny:
    """`tiny` whose source comes as a wheel, so that nothing has to be built."""
    wheel(tiny.shelf, "tinypkg", ("tinydep",), b"value = '1.0'\nnew = True\n")
    return tiny


def test_a_layer_replaces_what_it_pins_and_keeps_the_rest_of_the_base(planted: Tiny, tmp_path: Path) -> None:
    base = Base(tmp_path, planted)
    prefix = base.layer()
    assert [base.value(name) for name in ("tinypkg", "tinybase", "tinydep", "tinywheel")] == ["1.0", "1.0", "0.5", "1"]
    assert not list(prefix.glob("lib/*/site-packages/tinypkg-0.9.dist-info"))
    manifest = json.loads((prefix / "fusebox" / "manifest.json").read_text())
    assert list(manifest["packages"]) == ["tinypkg", "tinywheel"]
    before = (prefix / "fusebox" / "manifest.json").stat().st_mtime_ns
    base.layer()
    assert (prefix / "fusebox" / "manifest.json").stat().st_mtime_ns == before


def test_a_layer_that_breaks_a_requirement_of_the_base_is_refused(planted: Tiny, tmp_path: Path) -> None:
    """What was unmet before is not its fault; what is unmet now is named."""
    base = Base(tmp_path, planted, strict="1.0")
    with pytest.raises(Refusal, match=r"strict 1\.0 has requirement tinypkg<1\.0.*choose versions"):
        base.layer()
    assert not list(tmp_path.glob("base/fusebox/manifest.json"))


@pytest.mark.parametrize("version", ["1.1", "0.9"])
def test_another_base_is_refused(planted: Tiny, tmp_path: Path, version: str) -> None:
    base = Base(tmp_path, planted, tinybase=version)
    with pytest.raises(Refusal, match=rf"tinybase 1\.0 comes with python:.* has {version}: build target tiny inside"):
        base.layer()
    assert base.value("tinypkg") == "0.9"


def test_a_layer_is_not_built_on_any_other_python(planted: Tiny, tmp_path: Path) -> None:
    Base(tmp_path, planted)
    planted.renew_inputs()
    planted.refuse("build", "tiny", naming=("tinybase 1.0 comes with python:", "has none", "inside that image"))


def in_an_image(base: Base, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """The same layer as a stage of the image makes it: docker/make-environment.sh, on the base's Python."""
    chosen = plan(Catalogue(base.tiny.root), "tiny")
    given, house = tmp_path / "in", base.tiny.shelf
    (given / "fusebox").mkdir(parents=True)
    (given / "fusebox" / "manifest.json").write_text("{}")
    names = [pin.name for pin in chosen.pins if pin.release.kind != "provided"]
    pinned = {artifact.name: next(house.glob(f"{artifact.name}-*.whl")) for artifact in chosen.locked.artifacts}
    pinned |= {name: next(house.glob(f"{name}-1.0-*.whl")) for name in names}
    lines = [f"{name}=={path.name.split('-')[1]} --hash=sha256:{sha256_of(path)}\n" for name, path in pinned.items()]
    (given / "requirements.txt").write_text("".join(lines))
    (given / "python").write_text(f"python{chosen.target.python}\n")
    (given / "replaced").write_text("".join(f"{name}\n" for name in names))
    (given / "provided").write_text("tinybase 1.0\n")
    script = base.tiny.root / "docker" / "make-environment.sh"
    path = f"{base.python.parent}:{Path(uv.find_uv_bin()).parent}:{os.environ['PATH']}"
    command = [str(script), str(tmp_path / "unused"), str(given), str(house)]
    return subprocess.run(command, env=os.environ | {"PATH": path}, capture_output=True, text=True, check=False)


def test_an_image_makes_the_same_layer(planted: Tiny, tmp_path: Path) -> None:
    base = Base(tmp_path, planted)
    done = in_an_image(base, tmp_path)
    assert done.returncode == 0, done.stderr
    assert [base.value(name) for name in ("tinypkg", "tinybase", "tinydep", "tinywheel")] == ["1.0", "1.0", "0.5", "1"]
    assert not list(tmp_path.glob("base/lib/*/site-packages/tinypkg-0.9.dist-info"))
    assert (tmp_path / "base" / "fusebox" / "manifest.json").exists()


@pytest.mark.parametrize("version", ["1.1", "0.9"])
def test_an_image_is_not_built_on_another_base(planted: Tiny, tmp_path: Path, version: str) -> None:
    base = Base(tmp_path, planted, tinybase=version)
    done = in_an_image(base, tmp_path)
    assert done.returncode == 3
    assert f"tinybase 1.0 comes with the base of this target, and this base has {version}" in done.stderr
    assert base.value("tinypkg") == "0.9"


@pytest.mark.parametrize(("arguments", "checked"), [((), True), (("--standin", "debian"), False)])
def test_the_stages_check_what_the_base_provides(
    tiny: Tiny, tmp_path: Path, arguments: tuple[str, ...], checked: bool
) -> None:
    Base(tmp_path, tiny)
    tiny.renew_inputs()
    out, made, install = tmp_path / "out", tmp_path / "wheels" / "tinypkg", tmp_path / "install"
    tiny.succeed("patch", "tiny", "--into", out, *arguments)
    made.mkdir(parents=True)
    shutil.copy(wheel(tiny.shelf, "tinypkg", ("tinydep",), b"value = 2\n"), made)
    (made / "compiler.txt").touch()
    places = ("--out", out, "--wheels", made.parent, "--built-in", tmp_path / "built-in", "--into", install)
    tiny.succeed("audit", "tiny", *places)
    for folder in (out / "environment", install):
        path = folder / "provided"
        assert (path.read_text() if path.exists() else None) == ("tinybase 1.0\n" if checked else None)


def test_the_users_settings_of_uv_do_not_reach_an_environment(tiny: Tiny, undisturbed: Tiny) -> None:
    """They would put more into it than is locked, or end it with a word about the recipe."""
    tiny.succeed("build", "tiny", UV_VENV_SEED="1", UV_COMPILE_BYTECODE="1", UV_CONSTRAINT="/nonexistent")
    assert tiny.result() == undisturbed.result()


def without_python(env: Path, _: Path) -> None:
    """What an upgrade of the system's Python leaves of it."""
    for path in (env / "bin").glob("python*"):
        path.unlink()
        path.symlink_to("/nonexistent/python")


def without_records(_: Path, site: Path) -> None:
    shutil.rmtree(next(site.glob("tinydep-*.dist-info")))


DAMAGES: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "a module": (lambda _, site: (site / "tinydep.py").unlink(), "tinydep.py is missing"),
    "its records": (without_records, "tinydep 1.0 is missing"),
    "a part of a file": (lambda _, site: (site / "tinydep.py").write_text("v"), "tinydep.py has 1 bytes instead of"),
    "its Python": (without_python, "bin/python does not run"),
    "a record": (lambda _, site: next(site.glob("tinydep-*/RECORD")).write_text("a,b"), "RECORD cannot be read"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_a_damaged_environment_is_repaired(tiny: Tiny, undisturbed: Tiny, case: str) -> None:
    spoil_it, named = DAMAGES[case]
    tiny.succeed("build", "tiny")
    assert "repair" not in tiny.succeed("build", "tiny")
    env = tiny.root / "build" / "tiny" / "env"
    spoil_it(env, next(env.glob("lib/python*/site-packages")))
    assert named in tiny.succeed("build", "tiny")
    assert tiny.result() == undisturbed.result()
    assert "install" not in tiny.succeed("build", "tiny")
