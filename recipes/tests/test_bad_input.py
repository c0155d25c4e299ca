"""What the machine lacks, and what a source does in its build: refused in one sentence, and sound once it is mended."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from recipes.files import sha256_of
from recipes.tests.conftest import PYTHON, SOURCE, Checkout, Tiny, one_sentence, wheel

# --- the tool itself


def old_pythons() -> list[str]:
    """Interpreters of this machine that are too old for the tool."""
    places = [path for minor in range(6, 11) if (path := shutil.which(f"python3.{minor}"))]
    places += sorted(map(str, Path.home().glob(".pyenv/versions/3.[0-9]*/bin/python")))
    asked = "import sys; sys.exit(sys.version_info >= (3, 11))"
    return [
        path for path in places if subprocess.run([path, "-c", asked], capture_output=True, check=False).returncode == 0
    ]


@pytest.mark.parametrize("command", [("-m", "recipes", "plan"), ("noxfile.py",)])
def test_a_python_that_is_too_old_is_refused(checkout: Checkout, command: tuple[str, ...]) -> None:
    """By a real old interpreter where the machine has one."""
    if not (pythons := old_pythons()):
        pytest.skip("this machine has no Python below 3.11; the next test emulates one")
    done = subprocess.run(
        [pythons[0], *command], cwd=checkout.root, env=checkout.variables, capture_output=True, text=True, check=False
    )
    one_sentence(done, ("needs Python 3.11", "nox"), code=1)


def test_an_emulated_old_python_is_refused(checkout: Checkout) -> None:
    """The same check where no old interpreter can be found; `sys.version_info` is a stand-in."""
    stand_in = "import sys; sys.version_info = (3, 8, 18); import recipes"
    done = subprocess.run(
        [sys.executable, "-c", stand_in], cwd=checkout.root, capture_output=True, text=True, check=False
    )
    one_sentence(done, ("needs Python 3.11", "this is 3.8", "nox"), code=1)


def test_missing_packages_of_the_tool_are_named(checkout: Checkout) -> None:
    """A Python without the tool's dependencies (-S leaves site-packages out) is sent to nox."""
    command = [sys.executable, "-S", "-m", "recipes", "plan", "cpu"]
    done = subprocess.run(
        command, cwd=checkout.root, env=checkout.variables, capture_output=True, text=True, check=False
    )
    one_sentence(done, ("is not installed", "nox"), code=1)


# --- the machine


def without(folder: Path, *names: str) -> str:
    """A PATH with everything that a build runs except these."""
    folder.mkdir()
    for name in {"bash", "sh", "env", "dirname", "realpath", "git", "gcc", "cc", "c++", "g++", "ld", "as"} - set(names):
        (folder / name).symlink_to(shutil.which(name) or "/nowhere")
    (folder / f"python{PYTHON}").symlink_to(os.path.realpath(sys.executable))
    return str(folder)


def test_no_git_is_named(tiny: Tiny, tmp_path: Path, undisturbed: Tiny) -> None:
    """By the patch that needs it."""
    tiny.refuse("build", "tiny", naming=("patches/tinypkg/0001", "install git"), PATH=without(tmp_path / "bin", "git"))
    tiny.succeed("build", "tiny")
    assert tiny.result() == undisturbed.result()


def test_a_target_python_that_cannot_be_had_is_named(tiny: Tiny) -> None:
    """No other one takes its place, also where uv knows a download of it that it cannot reach."""
    missing = next(f"3.{minor}" for minor in (14, 9, 10, 12, 13) if not shutil.which(f"python3.{minor}"))
    for version in ("3.99", missing):
        targets = tiny.targets.read_text()
        tiny.edit(tiny.targets, f'seconds"\npython = "{PYTHON}"', f'seconds"\npython = "{version}"')
        tiny.renew_inputs()
        mirror = {"UV_PYTHON_INSTALL_MIRROR": "http://127.0.0.1:9", "UV_HTTP_RETRIES": "0"}
        tiny.refuse("build", "tiny", naming=(f"No Python {version}", "install it"), **mirror)
        tiny.targets.write_text(targets)


# --- what a source does in its build

SETUP = """
from setuptools import Extension, setup
{before}
extension = Extension("tinypkg", ["tinypkg.c"], extra_compile_args={flags}, libraries={libraries})
setup(name="tinypkg", version="1.0", ext_modules=[extension], install_requires=["tinydep"])
"""
MODULE = """
#include <Python.h>
static struct PyModuleDef module = { PyModuleDef_HEAD_INIT, "tinypkg", NULL, -1, NULL };
PyMODINIT_FUNC PyInit_tinypkg(void) { return PyModule_Create(&module); }
"""
# A compiler that adds the flag without any log showing it.
WRAPPER = """
import os, pathlib
pathlib.Path("cc.sh").write_text('#!/bin/sh\\nexec gcc "$@" -march=native\\n')
os.chmod("cc.sh", 0o755)
os.environ["CC"] = os.path.abspath("cc.sh")
"""


