"""What the tests share: a temporary copy of the checkout, a target that builds in two seconds, a package index.

Every test works on the real thing: the command in a process, a server on this machine, a cache of its own.
"""

from __future__ import annotations

import base64
import copy
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
import uuid
import zipfile
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType
from typing import Any

import docker
import pytest

from recipes.catalogue.load import Catalogue
from recipes.catalogue.plan import plan
from recipes.catalogue.schema import Target
from recipes.errors import Refusal
from recipes.files import ROOT, sha256_of
from recipes.make import resolve
from recipes.make.cache import Cache
from recipes.make.patch import tree_hash
from recipes.ship import image
from recipes.tests import forked
from recipes.tests.rooms import PlantedRoom

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
COPIED = ("recipes", "patches", "docker", "smoke_tests", "pyproject.toml", "README.md", "docs", "noxfile.py")
# A command that runs another one without a network: in a network namespace, or behind a proxy that nobody answers.
UNSHARED = subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode == 0
NOWHERE = [f"{name}=http://127.0.0.1:9" for name in ("http_proxy", "https_proxy", "all_proxy")]
OFFLINE = ("unshare", "--net") if UNSHARED else ("env", *NOWHERE)
REGISTRY = "127.0.0.1:5000"  # the registry that runs beside the engine, if there is one
# A refusal says what to do next, in one of these words.
NEXT_STEP = re.compile(
    r"\b(add|apt-get|ask|bound|break it|build it|build target|change|check|choose|constrain|correct|delete|export it|"
    r"find out|flatten|free|install|mend|name one|narrow|pass|raise|read|remove|rename|renew|replace|report|run|save|"
    r"set|try|turn|update|write)\b"
)


