"""Breakages made on purpose: each runs what fails, in a folder of its own, and returns what that printed.

`QUICK` take less than a second of a core each, as do NEEDS_MOUNTS; `SLOW` need a torch or an nvcc, which a `Shelf` has.
Beside each stand the words that the cause must contain.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from recipes.tests.conftest import Index, answer, script, sdist, wheel

NOBODY = 65534  # the user that owns nothing
Breakage = Callable[[Path], str]


class Case(NamedTuple):
    """How something is broken, and what must be said of it."""

    broken: Breakage
    cause: str


QUICK: dict[str, Case] = {}


def quick(name: str, cause: str) -> Callable[[Breakage], Breakage]:
    """Register a breakage under a name, with words of its cause."""

    def register(broken: Breakage) -> Breakage:
        assert name not in QUICK
        QUICK[name] = Case(broken, cause)
        return broken

    return register


def failing(folder: Path, *command: object, **variables: str) -> str:
    """What a command prints that must fail."""
    return failing_after(None, folder, *command, **variables)


def failing_after(before: Callable[[], None] | None, folder: Path, *command: object, **variables: str) -> str:
    """The same, where the process does something else before."""
    done = run(folder, command, variables, before)
    text = done.stdout.decode(errors="replace")
    assert done.returncode != 0, f"it did not fail: {command}\n{text}"
    return text


def made(folder: Path, *command: object, **variables: str) -> str:
    """What a command prints that must succeed."""
    done = run(folder, command, variables)
    text = done.stdout.decode(errors="replace")
    assert done.returncode == 0, text
    return text


def run(
    folder: Path, command: Iterable[object], variables: Mapping[str, str], before: Callable[[], None] | None = None
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        list(map(str, command)), cwd=folder, env=clean_environment() | {"LC_ALL": "C.UTF-8", **variables},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, preexec_fn=before, timeout=600,
        check=False,
    )  # fmt: skip


def clean_environment() -> dict[str, str]:
    """The variables of this process without those that say where pip, Python, git and loaders look."""
    ours = ("PIP_", "UV_", "PYTHON", "GIT_", "LD_", "CC", "CXX", "CPATH", "LIBRARY_PATH", "CUDA")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        variables.pop(name, None)
        variables.pop(name.upper(), None)
    return variables | {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_CACHE_DIR": "1"}


def limited(which: int, amount: int) -> Callable[[], None]:
    """Run in a process before its command: a limit of the kernel."""
    return lambda: resource.setrlimit(which, (amount, amount))


# --- linkers, compilers and loaders


def library(
    path: Path, text: str, *links: object, soname: str | None = None, versions: str = "", more: tuple[str, ...] = ()
) -> Path:
    """Compile C into a shared library. `versions` is a version script; `links` are options of the linker."""
    path.parent.mkdir(parents=True, exist_ok=True)
    source = path.with_name(path.name + ".c")
    source.write_text(text)
    options = [f"-Wl,-soname,{soname or path.name}", *more]
    if versions:
        script = path.with_name(path.name + ".map")
        script.write_text(versions)
        options.append(f"-Wl,--version-script={script}")
    made(path.parent, "c++", "-x", "c", "-shared", "-fPIC", *options, source, "-x", "none", "-o", path, *links)
    return path


def loaded(folder: Path, path: Path, **variables: str) -> str:
    """What Python says of a library that it cannot load."""
    return failing(folder, sys.executable, "-c", f"import ctypes; ctypes.CDLL({str(path)!r})", **variables)


def without(folder: Path, name: str) -> str:
    """Load an extension that needs a library of this name, which no place has."""
    needed = library(folder / "there" / name, "int needed(void) { return 1; }")
    # Without the system's folders, which have some of these libraries on a machine with a driver.
    text = "int needed(void); int extension(void) { return needed(); }"
    extension = library(folder / "extension.so", text, needed, more=("-Wl,-z,nodefaultlib",))
    needed.unlink()
    return loaded(folder, extension)


def older(folder: Path, name: str, symbol: str, version: str = "") -> str:
    """Load an extension with an older library of this name, which lacks the symbol: LD_LIBRARY_PATH has it first."""
    script = f"{version} {{ global: *; }};" if version else ""
    new = library(folder / "new" / name, f"int {symbol}(void) {{ return 1; }}", versions=script)
    library(folder / "old" / name, "int other(void) { return 1; }", versions=script)
    text = f"int {symbol}(void); int extension(void) {{ return {symbol}(); }}"
    extension = library(folder / "extension.so", text, new, more=("-Wl,-z,now",))
    return loaded(folder, extension, LD_LIBRARY_PATH=str(folder / "old"))


def linked(folder: Path, *names: str) -> str:
    """Link with libraries that the linker does not find, whatever this machine has."""
    made(folder, "c++", "-x", "c", "-c", os.devnull, "-o", folder / "empty.o")
    return failing(folder, "ld", "-shared", "-nostdlib", "empty.o", *(f"-l{name}" for name in names))


def included(folder: Path, header: str) -> str:
    """Compile a file that includes a header which no place has, whatever this machine has."""
    (folder / "extension.cpp").write_text(f"#include <{header}>\n")
    return failing(folder, "c++", "-nostdinc", "-I", folder, "-c", "extension.cpp")


@quick("no stub of libcuda for the linker", "does not find libcuda.so")
def _(folder: Path) -> str:
    return linked(folder, "cuda")


@quick("no libcurand for the linker", "does not find libcurand.so")
def _(folder: Path) -> str:
    return linked(folder, "curand")


@quick("no libaio for the linker", "does not find libaio.so")
def _(folder: Path) -> str:
    return linked(folder, "aio")


@quick("no cusparse.h", "lacks cusparse.h")
def _(folder: Path) -> str:
    return included(folder, "cusparse.h")


@quick("no cudnn.h", "headers of cuDNN")
def _(folder: Path) -> str:
    return included(folder, "cudnn.h")


@quick("no nccl.h", "headers of NCCL")
def _(folder: Path) -> str:
    return included(folder, "nccl.h")


@quick("no Python.h", "Python's headers")
def _(folder: Path) -> str:
    return included(folder, "Python.h")


@quick("no mpi.h", "MPI")
def _(folder: Path) -> str:
    return included(folder, "mpi.h")


@quick("a submodule that was not fetched", "csrc/cutlass")
def _(folder: Path) -> str:
    cutlass, flash = folder / "cutlass", folder / "flash-attention"
    identity = ("-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "protocol.file.allow=always")
    for tree, file in ((cutlass, "include/cute/tensor.hpp"), (flash, "flash.cpp")):
        (tree / file).parent.mkdir(parents=True)
        (tree / file).write_text("#include <cute/tensor.hpp>\n" if tree == flash else "")
        made(tree, "git", "init", "--quiet")
        if tree == flash:
            made(tree, "git", *identity, "submodule", "--quiet", "add", str(cutlass), "csrc/cutlass")
        made(tree, "git", "add", "--all")
        made(tree, "git", *identity, "commit", "--quiet", "--message", "x")
    made(folder, "git", "clone", "--quiet", flash, "clone")
    return failing(folder / "clone", "c++", "-nostdinc", "-I", ".", "-I", "csrc/cutlass/include", "-c", "flash.cpp")


@quick("a compiler that is killed", "killed")
def _(folder: Path) -> str:
    (folder / "extension.cpp").write_text("")
    return failing(folder, "c++", "-wrapper", "sh,-c,kill -9 $$", "-c", "extension.cpp")


@quick("a compiler that is too old", "older than c++99")
def _(folder: Path) -> str:
    return failing(folder, "c++", "-std=c++99", "-c", os.devnull)


@quick("a program for another CPU", "lacks instructions")
def _(folder: Path) -> str:
    (folder / "program.cpp").write_text('int main() { asm("ud2"); }\n')
    made(folder, "c++", "program.cpp", "-o", "program")
    return failing(folder, "bash", "-c", "./program; exit $?")


@quick("a compiler without memory", "memory")
def _(folder: Path) -> str:
    (folder / "extension.cpp").write_text('#include <regex>\n#include <map>\nstd::regex all("a");\n')
    return failing_after(limited(resource.RLIMIT_AS, 90 * 2**20), folder, "c++", "-c", "extension.cpp")


@quick("no C compiler", "C compiler")
def _(folder: Path) -> str:
    (folder / "tiny.c").write_text("")
    (folder / "setup.py").write_text(
        "from setuptools import Extension, setup\nsetup(name='tiny', ext_modules=[Extension('tiny', ['tiny.c'])])\n"
    )
    return failing(folder, sys.executable, "setup.py", "build_ext", PATH=str(folder), CC="gcc")


@quick("no libcuda.so.1", "NVIDIA's driver")
def _(folder: Path) -> str:
    return without(folder, "libcuda.so.1")


@quick("no libcudart.so.12", "another CUDA")
def _(folder: Path) -> str:
    return without(folder, "libcudart.so.12")


@quick("no libcudnn.so.9", "cuDNN 9")
def _(folder: Path) -> str:
    return without(folder, "libcudnn.so.9")


@quick("no libnccl.so.2", "NCCL")
def _(folder: Path) -> str:
    return without(folder, "libnccl.so.2")


@quick("no libmpi.so.40", "MPI")
def _(folder: Path) -> str:
    return without(folder, "libmpi.so.40")


@quick("an extension for CUDA beside a torch for CPUs", "for CPUs")
def _(folder: Path) -> str:
    return without(folder, "libc10_cuda.so")


@quick("no libgomp.so.1", "libgomp1")
def _(folder: Path) -> str:
    return without(folder, "libgomp.so.1")


@quick("a library that is cut off", "not a whole library")
def _(folder: Path) -> str:
    path = library(folder / "extension.so", "int f(void) { return 1; }")
    path.write_bytes(path.read_bytes()[:40])
    return loaded(folder, path)


@quick("an older libcudart first", "libcudart")
def _(folder: Path) -> str:
    return older(folder, "libcudart.so.12", "cudaGetDriverEntryPointByVersion", "libcudart.so.12")


@quick("an older NCCL first", "older than the one")
def _(folder: Path) -> str:
    return older(folder, "libnccl.so.2", "ncclCommWindowRegister")


@quick("two copies of cuDNN", "cuDNN")
def _(folder: Path) -> str:
    return older(folder, "libcudnn_graph.so.9", "_ZN5cudnn7backend10Descriptor6createEv", "libcudnn_graph.so.9")


@quick("an older libnvJitLink first", "libnvJitLink")
def _(folder: Path) -> str:
    return older(folder, "libnvJitLink.so.12", "__nvJitLinkAddData_12_9", "libnvJitLink.so.12")


@quick("another cuBLASLt first", "cuBLASLt")
def _(folder: Path) -> str:
    return older(folder, "libcublasLt.so.12", "cublasLtGetEnvironmentMode", "libcublasLt.so.12")


@quick("an older libstdc++ first", "libstdc++.so.6")
def _(folder: Path) -> str:
    (folder / "program.cpp").write_text('#include <iostream>\nint main() { std::cout << std::string("x"); }\n')
    made(folder, "c++", "program.cpp", "-o", "program")
    library(folder / "old" / "libstdc++.so.6", "int other(void) { return 1; }", versions="GLIBCXX_3.4 { global: *; };")
    return failing(folder, "./program", LD_LIBRARY_PATH=str(folder / "old"))


@quick("a wheel for a newer C library", "C library 2.99")
def _(folder: Path) -> str:
    newer = library(
        folder / "newer" / "libc.so.6", "int future(void) { return 1; }", versions="GLIBC_2.99 { global: *; };",
        more=("-nostdlib",),
    )  # fmt: skip
    text = "int future(void); int extension(void) { return future(); }"
    return loaded(folder, library(folder / "extension.so", text, newer, more=("-nostdlib",)))


@quick("a compiler of the other C++ ABI", "C++ ABI")
def _(folder: Path) -> str:
    """A library as torch is compiled, and an extension with the ABI of before 2015."""
    text = "#include <string>\nnamespace c10 { struct Error { Error(std::string); }; %s }\n"
    (folder / "torch.cpp").write_text(text % "Error::Error(std::string) {}")
    (folder / "extension.cpp").write_text(text % "" + 'void fail() { c10::Error error("x"); }\n')
    made(folder, "c++", "-shared", "-fPIC", "-D_GLIBCXX_USE_CXX11_ABI=1", "torch.cpp", "-o", "libc10.so")
    made(
        folder, "c++", "-shared", "-fPIC", "-D_GLIBCXX_USE_CXX11_ABI=0", "-Wl,-z,now", "extension.cpp", "libc10.so",
        f"-Wl,-rpath,{folder}", "-o", "extension.so",
    )  # fmt: skip
    return loaded(folder, folder / "extension.so")


# --- pip, setuptools and Python


def pip(folder: Path, *arguments: object, **variables: str) -> str:
    """What a pip says that fails to install into a folder."""
    return failing(folder, sys.executable, "-m", "pip", "install", "--target", "site", *arguments, **variables)


@quick("a wheel that is cut off", "cut off")
def _(folder: Path) -> str:
    path = wheel(folder, "tiny")
    path.write_bytes(path.read_bytes()[:-200])
    return pip(folder, "--no-index", path)


@quick("a wheel of another hash", "cut off")
def _(folder: Path) -> str:
    wheel(folder, "tiny")
    (folder / "lock.txt").write_text(f"tiny==1.0 --hash=sha256:{'0' * 64}\n")
    return pip(folder, "--no-index", "--find-links", folder, "-r", "lock.txt")


@quick("a download that ends early", "cut off")
def _(folder: Path) -> str:
    path = wheel(folder, "tiny", payload=os.urandom(4096))
    with Index(folder) as index:
        index.faults[path.name] = lambda handler, body: answer(handler, body[:1000], len(body))
        text = pip(folder, "--index-url", f"{index.url}/simple", "--retries", "0", "--resume-retries", "0", "tiny")
        index.ended.set()
        index.shutdown()
    return text


@quick("an option that pip no longer has", "--global-option")
def _(folder: Path) -> str:
    return pip(folder, "--no-index", "--no-build-isolation", "--global-option=--cpp_ext", folder)


def backend(folder: Path, text: str) -> Path:
    """A source whose build runs this text."""
    source = folder / "tiny-1.0.tar.gz"
    system = "[build-system]\nrequires = []\nbuild-backend = 'backend'\nbackend-path = ['.']\n"
    sdist(source, {"pyproject.toml": system, "backend.py": text, "PKG-INFO": "Name: tiny\nVersion: 1.0\n"})
    return source


@quick("a build that does not see torch", "environment of its own")
def _(folder: Path) -> str:
    return pip(folder, "--no-index", backend(folder, "import torch\n"))


@quick("a build that needs packaging", "imports packaging")
def _(folder: Path) -> str:
    return pip(folder, "--no-index", backend(folder, "from packaging.version import parse\n"))


@quick("a build that needs wheel", "wheel is not installed")
def _(folder: Path) -> str:
    return pip(folder, "--no-index", backend(folder, "from wheel.bdist_wheel import bdist_wheel\n"))


@quick("a setuptools without pkg_resources", "removed pkg_resources")
def _(folder: Path) -> str:
    return failing(folder, sys.executable, "-S", "-c", "from pkg_resources import packaging")


def of_another_python(folder: Path) -> Path:
    """A wheel whose name says that it is for Python 2.7."""
    return wheel(folder, "tiny").rename(folder / "tiny-1.0-cp27-cp27m-manylinux1_x86_64.whl")


def contradicting(folder: Path) -> None:
    """The wheels of two packages, left and right, that need different versions of a third."""
    for name, needs in (("left", "tiny==1.0"), ("right", "tiny==2.0")):
        wheel(folder, name, requires=(needs,))
    wheel(folder, "tiny")
    wheel(folder, "tiny", version="2.0")


@quick("a wheel for another Python", "another Python")
def _(folder: Path) -> str:
    return pip(folder, "--no-index", of_another_python(folder))


@quick("a version that the index does not have", "has no such version")
def _(folder: Path) -> str:
    wheel(folder, "tiny")
    return pip(folder, "--no-index", "--find-links", folder, "tiny==2.0")


@quick("two packages that need different versions", "contradict")
def _(folder: Path) -> str:
    contradicting(folder)
    return pip(folder, "--no-index", "--find-links", folder, "left", "right")


@quick("a proxy that does not answer", "proxy")
def _(folder: Path) -> str:
    nowhere = "http://127.0.0.1:9"
    return pip(folder, "--retries", "1", "--index-url", "https://127.0.0.1:9/simple", "tiny", https_proxy=nowhere)


@quick("a proxy that asks for a password", "proxy")
def _(folder: Path) -> str:
    with Index(folder) as proxy:  # which does not support CONNECT
        text = pip(folder, "--retries", "1", "--index-url", "https://127.0.0.1:9/simple", "tiny", https_proxy=proxy.url)
        proxy.ended.set()
        proxy.shutdown()
    return text


def uv(folder: Path, *arguments: object, **variables: str) -> str:
    """What uv says that fails to install into an environment."""
    command = (sys.executable, "-m", "uv", "--no-config", "--cache-dir", folder / "cache")
    made(folder, *command, "venv", "--quiet", "--python", sys.executable, "env")
    return failing(folder, *command, "pip", "install", "--python", "env", *arguments, **variables)


@quick("a wheel that is cut off, for uv", "cut off")
def _(folder: Path) -> str:
    path = wheel(folder, "tiny")
    path.write_bytes(path.read_bytes()[:-200])
    return uv(folder, "--offline", path)


@quick("a wheel of another hash, for uv", "cut off")
def _(folder: Path) -> str:
    wheel(folder, "tiny")
    (folder / "lock.txt").write_text(f"tiny==1.0 --hash=sha256:{'0' * 64}\n")
    return uv(folder, "--no-index", "--find-links", folder, "--require-hashes", "-r", "lock.txt")


@quick("a wheel for another Python, for uv", "another Python")
def _(folder: Path) -> str:
    return uv(folder, "--offline", of_another_python(folder))


@quick("a version that is not there, for uv", "has no such version")
def _(folder: Path) -> str:
    wheel(folder, "tiny")
    return uv(folder, "--no-index", "--find-links", folder, "tiny==2.0")


@quick("packages that need different versions, for uv", "contradict")
def _(folder: Path) -> str:
    contradicting(folder)
    return uv(folder, "--no-index", "--find-links", folder, "left", "right")


@quick("an index that does not answer, for uv", "nothing answers")
def _(folder: Path) -> str:
    return uv(folder, "--index-url", "http://127.0.0.1:9/simple", "tiny", UV_HTTP_RETRIES="0")


@quick("a host without a name", "name of the host")
def _(folder: Path) -> str:
    return failing(folder, "git", "clone", "--quiet", "https://nowhere.invalid/owner/name", GIT_TERMINAL_PROMPT="0")


@quick("a checkout of another user", "another user")
def _(folder: Path) -> str:
    made(folder, "git", "init", "--quiet", "tree")
    return failing(folder / "tree", "git", "status", GIT_TEST_ASSUME_DIFFERENT_OWNER="1")


@quick("a file named torch.py", "torch.py")
def _(folder: Path) -> str:
    (folder / "torch.py").write_text("")
    return failing(folder, sys.executable, "-c", "import torch.nn")


@quick("an older package in ~/.local", "~/.local")
def _(folder: Path) -> str:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = folder / ".local" / "lib" / version / "site-packages"
    site.mkdir(parents=True)
    (site / "typing_extensions.py").write_text("class Literal: pass\n")
    base = getattr(sys, "_base_executable", sys.executable)  # an environment does not look there
    return failing(folder, base, "-c", "from typing_extensions import TypeIs", HOME=str(folder))


@quick("an older package in PYTHONPATH", "PYTHONPATH")
def _(folder: Path) -> str:
    (folder / "other").mkdir()
    (folder / "other" / "typing_extensions.py").write_text("class Literal: pass\n")
    return failing(
        folder, sys.executable, "-c", "from typing_extensions import TypeIs", PYTHONPATH=str(folder / "other")
    )


# --- files, memory and limits


def python(folder: Path, text: str, before: Callable[[], None] | None = None) -> str:
    return failing_after(before, folder, sys.executable, "-c", text)


@quick("a rename to another file system", "another file system")
def _(folder: Path) -> str:
    (folder / "wheel").write_text("")
    return python(folder, f"import os; os.rename('wheel', '/dev/shm/fusebox-{os.getpid()}')")


@quick("a full disk", "disk is full")
def _(folder: Path) -> str:
    return python(folder, "open('/dev/full', 'w', buffering=1).write('x\\n')")


@quick("too many open files", "files open")
def _(folder: Path) -> str:
    text = "files = [open('/dev/null') for _ in range(100)]"
    return python(folder, text, before=limited(resource.RLIMIT_NOFILE, 64))


@quick("a folder of another user", "may not write")
def _(folder: Path) -> str:
    """The user is not root, who may write everywhere."""

    def become_nobody() -> None:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)

    return failing_after(become_nobody, Path("/"), "mkdir", "/usr/lib/fusebox")


@quick("a port in use", "port")
def _(folder: Path) -> str:
    return python(folder, "import socket as s; a = s.create_server(('127.0.0.1', 0)); s.create_server(a.getsockname())")


def mounted(folder: Path, options: str, command: str) -> str:
    """Run a command in a folder that is a file system of its own, with these options of mount."""
    place = folder / "place"
    place.mkdir()
    script = f"mount -t tmpfs -o {options} tmpfs {place} && cd {place} && {command}"
    return failing(folder, "unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script)


def mounted_noexec(folder: Path) -> str:
    library(folder / "extension.so", "int f(void) { return 1; }")
    text = f"import ctypes; ctypes.CDLL('{folder}/place/extension.so')"
    return mounted(folder, "noexec", f'cp ../extension.so . && {sys.executable} -c "{text}"')


# Cases that need a user namespace, in which a user may mount file systems.
NEEDS_MOUNTS: dict[str, Case] = {
    "a file system that is full": Case(
        lambda folder: mounted(folder, "size=64k", "head -c 1000000 /dev/zero > wheel"), "disk is full"
    ),
    "a file system that is read-only": Case(lambda folder: mounted(folder, "ro", "mkdir build"), "read-only"),
    "temporary files that may not be run": Case(mounted_noexec, "noexec"),
}


# --- torch and the CUDA toolkit


@dataclass(frozen=True)
class Shelf:
    """What slow breakages are made of: a Python with torch and NumPy 2, nvcc, headers of an older torch, NumPy 1."""

    python: Path
    toolkit: Path
    older_torch: Path
    older_numpy: Path

    @property
    def site(self) -> Path:
        """The site-packages of the Python with torch."""
        return next(self.python.parents[1].glob("lib/python3.*/site-packages"))

    def runs(self, folder: Path, text: str, **variables: str) -> str:
        """What the Python with torch prints of a program that fails."""
        return failing(folder, self.python, "-c", text, HOME=str(folder), **variables)

    def headers(self, folder: Path) -> tuple[str, ...]:
        """The options with which a file finds Python's headers and those of a torch."""
        asked = "import sysconfig; print(sysconfig.get_path('include'))"
        return "-I", made(folder, self.python, "-c", asked).strip(), "-I", str(folder / "include")