def plant_extension(
    tiny: Tiny, flags: tuple[str, ...] = (), before: str = "", module: str = MODULE, libraries: tuple[str, ...] = ()
) -> None:
    """Make tinypkg a compiled package."""
    setup = SETUP.format(flags=list(flags), before=before, libraries=list(libraries))
    source = {"setup.py": setup, "tinypkg.c": module, "pyproject.toml": ""}
    source["pyproject.toml"] = '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
    (tiny.root / "patches" / "tinypkg" / "0001-say-two.patch").unlink(missing_ok=True)
    tiny.plant("tinypkg", source, requires=("tinydep",), compiler="c++", build_requires=("setuptools",))
    tiny.lock("setuptools")


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory, wheels: Path) -> Tiny:
    """A checkout in which the extension was compiled, portably."""
    built = Tiny(tmp_path_factory.mktemp("compiled"), wheels)
    plant_extension(built)
    built.succeed("build", "tiny")
    return built


def wheel_of(tiny: Tiny) -> Path:
    """The one built wheel."""
    return next(tiny.cache.glob("wheels/*/*.whl"))


KILLED = "nvcc error   : 'cicc' died due to signal 9 (Kill signal)"
MISMATCH = """
The detected CUDA version (12.4) mismatches the version that was used to compile
PyTorch (11.8). Please make sure to use the same CUDA versions.
"""
FAULTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "native-in-the-log": ({"flags": ("-march=native",)}, ("tinypkg 1.0", "compiles with -march=native", "turn it off")),
    "native-hidden": ({"before": WRAPPER}, ("tinypkg 1.0", "was compiled for ", "by a setting or a patch")),
    "does-not-compile": (
        {"module": MODULE + "nonsense"},
        ("tinypkg 1.0", "did not build", "error:", "tinypkg.build.log"),
    ),
    "fails-in-setup": ({"before": "raise SystemExit('no')"}, ("tinypkg 1.0", "did not build", "tinypkg.build.log")),
    "raises-in-setup": (
        {"before": "raise RuntimeError('another CUDA')"},
        ("tinypkg 1.0", "did not build (RuntimeError: another CUDA)", "tinypkg.build.log"),
    ),
    "out-of-memory": (
        {"before": "import subprocess; subprocess.check_call(['sh', '-c', 'sh -c \"kill -9 \\\\$\\\\$\"; exit 1'])"},
        ("tinypkg 1.0", "killed", "mib_per_job", "tinypkg.toml"),
    ),
    "out-of-memory-in-nvcc": (
        {"before": f"raise SystemExit({KILLED!r})"}, ("tinypkg 1.0", "for lack of memory", "mib_per_job"),
    ),
    "no-driver": ({"libraries": ("cuda",)}, ("tinypkg 1.0", "libcuda.so, which is of NVIDIA's driver", "stubs")),
    "no-library": ({"libraries": ("fuseboxnowhere",)}, ("tinypkg 1.0", "does not find libfuseboxnowhere.so", "add it")),
    "nvcc-against-torch": (
        {"before": f"raise RuntimeError({MISMATCH!r})"},
        ("tinypkg 1.0", "nvcc is of CUDA 12.4, and torch is compiled with CUDA 11.8", "install a CUDA 11.8 toolkit"),
    ),
    "undefined-symbol": (
        {"module": MODULE.replace("{ return", "{ extern void nowhere(void); nowhere(); return")},
        ("tinypkg 1.0", "undefined symbol nowhere"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_build_is_refused(tiny: Tiny, compiled: Tiny, fault: str) -> None:
    """No wheel of it is kept; the log of one that failed is."""
    spoil, naming = FAULTS[fault]
    plant_extension(tiny, **spoil)
    sentence = tiny.refuse("build", "tiny", naming=naming)
    assert not any(tiny.cache.glob("wheels/*"))
    if "build.log" in sentence:
        assert (tiny.root / "build" / "tiny" / "tinypkg.build.log").stat().st_size > 0


def test_a_build_does_not_follow_the_users_variables(tiny: Tiny, compiled: Tiny) -> None:
    """CFLAGS and its kin are not in the wheel's key, so they may not be in the wheel: it is the same to the byte."""
    plant_extension(tiny)
    tiny.succeed(
        "build", "tiny", CFLAGS="-O0 -DHOSTILE -march=native", CC="/nowhere/cc", CPATH="/nowhere", LDFLAGS="--none"
    )
    assert wheel_of(tiny).parent.name == wheel_of(compiled).parent.name
    assert sha256_of(wheel_of(tiny)) == sha256_of(wheel_of(compiled))


def test_no_compiler_is_named(tiny: Tiny, tmp_path: Path, compiled: Tiny) -> None:
    """By the package that is compiled, with the package of the system that holds it."""
    plant_extension(tiny)
    tiny.refuse(
        "build",
        "tiny",
        naming=("tinypkg 1.0", "no c++", "apt-get install g++"),
        PATH=without(tmp_path / "bin", "c++", "g++"),
    )
    tiny.succeed("build", "tiny")
    assert tiny.result() == compiled.result()


def test_missing_python_headers_are_named(tiny: Tiny) -> None:
    """An empty file system is mounted over them, for that process alone."""
    include = subprocess.run(
        [os.path.realpath(sys.executable), "-c", "import sysconfig; print(sysconfig.get_path('include'))"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    hide = ("unshare", "--mount", "sh", "-c", f'mount -t tmpfs x {include} && exec "$@"', "sh")
    if subprocess.run([*hide, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("the headers are hidden by a mount, as root")
    plant_extension(tiny)
    tiny.refuse("build", "tiny", naming=("tinypkg 1.0", "Python.h is missing", "-dev"), before=hide)


def test_a_wheel_for_this_machine_alone_is_not_imported(tiny: Tiny, compiled: Tiny, tmp_path: Path) -> None:
    """A wheel compiled with -march=native whose record is in order; and a portable one, which is taken."""
    compiled.succeed("cache", "export", tmp_path / "exported")
    tiny.succeed("cache", "import", tmp_path / "exported")
    record = next((tmp_path / "exported").glob("*/wheel.json"))
    native = record.parent / json.loads(record.read_text())["file"]
    (tmp_path / "tinypkg.c").write_text(MODULE)
    include = subprocess.run(
        [f"python{PYTHON}-config", "--includes"], capture_output=True, text=True, check=True
    ).stdout.split()
    flags = ["-shared", "-fPIC", "-march=native", "-frecord-gcc-switches", *include]
    subprocess.run(["gcc", *flags, "-o", tmp_path / "native.so", tmp_path / "tinypkg.c"], check=True)
    with zipfile.ZipFile(native, "a") as archive:
        archive.write(tmp_path / "native.so", "native.so")
    record.write_text(json.dumps(json.loads(record.read_text()) | {"sha256": sha256_of(native)}))
    shutil.rmtree(tiny.cache / "wheels")
    tiny.refuse("cache", "import", tmp_path / "exported", naming=("tinypkg 1.0", "native.so", "-march=native"))
    assert not any(tiny.cache.glob("wheels/*"))


# --- what does not fit together


def test_an_unmet_requirement_is_refused(tiny: Tiny, undisturbed: Tiny) -> None:
    """A lock without a dependency of a package is refused, and one without a dependency's own by `pip check`."""
    path = tiny.root / "recipes" / "lock" / "tiny.txt"
    sound = path.read_text()
    path.write_text("".join(line for line in sound.splitlines(True) if "tinydep" not in line))
    tiny.refuse("build", "tiny", naming=("tinydep", "write the lock again"))
    assert not (tiny.root / "build" / "tiny" / "env").exists()
    dependency = next(tiny.shelf.glob("tinydep-*.whl"))
    before = dependency.read_bytes()
    wheel(tiny.shelf, "tinydep", ("absent",))
    tiny.lock()
    tiny.refuse("build", "tiny", naming=("uv pip check", "absent", "write the lock again"))
    assert not (tiny.root / "build" / "tiny" / "env").exists()
    dependency.write_bytes(before)
    path.write_text(sound)
    tiny.succeed("build", "tiny")
    assert tiny.result() == undisturbed.result()


@pytest.mark.parametrize(
    ("old", "new", "naming"),
    [
        ('requires = ["tinydep"]', 'requires = ["tinydep>=1"]', ("tinypkg.toml", "requires", "tinydep")),
        ('requires = ["tinydep"]', "requires = []", ("tinypkg.toml", "requires", "tinydep")),
        ('version = "1.0"', 'version = "1.1"', ("tinypkg", "1.0", "1.1")),
    ],
)
def test_a_recipe_that_says_other_than_the_wheel_is_refused(
    tiny: Tiny, old: str, new: str, naming: tuple[str, ...]
) -> None:
    """Requirements and version are read from the wheel and compared."""
    tiny.edit(tiny.recipe("tinypkg"), old, new)
    if "1.1" in new:
        tiny.edit(tiny.targets, 'tinypkg = "1.0"', 'tinypkg = "1.1"')
        (tiny.root / "patches" / "tinypkg" / "0001-say-two.patch").unlink()
        (tiny.shelf / "tinypkg-1.0.tar.gz").rename(tiny.shelf / "tinypkg-1.1.tar.gz")
        tiny.edit(tiny.recipe("tinypkg"), "tinypkg-1.0.tar.gz", "tinypkg-1.1.tar.gz")
    tiny.renew_inputs()
    tiny.refuse("build", "tiny", naming=naming)


def test_a_patch_that_does_not_fit_is_refused(tiny: Tiny) -> None:
    """By its name; nothing patched in part is kept."""
    tiny.plant("tinypkg", SOURCE | {"tinypkg.py": '"""Tiny."""\n\nvalue = 7\n'}, requires=("tinydep",))
    tiny.refuse("patch", "tiny", naming=("patches/tinypkg/0001-say-two.patch", "tinypkg-1.0", "renew it"))
    assert not any(tiny.cache.glob("trees/*"))