@pytest.fixture(autouse=True, scope="session")
def own_temporary_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A pytest that a test starts has its folders among this process's, where no pytest of another process ends.

    As it ends, each removes old folders beside its own, and the lock of one that has taken its number again.
    """
    with pytest.MonkeyPatch.context() as variables:
        variables.setenv("PYTEST_DEBUG_TEMPROOT", str(tmp_path_factory.getbasetemp()))
        yield


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's cache, in this process or in one that it starts."""
    monkeypatch.setenv("FUSEBOX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))


class Checkout:
    """A copy of the checkout with its own cache; `variables` is the environment of the verbs run in it.

    It has evidence only where that is asked for: copying it takes long, and rendering what it says longer.
    """

    def __init__(self, folder: Path, *, with_evidence: bool = False) -> None:
        self.root, self.cache = folder / "checkout", folder / "cache"
        left_out = {ROOT / "recipes" / "tests"} | (set() if with_evidence else {ROOT / "smoke_tests" / "evidence"})

        def ignore(folder: str, names: list[str]) -> list[str]:
            return [name for name in names if Path(folder, name) in left_out]

        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, self.root / name, ignore=ignore)
            else:
                shutil.copy2(ROOT / name, self.root / name)
        for part in ("bench", "built", "mutants", "training"):
            (self.root / "smoke_tests" / "evidence" / part).mkdir(parents=True, exist_ok=True)
        ours = ("PIP_", "UV_", "PYTHON", "GIT_", "FUSEBOX_")
        self.variables = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
        for proxy in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
            self.variables.pop(proxy, None)
        self.variables |= {"FUSEBOX_CACHE": str(self.cache), "PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1"}

    @property
    def targets(self) -> Path:
        return self.root / "recipes" / "targets.toml"

    def recipe(self, name: str) -> Path:
        """recipes/packages/NAME.toml."""
        return self.root / "recipes" / "packages" / f"{name}.toml"

    def edit(self, path: Path, old: str, new: str) -> None:
        """Replace the first place of a text: in targets.toml that of `cpu`, in a recipe the first release's."""
        text = path.read_text(encoding="utf-8")
        assert old in text, f"{old!r} is not in {path}"
        path.write_text(text.replace(old, new, 1), encoding="utf-8")

    def start(self, *arguments: object, before: tuple[str, ...] = (), **variables: str) -> subprocess.Popen[str]:
        """Start a verb; `before` is a command that runs it (`unshare -n`)."""
        return subprocess.Popen(
            [*before, sys.executable, "-m", "recipes", *map(str, arguments)],
            cwd=self.root, env=self.variables | variables, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            # A background process ignores Ctrl-C, and its children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip

    def run(
        self, *arguments: object, before: tuple[str, ...] = (), **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a verb to its end, whatever that is; `before` as for `start`."""
        words, environment = list(map(str, arguments)), self.variables | variables
        if before or any(name.startswith("PYTHON") for name in environment):  # which Python reads when it starts
            with self.start(*words, before=before, **variables) as process:
                try:
                    stdout, stderr = process.communicate(timeout=60)
                except BaseException:
                    process.kill()
                    raise
            code = process.returncode
        else:
            code, stdout, stderr = forked.run(self.root, words, environment, seconds=60)
        assert "Traceback" not in stdout + stderr, stdout + stderr
        return subprocess.CompletedProcess(words, code, stdout, stderr)

    def succeed(self, *arguments: object, **options: Any) -> str:
        """Run a verb that must succeed and return what it printed."""
        done = self.run(*arguments, **options)
        assert done.returncode == 0, done.stdout + done.stderr
        self.check_whole()
        left = [*self.root.glob("build/*/.*"), *self.cache.glob("partial/*"), *self.cache.glob("uv/.tmp*")]
        assert not left, f"leftovers: {left}"
        return done.stdout

    def refuse(self, *arguments: object, naming: tuple[str, ...] = (), **options: Any) -> str:
        """Run a verb that must refuse with one sentence; what was complete stays, and nothing is half there."""
        before = self.contents()
        sentence = one_sentence(self.run(*arguments, **options), naming)
        after = self.check_whole()
        assert before.items() <= after.items(), f"gone or changed: {before.items() - after.items()}"
        return sentence

    def contents(self) -> dict[str, str]:
        """Every file under a final name, in the cache and in build/, by its hash; uv's own cache is uv's affair."""
        hashes: dict[str, str] = {}
        for place in (self.cache, self.root / "build"):
            for folder, below, names in os.walk(place):
                below[:] = [name for name in below if not name.startswith(".") and Path(folder, name) not in self.apart]
                paths = [Path(folder, name) for name in names if not name.startswith(".")]
                hashes |= {str(path): sha256_of(path) for path in paths if path.is_file() and path not in self.apart}
        return hashes

    @property
    def apart(self) -> set[Path]:
        """What may differ after a refusal."""
        return {*(self.cache / name for name in ("lock", "partial", "uv")), *self.root.glob("build/*/lock")}

    def check_whole(self) -> dict[str, str]:
        """Assert that nothing half-written lies under a final name, and return the contents."""
        for path in self.cache.glob("files/*/*"):
            assert sha256_of(path) == path.parent.name, f"{path} is half-written"
        for folder in self.cache.glob("trees/*"):
            record = json.loads((folder / "tree.json").read_text())
            tree = next(path for path in folder.iterdir() if path.is_dir())
            assert tree_hash(tree) == record["sha256"], f"{tree} is half-written"
        for folder in self.cache.glob("wheels/*"):
            assert Cache(self.cache).wheel(folder.name), f"{folder} is half-written"
        for environment in self.root.glob("build/*/env"):
            assert (environment / "fusebox" / "manifest.json").exists(), f"{environment} is half-made"
        return self.contents()

    @property
    def files(self) -> set[str]:
        """The downloads in the cache, as SHA256/NAME; `check_whole` has compared them with their hashes."""
        return {str(path.relative_to(self.cache / "files")) for path in self.cache.glob("files/*/*")}

    def result(self, target: str = "tiny") -> dict[str, Any]:
        """What a build made: the manifest without what was measured, and the hash of what was installed."""
        environment = self.root / "build" / target / "env"
        manifest: dict[str, Any] = json.loads((environment / "fusebox" / "manifest.json").read_text())
        for package in manifest["packages"].values():
            package["built_with"] = sorted(package["built_with"])
        return manifest | {"installed": tree_hash(next(environment.glob("lib/python*/site-packages")))}


def one_sentence(done: subprocess.CompletedProcess[str], naming: tuple[str, ...] = (), code: int = 2) -> str:
    """Assert that a command was refused in one line that names what it should, and a next step; return that line."""
    message = done.stderr.strip()
    assert done.returncode == code, f"exit code {done.returncode}: {done.stdout}{message}"
    assert "Traceback" not in done.stdout + message
    assert message.startswith("fusebox: ") and "\n" not in message and message.endswith("."), message
    assert NEXT_STEP.search(message), f"no next step: {message}"
    assert not re.search(r"\. [A-Z]", message), f"more than one sentence: {message}"
    for name in naming:
        assert name in message, f"{name!r} is not named: {message}"
    return message


def sdist(path: Path, files: Mapping[str, str | bytes]) -> str:
    """Write NAME-VERSION.tar.gz with these files in its one folder, and return its sha256."""
    with gzip.GzipFile(path, "wb", mtime=0) as file, tarfile.open(fileobj=file, mode="w") as tar:
        for name, text in files.items():
            data = text.encode() if isinstance(text, str) else text
            member = tarfile.TarInfo(f"{path.name.removesuffix('.tar.gz')}/{name}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return sha256_of(path)


def interpreter(version: str) -> str:
    """A Python of that version on this machine, also one of pyenv's that is not switched on."""
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    for path in [shutil.which(f"python{version}"), *sorted(root.glob(f"versions/{version}.*/bin/python"))]:
        if path and subprocess.run([str(path), "--version"], capture_output=True, check=False).returncode == 0:
            return str(path)
    pytest.skip(f"unproven here: no Python {version} on this machine")


def script(path: Path, text: str) -> Path:
    """An executable script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def spoil(path: Path) -> None:
    """Flip one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def entry(data: bytes) -> str:
    """Hash and size as a wheel's RECORD has them."""
    return f"sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip('=')},{len(data)}"


def wheel(
    folder: Path, name: str, requires: tuple[str, ...] = (), payload: bytes = b"value = 1\n", version: str = "1.0",
    more: Mapping[str, bytes] = MappingProxyType({}),
) -> Path:  # fmt: skip
    """Write NAME-VERSION-py3-none-any.whl, a distribution of one module and of the files in `more`."""
    path, info = folder / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    needed = "".join(f"Requires-Dist: {requirement}\n" for requirement in requires)
    files = {
        f"{name}.py": payload,
        **more,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needed}".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{file},{entry(data)}\n" for file, data in files.items()).encode()
    files[f"{info}/RECORD"] += f"{info}/RECORD,,\n".encode()
    with zipfile.ZipFile(path, "w") as archive:
        for file, data in files.items():
            archive.writestr(zipfile.ZipInfo(file), data)
    return path


# A build backend in the source itself, so that setuptools is not needed. TINY_SECONDS sets how long it takes.
BACKEND = """
import os, pathlib, time, zipfile

INFO = "tinypkg-1.0.dist-info"
META = {
    "METADATA": "Metadata-Version: 2.1\\nName: tinypkg\\nVersion: 1.0\\nRequires-Dist: tinydep\\n",
    "WHEEL": "Wheel-Version: 1.0\\nGenerator: test\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
}

def prepare_metadata_for_build_wheel(folder, config_settings=None):
    path = pathlib.Path(folder, INFO)
    path.mkdir()
    for name, text in META.items():
        (path / name).write_text(text)
    return INFO

def build_wheel(folder, config_settings=None, metadata_directory=None):
    pathlib.Path("building").touch()
    time.sleep(float(os.environ.get("TINY_SECONDS", "0")))
    files = {"tinypkg.py": pathlib.Path("tinypkg.py").read_text(), **{f"{INFO}/{n}": t for n, t in META.items()}}
    files[f"{INFO}/RECORD"] = "".join(f"{name},,\\n" for name in [*files, f"{INFO}/RECORD"])
    with zipfile.ZipFile(pathlib.Path(folder, "tinypkg-1.0-py3-none-any.whl"), "w") as archive:
        for name, text in files.items():
            archive.writestr(zipfile.ZipInfo(name), text)
    return "tinypkg-1.0-py3-none-any.whl"
"""
SOURCE = {
    "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n',
    "backend.py": BACKEND,
    "tinypkg.py": '"""Tiny."""\n\nvalue = 1\n',
}
# A compiled package.
SETUP = """
from setuptools import Extension, setup
flags = ["-O2", "-march=x86-64-v3"]
setup(name="tinypkg", version="1.0", install_requires=["tinydep"],
      ext_modules=[Extension("tinypkg", ["tinypkg.c"], extra_compile_args=flags)])
"""
MODULE = """
#include <Python.h>
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "tinypkg", 0, -1, 0};
PyMODINIT_FUNC PyInit_tinypkg(void) { return PyModule_Create(&definition); }
"""
PATCH = """\
Description: Say two
 > value is 1
Origin: vendor
Forwarded: not-needed, it is made up
Last-Update: 2026-11-21
X-Applies-To: ==1.0
---
--- a/tinypkg.py
+++ b/tinypkg.py
@@ -2,2 +2,2 @@

-value = 1
+value = 2
"""
TARGET = f"""
[tiny]
reason = "a test: everything that a target has, in two seconds"
python = "{PYTHON}"
cuda = "none"
glibc = "2.28"
sm = []
proves_on = ["x86-64"]
publish = false
unpublished = "a test"

[tiny.base]
wheels = {{ image = "python:{PYTHON}-slim", digest = "unresolved" }}
runtime = {{ image = "python:{PYTHON}-slim", digest = "unresolved" }}

[tiny.packages]
tinypkg = "1.0"
tinywheel = "1.0"
"""
RECIPE = """
module = "{name}"
summary = "a test's package"
{build}
[[release]]
version = "1.0"
kind = "{kind}"
{identity}
python = ">=3.8"
requires = {requires}
mib = {{ download = 1, installed = 1 }}
"""
BUILD = """
[build]
compiler = "{compiler}"
core_seconds = 6
mib_per_job = 100
requires = {requires}

[build.env]
TINY_SECONDS = "0"
"""


class Tiny(Checkout):
    """A checkout with one more target, `tiny`: a source with a patch, a wheel, a dependency.

    `shelf` is the folder in which pip's configuration finds their files.
    """

    def __init__(self, folder: Path, wheels: Path) -> None:
        super().__init__(folder)
        self.shelf = folder / "shelf"
        shutil.copytree(wheels, self.shelf, copy_function=os.link)
        self.variables["PIP_FIND_LINKS"] = str(self.shelf)
        self.targets.write_text(self.targets.read_text() + TARGET)
        self.plant("tinypkg", SOURCE, requires=("tinydep",))
        self.plant("tinywheel")
        (self.root / "patches" / "tinypkg").mkdir()
        (self.root / "patches" / "tinypkg" / "0001-say-two.patch").write_text(PATCH)
        wheel(self.shelf, "tinydep")
        self.lock()

    def plant(
        self, name: str, source: Mapping[str, str | bytes] | None = None, *, identity: str = "",
        requires: tuple[str, ...] = (), compiler: str = "none", build_requires: tuple[str, ...] = ("pip",),
    ) -> None:  # fmt: skip
        """Write a package's recipe, and its sdist (or its wheel, without a source) on the shelf."""
        if source and not identity:
            sha256 = sdist(self.shelf / f"{name}-1.0.tar.gz", source)
            identity = f'file = "{name}-1.0.tar.gz"\nsha256 = "{sha256}"'
        elif not identity:
            made = wheel(self.shelf, name)
            identity = f'file = "{made.name}"\nsha256 = "{sha256_of(made)}"'
        kind = "wheel" if "none-any.whl" in identity else "source"
        build = BUILD.format(compiler=compiler, requires=json.dumps(build_requires)) if kind == "source" else ""
        text = RECIPE.format(name=name, build=build, kind=kind, identity=identity, requires=json.dumps(requires))
        self.recipe(name).write_text(text)

    def copy(self, folder: Path) -> Tiny:
        """The same with another checkout and an empty cache; the shelf is shared."""
        other = copy.copy(self)
        other.root, other.cache = folder / "checkout", folder / "cache"
        other.variables = self.variables | {"FUSEBOX_CACHE": str(other.cache)}
        shutil.copytree(self.root, other.root, ignore=shutil.ignore_patterns("build"))
        return other

    def lock(self, *names: str) -> None:
        """Write the lock: pip, the dependency, and other wheels of the shelf by their names."""
        lines = []
        for name in sorted({"pip", "tinydep", *names}):
            path = next(self.shelf.glob(f"{name}-*.whl"))
            size = path.stat().st_size
            lines.append(f"{name}=={path.name.split('-')[1]} --hash=sha256:{sha256_of(path)}  # {size} bytes\n")
        (self.root / "recipes" / "lock" / "tiny.txt").write_text("".join(["# inputs: none\n", *lines]))
        self.renew_inputs()

    def renew_inputs(self) -> None:
        """Write into the lock, and that of a toolkit, which inputs they would now be written from."""
        now = plan(Catalogue(self.root), "tiny")
        versions = [(artifact.name, artifact.version) for artifact in now.locked.artifacts]
        digests = {now.lock: resolve.inputs(now), now.toolkit_lock: resolve.toolkit_inputs(now, versions)}
        for lock, digest in digests.items():
            if lock:
                text = lock.path.read_text()
                lock.path.write_text(text.replace(f"# inputs: {lock.inputs}\n", f"# inputs: {digest}\n"))

    @property
    def declared(self) -> Target:
        """The target as targets.toml has it now."""
        return Catalogue(self.root).targets["tiny"]

    @property
    def pinned(self) -> str:
        """The sha256 of tinypkg's sdist."""
        return sha256_of(self.shelf / "tinypkg-1.0.tar.gz")


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    """A temporary copy of the checkout without evidence; pip is configured to find nothing."""
    return Checkout(tmp_path)


@pytest.fixture
def proved(tmp_path: Path) -> Checkout:
    """The same with evidence."""
    return Checkout(tmp_path, with_evidence=True)


@pytest.fixture
def room(tmp_path: Path) -> PlantedRoom:
    """The rules of smoke_tests/ without any claim."""
    return PlantedRoom(tmp_path)


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The two wheels that builds need, pip and setuptools, from pip's configured index."""
    folder = tmp_path_factory.mktemp("wheels")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "-d",
        str(folder),
    ]
    subprocess.run([*command, f"pip=={_version('pip')}", "setuptools"], check=True)
    return folder