SLOW: dict[str, tuple[Callable[[Path, Shelf], str], str]] = {}


def slow(name: str, cause: str) -> Callable[[Callable[[Path, Shelf], str]], Callable[[Path, Shelf], str]]:
    """Register a slow breakage under a name, with words of its cause."""

    def register(broken: Callable[[Path, Shelf], str]) -> Callable[[Path, Shelf], str]:
        assert name not in SLOW
        SLOW[name] = broken, cause
        return broken

    return register


def extension(folder: Path, torch: Path, text: str, *options: str) -> Path:
    """Compile C++ against the headers of a torch."""
    (folder / "extension.cpp").write_text(text)
    made(
        folder, "c++", "-O0", "-shared", "-fPIC", "-I", torch / "include", *options, "extension.cpp",
        "-o", folder / "extension.so",
    )  # fmt: skip
    return folder / "extension.so"


LOAD = "import torch, ctypes, os; ctypes.CDLL('{}', os.RTLD_NOW)"


@slow("a wheel of another torch", "another torch")
def _(folder: Path, shelf: Shelf) -> str:
    """A function of c10 whose argument's type has another namespace by now."""
    text = "#include <c10/core/DeviceType.h>\nstd::string f(c10::DeviceType x) { return c10::DeviceTypeName(x, 1); }\n"
    return shelf.runs(folder, LOAD.format(extension(folder, shelf.older_torch, text, "-std=c++17")))


