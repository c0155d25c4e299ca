"""Collected wheels are installed from their index, served on this machine, by pip and by uv in clean environments."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import uv
from packaging.pylock import Pylock

from recipes.files import sha256_of
from recipes.tests.conftest import PYTHON, Index, Tiny, interpreter, spoil, wheel
from recipes.tests.shop import shop_in, torch

LOCAL = "cputorch1.0.tiny"
JSON = "application/vnd.pypi.simple.v1+json"
UV = [uv.find_uv_bin(), "--no-config", "--no-progress"]


class _Site(SimpleHTTPRequestHandler):
    """A web server of static files that also negotiates: JSON for who prefers it."""

    def send_head(self):  # type: ignore[no-untyped-def]
        if JSON in self.headers.get("Accept", "") and self.server.negotiates and self.path.endswith("/"):  # type: ignore[attr-defined]
            self.path += "index.json"
        self.server.asked.append(self.path)  # type: ignore[attr-defined]
        return super().send_head()

    def guess_type(self, path: str | os.PathLike[str]) -> str:
        return JSON if str(path).endswith("index.json") else super().guess_type(path)

    def log_message(self, *_: object) -> None:
        """Keep the test's output clean."""


class Site(ThreadingHTTPServer):
    """Serves a folder; `asked` is what was asked for."""

    def __init__(self, folder: Path, *, negotiates: bool = False) -> None:
        super().__init__(("127.0.0.1", 0), partial(_Site, directory=str(folder)))
        self.negotiates, self.asked = negotiates, list[str]()
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory, wheels: Path) -> Tiny:
    """A checkout whose wheels are collected and indexed, and on its shelf what is public: torch and dependencies."""
    folder = tmp_path_factory.mktemp("shop")
    made = shop_in(folder, wheels)
    torch(made.shelf, "1.1", folder)
    wheel(made.shelf, "tinywheel", version="2.0", payload=b"value = 'public'\n")
    return made


@pytest.fixture
def site(shop: Tiny) -> Iterator[Site]:
    with Site(shop.root / "build" / "index") as server:
        yield server
        server.shutdown()


class Clean:
    """A clean environment of a Python; nothing of the caller's configuration gets in."""

    def __init__(self, folder: Path, python: str) -> None:
        folder.mkdir(exist_ok=True)
        self.path, self.scratch = folder / "env", folder
        self.variables = {
            key: text for key, text in os.environ.items() if not key.startswith(("PIP_", "UV_", "PYTHON"))
        }
        self.variables |= {"PIP_CONFIG_FILE": os.devnull, "UV_CACHE_DIR": str(folder / "uv"), "PIP_NO_CACHE_DIR": "1"}
        self.variables |= {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "UV_PYTHON_DOWNLOADS": "never", "UV_LINK_MODE": "copy"}
        self.run(*UV, "venv", "--quiet", "--python", interpreter(python), self.path).check_returncode()
        self.python = str(self.path / "bin" / "python")

    def install(self, tool: str, *words: object) -> subprocess.CompletedProcess[str]:
        pip = [sys.executable, "-m", "pip", "--python", self.python, "install"]
        command = pip if tool == "pip" else [*UV, "pip", "install", "--python", self.python]
        return self.run(*command, *words)

    def run(self, *words: object, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            list(map(str, words)),
            env=self.variables,
            cwd=folder or self.scratch,
            capture_output=True,
            text=True,
            check=False,
        )

    def says(self, script: str) -> str:
        done = self.run(self.python, "-c", script)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def has(self, name: str) -> bool:
        return self.run(self.python, "-c", f"from importlib.metadata import version; version({name!r})").returncode == 0


def public(shop: Tiny) -> tuple[str, str, str]:
    """Options that make the shelf the public index."""
    return ("--no-index", "--find-links", str(shop.shelf))


def direct(shop: Tiny, site: Site, name: str) -> str:
    """The wheel of a package by its URL and hash, as its page links it."""
    described = json.loads((shop.root / "build" / "index" / "simple" / name / "index.json").read_text())
    (file,) = described["files"]
    return f"{name} @ {site.url}/{file['url'].removeprefix('../../')}#sha256={file['hashes']['sha256']}"


@pytest.mark.parametrize("tool", ["pip", "uv"])
def test_with_the_right_torch_it_works(shop: Tiny, site: Site, tmp_path: Path, tool: str) -> None:
    clean = Clean(tmp_path, PYTHON)
    assert clean.install(tool, *public(shop), "torch==1.0").returncode == 0
    wanted = [direct(shop, site, name) for name in ("tinypkg", "tinywheel")]
    done = clean.install(tool, *public(shop), *wanted)
    assert done.returncode == 0, done.stderr
    assert clean.says("import torch, tinypkg, tinywheel; print(tinypkg.answer(), tinywheel.value)") == "42 2"
    assert clean.says("from importlib.metadata import version; print(version('tinypkg'))") == f"1.0+{LOCAL}"
    checked = clean.run(sys.executable, "-m", "pip", "--python", clean.python, "check")
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize("tool", ["pip", "uv"])
def test_with_another_torch_it_is_refused(shop: Tiny, site: Site, tmp_path: Path, tool: str) -> None:
    clean = Clean(tmp_path, PYTHON)
    wanted = [direct(shop, site, name) for name in ("tinypkg", "tinywheel")]
    done = clean.install(tool, *public(shop), "torch==1.1", *wanted)
    assert done.returncode != 0 and "torch" in done.stderr and "1.1" in done.stderr
    assert not clean.has("tinypkg") and not clean.has("torch")