def _version(name: str) -> str:
    from importlib.metadata import version

    return version(name)


@pytest.fixture
def tiny(tmp_path: Path, wheels: Path) -> Tiny:
    """A temporary copy of the checkout with the target `tiny` planted; pip is configured to find its files."""
    return Tiny(tmp_path, wheels)


@pytest.fixture
def compiled(tiny: Tiny) -> Tiny:
    """`tiny` with one compiled package."""
    project = '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
    source = {"setup.py": SETUP, "tinypkg.c": MODULE, "pyproject.toml": project}
    (tiny.root / "patches" / "tinypkg" / "0001-say-two.patch").unlink()
    tiny.plant("tinypkg", source, requires=("tinydep",), compiler="c++", build_requires=("setuptools",))
    tiny.lock("setuptools")
    return tiny


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, wheels: Path) -> Tiny:
    """A checkout in which `tiny` was built without any fault; tests compare with it and leave it as it is.

    A Python that they run in it needs -B, or else it writes bytecode there.
    """
    built = Tiny(tmp_path_factory.mktemp("undisturbed"), wheels)
    built.succeed("build", "tiny")
    return built


Fault = Callable[[BaseHTTPRequestHandler, bytes], None]


class Index(ThreadingHTTPServer):
    """A package index on this machine, over a folder: the simple API. `faults` spoil the answers for some names."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.faults, self.asked = folder, dict[str, Fault](), list[str]()
        self.ended = threading.Event()
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/simple/"

    def serve(self, checkout: Checkout, **settings: str) -> None:
        """Make this the one index of the checkout's pip configuration."""
        for name in ("PIP_FIND_LINKS", "PIP_NO_INDEX"):
            checkout.variables.pop(name, None)
        checkout.variables |= {"PIP_INDEX_URL": self.url, "PIP_RETRIES": "0", **settings}