@slow("a wheel of the other C++ ABI", "C++ ABI")
def _(folder: Path, shelf: Shelf) -> str:
    text = '#include <c10/util/Exception.h>\nvoid f(int n) { TORCH_CHECK(n > 0, "few: ", n); }\n'
    options = ("-std=c++20", "-D_GLIBCXX_USE_CXX11_ABI=0")
    return shelf.runs(folder, LOAD.format(extension(folder, shelf.site / "torch", text, *options)))


@slow("C++14 with headers of C++17", "need C++17")
def _(folder: Path, shelf: Shelf) -> str:
    (folder / "extension.cpp").write_text("#include <ATen/ATen.h>\n")
    return failing(
        folder, "c++", "-std=c++14", "-Wfatal-errors", "-fsyntax-only", "-I", shelf.site / "torch" / "include",
        "extension.cpp",
    )  # fmt: skip


@slow("no ninja", "ninja is not installed")
def _(folder: Path, shelf: Shelf) -> str:
    (folder / "extension.cpp").write_text("")
    text = "from torch.utils.cpp_extension import load; load('extension', ['extension.cpp'])"
    return shelf.runs(folder, text, PATH=str(folder))


@slow("no CUDA_HOME", "no CUDA toolkit")
def _(folder: Path, shelf: Shelf) -> str:
    text = (
        "from torch.utils import cpp_extension as c; c.CUDA_HOME = None; c.CUDAExtension('extension', ['extension.cu'])"
    )
    return shelf.runs(folder, text)