@pytest.mark.parametrize("negotiates", [False, True], ids=["html", "json"])
@pytest.mark.parametrize("tool", ["pip", "uv"])
@pytest.mark.parametrize("python", ["3.10", "3.12"])
def test_every_python_and_both_forms_of_the_index(
    shop: Tiny, tmp_path: Path, python: str, tool: str, negotiates: bool
) -> None:
    clean = Clean(tmp_path, python)
    with Site(shop.root / "build" / "index", negotiates=negotiates) as site:
        where = ("--index-url", f"{site.url}/simple/", "--find-links", shop.shelf)
        done = clean.install(tool, *where, f"tinywheel==1.0+{LOCAL}")
        assert done.returncode == 0, done.stderr
        assert clean.says("import tinywheel; print(tinywheel.value)") == "2"
        assert any(path.endswith(".whl.metadata") for path in site.asked)  # resolved without a download
        assert any(path.endswith("index.json") for path in site.asked) is negotiates
        other = clean.install(tool, *where, f"tinypkg==1.0+{LOCAL}")
        assert other.returncode != 0 and not clean.has("tinypkg")  # it is compiled for the target's Python
        site.shutdown()


@pytest.mark.parametrize("tool", ["pip", "uv"])
def test_requirements_are_installed_by_hash_and_offline(shop: Tiny, tmp_path: Path, tool: str) -> None:
    clean, index = Clean(tmp_path, PYTHON), shop.root / "build" / "index"
    requirements = index / "targets" / "tiny" / "requirements.txt"
    links = ("--no-index", "--find-links", str(index / "files"), "--find-links", str(shop.shelf))
    done = clean.install(tool, *links, "--require-hashes", "-r", requirements)
    assert done.returncode == 0, done.stderr
    assert clean.says("import torch, tinypkg; print(tinypkg.answer())") == "42"
    (tmp_path / "wrong.txt").write_text(
        requirements.read_text().replace(sha256_of(next(shop.shelf.glob("tinydep*"))), "0" * 64)
    )
    wrong = Clean(tmp_path / "other", PYTHON)
    assert wrong.install(tool, *links, "--require-hashes", "-r", tmp_path / "wrong.txt").returncode != 0
    assert not wrong.has("tinypkg")


@pytest.mark.parametrize("fault", ["truncated", "swapped", "spoiled"])
@pytest.mark.parametrize("tool", ["pip", "uv"])
def test_another_file_under_the_wheels_name_is_refused(shop: Tiny, tmp_path: Path, tool: str, fault: str) -> None:
    index = tmp_path / "index"
    shutil.copytree(shop.root / "build" / "index", index)
    path = next((index / "files").glob("tinywheel*.whl"))
    if fault == "swapped":  # whole, of the same name and version
        stranger = wheel(tmp_path, "tinywheel", version=f"1.0+{LOCAL}", payload=b"value = 'evil'\n")
        path.unlink()
        stranger.rename(path)
    elif fault == "truncated":
        os.truncate(path, path.stat().st_size // 2)
    else:
        spoil(path)
    clean = Clean(tmp_path, PYTHON)
    with Site(index) as site:
        done = clean.install(tool, "--no-deps", "--index-url", f"{site.url}/simple/", f"tinywheel==1.0+{LOCAL}")
        site.shutdown()
    reason = "hash" if tool == "pip" or fault == "swapped" else "extract archive"  # uv unpacks while it downloads
    assert done.returncode != 0 and reason in done.stderr.lower(), done.stderr
    assert not clean.has("tinywheel")


def test_uv_takes_only_what_is_named_from_the_index(shop: Tiny, site: Site, tmp_path: Path) -> None:
    """The snippet of docs/use/wheels.md; the public index has a newer tinywheel."""
    clean = Clean(tmp_path, PYTHON)
    project = tmp_path / "project"
    project.mkdir()
    text = f"""
[project]
name = "mine"
version = "1"
requires-python = "=={PYTHON}.*"
dependencies = ["tinypkg", "tinywheel", "torch==1.0"]

[tool.uv]
environments = ["sys_platform == 'linux' and platform_machine == 'x86_64'"]
no-index = false
find-links = [{json.dumps(str(shop.shelf))}]

[tool.uv.sources]
tinypkg = {{ index = "fusebox" }}
tinywheel = {{ index = "fusebox" }}

[[tool.uv.index]]
name = "fusebox"
url = "{site.url}/simple/"
explicit = true

[[tool.uv.index]]
name = "public"
url = "{site.url}/nothing/"
default = true
ignore-error-codes = [404]
"""
    (project / "pyproject.toml").write_text(text)
    uv_alone = [word for word in UV if word != "--no-config"]
    done = clean.run(*uv_alone, "sync", "--no-install-project", "--python", clean.python, folder=project)
    assert done.returncode == 0, done.stderr
    python = project / ".venv" / "bin" / "python"
    assert clean.run(python, "-c", "import torch, tinypkg; print(tinypkg.answer())").stdout.strip() == "42"
    assert f'version = "1.0+{LOCAL}"' in (project / "uv.lock").read_text()


@pytest.mark.parametrize("tool", ["pip", "uv"])
def test_pylock_is_installed(shop: Tiny, tmp_path: Path, wheels: Path, tool: str) -> None:

    other = shop.copy(tmp_path / "copy")
    shutil.copytree(shop.cache, other.cache)
    with Index(shop.shelf) as index:
        index.serve(other)
        other.succeed("wheels", "tiny", "--lock")
        other.succeed("index")
        lock = other.root / "build" / "index" / "targets" / "tiny" / "pylock.toml"
        Pylock.from_dict(tomllib.loads(lock.read_text()))
        clean = Clean(tmp_path, PYTHON)
        done = clean.install(tool, "-r", lock)
        index.ended.set()
        index.shutdown()
    assert done.returncode == 0, done.stderr
    assert clean.says("import torch, tinypkg; print(tinypkg.answer())") == "42"
