"""What is broken on purpose is explained, by its cause; what is whole has none.

The texts are what the broken things of breakages.py print here. `doctor --error` reads them.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from recipes.catalogue.load import Catalogue
from recipes.catalogue.lock import artifact_of
from recipes.catalogue.plan import plan
from recipes.files import ROOT, sha256_of
from recipes.make import toolkit
from recipes.make.cache import Cache
from recipes.make.fetch import Downloads
from recipes.progress import Steps
from recipes.tests.breakages import NEEDS_MOUNTS, QUICK, SLOW, Shelf, library, made
from recipes.tests.conftest import SOURCE, Checkout, sdist, wheel
from recipes.verbs.doctor import UNKNOWN

MOUNTS = ("unshare", "--user", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt")
MAY_MOUNT = subprocess.run(MOUNTS, capture_output=True, check=False).returncode == 0
NO_MOUNTS = "unproven here: this user may not mount in a namespace of its own"
BESIDE_TORCH = (
    "filelock", "fsspec", "jinja2", "markupsafe", "mpmath", "networkx", "numpy", "setuptools", "sympy",
    "typing-extensions",
)  # fmt: skip
OF_TOOLKIT = ("nvidia-cuda-runtime", "nvidia-cuda-cccl")


@pytest.fixture(scope="module")
def doctor(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[int, str]]:
    """Asks `doctor` what a text means: its exit code, and what it prints."""
    checkout = Checkout(tmp_path_factory.mktemp("doctor"))

    def asked(text: str) -> tuple[int, str]:
        log = checkout.root / "error.log"
        log.write_text(text, encoding="utf-8")
        shown = checkout.run("doctor", "--error", log)
        return shown.returncode, shown.stdout

    return asked


def first_cause(doctor: Callable[[str], tuple[int, str]], text: str) -> str:
    """The likeliest cause that `doctor` names."""
    code, shown = doctor(text)
    assert code == 0, f"{text}\n{shown}"
    return next(line for line in shown.splitlines() if line.startswith("   cause: "))


def test_there_are_many() -> None:
    assert len(QUICK) + len(NEEDS_MOUNTS) + len(SLOW) >= 65 and len(HEALTHY) >= 10


@pytest.mark.parametrize("name", QUICK)
def test_the_cause_of_a_breakage_is_named(doctor: Callable[[str], tuple[int, str]], tmp_path: Path, name: str) -> None:
    text = QUICK[name].broken(tmp_path)
    assert QUICK[name].cause in first_cause(doctor, text), text


@pytest.mark.skipif(not MAY_MOUNT, reason=NO_MOUNTS)
@pytest.mark.parametrize("name", NEEDS_MOUNTS)
def test_the_cause_of_a_wrong_file_system_is_named(
    doctor: Callable[[str], tuple[int, str]], tmp_path: Path, name: str
) -> None:
    text = NEEDS_MOUNTS[name].broken(tmp_path)
    assert NEEDS_MOUNTS[name].cause in first_cause(doctor, text), text


# --- with torch and nvcc


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    """Made of the wheels that the locks of two targets pin, beside an older torch and NumPy 1."""
    folder = tmp_path_factory.mktemp("shelf")
    mirror = os.environ.get("FUSEBOX_MIRROR")
    environment, site = folder / "env", folder / "site"
    small, large = plan(Catalogue(), "cpu"), plan(Catalogue(), "cu13.2-torch2.15")
    cache = Cache(folder / "cache")
    with Steps(Console(file=io.StringIO())) as steps, cache.held(steps.wait):
        downloads = Downloads(cache, steps, Path(mirror) if mirror else None, small.target)
        torch = artifact_of(small.torch) if small.torch else None
        assert torch and large.toolkit
        beside = [artifact for artifact in small.locked.artifacts if artifact.name in BESIDE_TORCH]
        wheels = downloads.all([torch, *beside])
        parts = [artifact for artifact in large.locked.artifacts if artifact.name in OF_TOOLKIT]
        of_toolkit = downloads.all([*large.toolkit.artifacts, *parts])
        numpy = downloads.choose("numpy", "1.26.4")
    uv = (sys.executable, "-m", "uv", "--no-config", "--cache-dir", folder / "uv")
    made(folder, *uv, "venv", "--python", "3.11", environment)
    made(folder, *uv, "pip", "install", "--offline", "--no-deps", "--python", environment, *wheels.values())
    for path in of_toolkit.values():
        with zipfile.ZipFile(path) as archive:
            archive.extractall(site)
    home = toolkit.folder_in(site, large.target)
    for program in ("bin/nvcc", "bin/ptxas", "bin/cudafe++", "bin/fatbinary", "bin/nvlink", "nvvm/bin/cicc"):
        (home / program).chmod(0o755)
    with zipfile.ZipFile(numpy) as archive:
        archive.extractall(folder / "numpy")
    # The wheel for macOS is a tenth of the size, and its headers are the same.
    older = ("torch==2.1.2", "--platform", "macosx_11_0_arm64", "--python-version", "3.11", "--dest", str(folder))
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", *older]
    subprocess.run(command, check=True)
    with zipfile.ZipFile(next(folder.glob("torch-2.1.2-*.whl"))) as archive:
        archive.extractall(folder / "older", [name for name in archive.namelist() if "/include/" in name])
    return Shelf(
        environment / "bin" / "python", home, folder / "older" / "torch", folder / "numpy" / "numpy/core/include"
    )


@pytest.mark.parametrize("name", SLOW)
def test_the_cause_of_a_breakage_of_torch_or_nvcc_is_named(
    doctor: Callable[[str], tuple[int, str]], tmp_path: Path, shelf: Shelf, name: str
) -> None:
    if name == "little shared memory" and not MAY_MOUNT:
        pytest.skip(NO_MOUNTS)
    broken, cause = SLOW[name]
    text = broken(tmp_path, shelf)
    assert cause in first_cause(doctor, text), text


# --- what is whole


def _wheel_installed(folder: Path) -> str:
    path = wheel(folder, "tiny")
    return made(folder, sys.executable, "-m", "pip", "install", "--verbose", "--no-index", "--target", "site", path)


def _extension_compiled(folder: Path) -> str:
    """By the options of a build that looks for trouble: `-Werror` and files that are named for errors are none."""
    (folder / "error.cpp").write_text("#include <string>\nstd::string killed() { return {}; }\n")
    options = ("-v", "-Wall", "-Werror", "-Wno-error=unused", "-shared", "-fPIC")
    return made(folder, "c++", *options, "error.cpp", "-o", folder / "error.so")


def _warned(folder: Path) -> str:
    (folder / "tiny.cpp").write_text("[[deprecated]] int f() { return 1; }\nint g() { return f(); }\n")
    return made(folder, "c++", "-Wall", "-c", "tiny.cpp")


def _source_built(folder: Path) -> str:
    sdist(folder / "tinypkg-1.0.tar.gz", SOURCE)
    return made(folder, sys.executable, "-m", "pip", "wheel", "--verbose", "--no-deps", "tinypkg-1.0.tar.gz")


def _repository_cloned(folder: Path) -> str:
    made(folder, "git", "init", "--quiet", "tree")
    identity = ("-c", "user.name=A", "-c", "user.email=a@example.org")
    made(folder / "tree", "git", *identity, "commit", "--quiet", "--allow-empty", "--message", "Fix an error")
    return made(folder, "git", "clone", "--verbose", "file://" + str(folder / "tree"), "clone")


def _environment_made(folder: Path) -> str:
    return made(folder, sys.executable, "-m", "uv", "--no-config", "venv", "--verbose", "--offline", folder / "env")


def _locked(folder: Path) -> str:
    path = wheel(folder, "tiny")
    (folder / "lock.txt").write_text(f"tiny==1.0 --hash=sha256:{sha256_of(path)}\n")
    pip = (sys.executable, "-m", "pip", "install", "--no-index", "--find-links", folder, "--target", "site")
    return made(folder, *pip, "--require-hashes", "-r", "lock.txt")


def _tested(folder: Path) -> str:
    """Tests that are named for what they try."""
    (folder / "test_error.py").write_text("def test_a_killed_process_is_an_error():\n    print('fatal error')\n")
    return made(folder, sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "test_error.py")


def _loaded(folder: Path) -> str:
    """What the loader says of a library whose dependencies it finds."""
    needed = library(folder / "libcuda.so.1", "int needed(void) { return 1; }")
    path = library(folder / "tiny.so", "int needed(void); int f(void) { return needed(); }", needed)
    program = f"import ctypes; ctypes.CDLL('{path}')"
    return made(folder, sys.executable, "-c", program, LD_DEBUG="libs", LD_LIBRARY_PATH=str(folder))


def _planned(folder: Path) -> str:
    return made(ROOT, sys.executable, "-m", "recipes", "plan", "cpu", FUSEBOX_CACHE=str(folder))


def _archive_read(folder: Path) -> str:
    sdist(folder / "tiny-1.0.tar.gz", {"setup.py": "", "src/error.cpp": ""})
    return made(folder, "tar", "--list", "--verbose", "--file", "tiny-1.0.tar.gz")


HEALTHY: dict[str, Callable[[Path], str]] = {
    "a wheel is installed": _wheel_installed,
    "an extension is compiled": _extension_compiled,
    "a compiler warns": _warned,
    "a source becomes a wheel": _source_built,
    "a repository is cloned": _repository_cloned,
    "an environment is made": _environment_made,
    "a lock is installed": _locked,
    "tests pass": _tested,
    "a library is loaded": _loaded,
    "a target is planned": _planned,
    "an archive is read": _archive_read,
}


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_named_where_nothing_is_broken(
    doctor: Callable[[str], tuple[int, str]], tmp_path: Path, name: str
) -> None:
    text = HEALTHY[name](tmp_path)
    code, shown = doctor(text)
    assert (code, "cause:" in shown, "no line of this text looks like an error" in shown) == (0, False, True), shown


def test_trouble_without_a_known_cause_is_unknown(doctor: Callable[[str], tuple[int, str]]) -> None:
    code, shown = doctor("the flux capacitor is denied\n")
    assert code == UNKNOWN and "unknown: no row" in shown and "Report it" in shown