@slow("an nvcc of another CUDA than torch's", "torch is compiled with CUDA 11.8")
def _(folder: Path, shelf: Shelf) -> str:
    text = (
        f"import torch; from torch.utils import cpp_extension as c; c.CUDA_HOME = '{shelf.toolkit}'; "
        "torch.version.cuda = '11.8'; c._check_cuda_version('c++', c.TorchVersion('11.4'))"
    )
    return shelf.runs(folder, text)


@slow("torch.compile without a C++ compiler", "C++ compiler")
def _(folder: Path, shelf: Shelf) -> str:
    return shelf.runs(folder, "import torch; torch.compile(lambda x: x.sin() + 1)(torch.ones(8))", PATH=str(folder))


@slow("a GPU with a torch for CPUs", "build for CPUs")
def _(folder: Path, shelf: Shelf) -> str:
    return shelf.runs(folder, "import torch; torch.ones(1, device='cuda')")


@slow("little shared memory", "shared memory")
def _(folder: Path, shelf: Shelf) -> str:
    (folder / "load.py").write_text(
        "import torch\n"
        "data = torch.utils.data.TensorDataset(torch.zeros(64, 65536))\n"
        "for batch in torch.utils.data.DataLoader(data, batch_size=64, num_workers=1): pass\n"
    )
    script = f"mount -t tmpfs -o size=64k tmpfs /dev/shm && {shelf.python} load.py"
    return failing(folder, "unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script)


@slow("an extension for NumPy 1", "NumPy 2 is installed")
def _(folder: Path, shelf: Shelf) -> str:
    text = (
        "#include <Python.h>\n#include <numpy/arrayobject.h>\n"
        'static struct PyModuleDef module = { PyModuleDef_HEAD_INIT, "tiny", 0, -1, 0 };\n'
        "PyMODINIT_FUNC PyInit_tiny(void) { import_array(); return PyModule_Create(&module); }\n"
    )
    library(folder / "tiny.so", text, more=(*shelf.headers(folder), "-I", str(shelf.older_numpy)))
    return shelf.runs(folder, "import tiny")


@slow("a NumPy of another Python in PYTHONPATH", "another Python")
def _(folder: Path, shelf: Shelf) -> str:
    shutil.copytree(shelf.site / "numpy", folder / "other" / "numpy", copy_function=os.link)
    for path in (folder / "other" / "numpy").rglob("*.cpython-*.so"):
        path.rename(path.with_name(f"{path.name.partition('.')[0]}.cpython-38-x86_64-linux-gnu.so"))
    return shelf.runs(folder, "import numpy", PYTHONPATH=str(folder / "other"))


def nvcc(folder: Path, shelf: Shelf, text: str, *options: object, toolkit: Path | None = None) -> str:
    """What nvcc says of a file that it does not compile."""
    (folder / "extension.cu").write_text(text)
    return failing(folder, (toolkit or shelf.toolkit) / "bin" / "nvcc", *options, "-c", "extension.cu")


@slow("a g++ that is too new", "g++ is too new")
def _(folder: Path, shelf: Shelf) -> str:
    """One that says so: no distribution has it yet."""
    compiler = script(folder / "g++", '#!/bin/sh\nexec c++ -U__GNUC__ -D__GNUC__=99 "$@"\n')
    return nvcc(folder, shelf, "", "-ccbin", compiler)


@slow("a GPU that nvcc no longer knows", "does not compile for sm_60")
def _(folder: Path, shelf: Shelf) -> str:
    return nvcc(folder, shelf, "", "-gencode=arch=compute_60,code=sm_60")


@slow("a GPU that ptxas does not know yet", "older than this GPU")
def _(folder: Path, shelf: Shelf) -> str:
    return failing(folder, shelf.toolkit / "bin" / "ptxas", "--gpu-name", "sm_999a", os.devnull)


@slow("an nvcc whose cicc is killed", "killed")
def _(folder: Path, shelf: Shelf) -> str:
    made(folder, "cp", "-rs", shelf.toolkit, folder / "toolkit")
    cicc = folder / "toolkit" / "nvvm" / "bin" / "cicc"
    cicc.unlink()
    script(cicc, "#!/bin/sh\nkill -9 $$\n")
    nvcc_itself = folder / "toolkit" / "bin" / "nvcc"  # copied, because it finds the toolkit relative to itself
    nvcc_itself.unlink()
    shutil.copy2(shelf.toolkit / "bin" / "nvcc", nvcc_itself)
    return nvcc(folder, shelf, "__global__ void f() {}\n", toolkit=folder / "toolkit")


@slow("a toolkit without cusparse.h", "lacks cusparse.h")
def _(folder: Path, shelf: Shelf) -> str:
    return nvcc(folder, shelf, "#include <cusparse.h>\n")


@slow("a driver that is too old", "older than this CUDA needs")
def _(folder: Path, shelf: Shelf) -> str:
    """What the CUDA runtime says of a driver of CUDA 11.4."""
    text = (
        "int cuDriverGetVersion(int *version) { *version = 11040; return 0; }\nint cuInit(unsigned f) { return 0; }\n"
    )
    library(folder / "driver" / "libcuda.so.1", text)
    runtime = next(shelf.toolkit.rglob("libcudart.so.*"))
    program = (
        f"import ctypes; cuda = ctypes.CDLL('{runtime}'); cuda.cudaGetErrorString.restype = ctypes.c_char_p; "
        "code = cuda.cudaGetDeviceCount(ctypes.byref(ctypes.c_int())); "
        "raise RuntimeError('CUDA error: ' + cuda.cudaGetErrorString(code).decode())"
    )
    return shelf.runs(folder, program, LD_LIBRARY_PATH=str(folder / "driver"))