class _Handler(BaseHTTPRequestHandler):
    server: Index

    def do_GET(self) -> None:
        name = self.path.rstrip("/").rpartition("/")[2]
        self.server.asked.append(name)
        if self.path.startswith("/simple/"):
            files = sorted(path.name for path in self.server.folder.glob(f"{name.replace('-', '_')}-*"))
            body = "".join(f'<a href="/files/{file}">{file}</a>\n' for file in files).encode()
        else:
            body = (self.server.folder / name).read_bytes()
        self.server.faults.get(name, answer)(self, body)

    def log_message(self, *_: object) -> None:
        """Keep the test's output clean."""


def answer(handler: BaseHTTPRequestHandler, body: bytes, length: int | None = None) -> None:
    """A sound answer, or one that promises `length` bytes."""
    handler.send_response(200)
    handler.send_header("Content-Type", "text/html" if handler.path.startswith("/simple/") else "application/zip")
    handler.send_header("Content-Length", str(len(body) if length is None else length))
    handler.end_headers()
    handler.wfile.write(body)


def throttled(seconds: float) -> Fault:
    """The whole answer, in ten parts over that time."""

    def send(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        step = len(body) // 10 + 1
        answer(handler, b"", len(body))
        for start in range(0, len(body), step):
            time.sleep(seconds / 10)
            handler.wfile.write(body[start : start + step])

    return send


@pytest.fixture
def index(tmp_path: Path, tiny: Tiny) -> Iterator[Index]:
    """An index that serves the shelf of `tiny`, which is configured to use it."""
    with Index(tiny.shelf) as server:
        server.serve(tiny)
        yield server
        server.ended.set()
        server.shutdown()


@pytest.fixture(scope="session")
def engine() -> docker.DockerClient:
    """The engine that is running."""
    try:
        return image.engine()
    except Refusal as refusal:
        pytest.skip(f"unproven here: {refusal}")


@pytest.fixture
def pushed(engine: docker.DockerClient) -> Iterator[tuple[str, str]]:
    """An image of one file in the registry on this machine, and its digest."""
    name, archive = f"{REGISTRY}/fusebox/{uuid.uuid4().hex[:8]}", io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        member = tarfile.TarInfo("file")
        tar.addfile(member, io.BytesIO())
    engine.api.import_image_from_data(archive.getvalue(), repository=name, tag="1")
    output = engine.images.push(name, tag="1")
    if "digest: sha256:" not in output:
        pytest.skip(f"unproven here: no registry on {REGISTRY}")
    yield f"{name}:1", output.partition("digest: ")[2].partition(" ")[0]
    engine.images.remove(f"{name}:1")


@pytest.fixture
def standin(engine: docker.DockerClient) -> str:
    """An image with Python that stands for every base."""
    reference = os.environ.get("FUSEBOX_STANDIN")
    if not reference:
        pytest.skip("unproven here: FUSEBOX_STANDIN names no image that stands for the bases")
    return reference


@pytest.fixture
def crane(pushed: tuple[str, str]) -> None:
    """What publishes, and a registry that takes it."""
    if shutil.which("crane") is None:
        pytest.skip("unproven here: crane is not installed")


def oci_image(folder: Path, content: bytes = b"", made_by: str = "", /, **labels: str) -> tuple[Path, str]:
    """An OCI layout with one image of one layer, by default a small one that no registry has yet, and its digest."""
    content = content or uuid.uuid4().bytes
    layer, held = gzip.compress(content, mtime=0), f"sha256:{hashlib.sha256(content).hexdigest()}"
    config: dict[str, Any] = {"architecture": "amd64", "os": "linux", "rootfs": {"type": "layers", "diff_ids": [held]}}
    config |= {"config": {"Labels": labels}, "history": [{"created_by": made_by}]}
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def put(data: bytes, kind: str) -> dict[str, object]:
        digest = hashlib.sha256(data).hexdigest()
        (blobs / digest).write_bytes(data)
        return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": f"sha256:{digest}", "size": len(data)}

    manifest = {
        "schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": put(json.dumps(config).encode(), "config.v1+json"), "layers": [put(layer, "layer.v1.tar+gzip")],
    }  # fmt: skip
    described = put(json.dumps(manifest).encode(), "manifest.v1+json")
    (folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [described]}))
    (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return folder, str(described["digest"])


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A private key and its public one."""
    if shutil.which("cosign") is None:
        pytest.skip("unproven here: cosign is not installed")
    return made_key(tmp_path_factory.mktemp("keys"), "ours")


def made_key(folder: Path, name: str) -> tuple[Path, Path]:
    """A new key pair of cosign without a password: the private file and the public one."""
    command = ["cosign", "generate-key-pair", f"--output-key-prefix={folder / name}"]
    subprocess.run(command, env={**os.environ, "COSIGN_PASSWORD": ""}, check=True, capture_output=True)
    return folder / f"{name}.key", folder / f"{name}.pub"
