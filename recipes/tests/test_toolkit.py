"""The CUDA toolkit: wheels of a lock made one folder, or the machine's own, asked where it lies; probed before use.

The nvcc of most tests is a script that lets the C++ compiler read the headers and find the libraries.
"""

from __future__ import annotations

import json
import os
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from recipes.catalogue.load import Catalogue
from recipes.catalogue.plan import Plan, plan
from recipes.errors import Refusal
from recipes.files import sha256_of
from recipes.make import toolkit
from recipes.tests.conftest import Tiny, entry, one_sentence, script

# `--dryrun` and `--version` as in nvcc; otherwise the C++ compiler checks the source's directives and the libraries.
NVCC = """\
#!/bin/sh
here=$(dirname "$0")
case "$*" in
  *--dryrun*) echo "#\\$ TOP=$here/.." >&2; exit 0;;
  *--version*) echo "Cuda compilation tools, release {release}, V{release}.88"; exit 0;;
esac
for word; do
  case "$word" in *.cu) source=$word;; -l*) libraries="$libraries $word";; esac
done
{before}
c++ -x c++ -E -I "$here/../include" "$source" -o "$source.ii" || exit 1
echo "int main() {{}}" > "$source.cpp"
c++ "$source.cpp" -o "$source.out" -L "$here/../lib64" $libraries
"""
# What the header of another toolkit says about a newer C++ compiler.
TOO_NEW = "echo '#error -- unsupported GNU version! gcc versions later than 15 are not supported!' >&2; exit 1"


# A package with one compiled module, whose build says which toolkit it was given.
SETUP = """
import os, shutil
from setuptools import Extension, setup
print(f"CUDA_HOME={os.environ['CUDA_HOME']}")
print(f"nvcc={shutil.which('nvcc')}")
setup(name="tinypkg", version="1.0", ext_modules=[Extension("tinypkg", ["tinypkg.c"])], install_requires=["tinydep"])
"""
MODULE = """
#include <Python.h>
static struct PyModuleDef module = { PyModuleDef_HEAD_INIT, "tinypkg", NULL, -1, NULL };
PyMODINIT_FUNC PyInit_tinypkg(void) { return PyModule_Create(&module); }
"""
COMPILED = {
    "setup.py": SETUP,
    "tinypkg.c": MODULE,
    "pyproject.toml": '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n',
}


def installed(home: Path, release: str = "12.1", headers: tuple[str, ...] = (), before: str = "") -> Path:
    """A toolkit with that nvcc and these headers."""
    script(home / "bin" / "nvcc", NVCC.format(release=release, before=before))
    for name in headers:
        (home / "include" / name).parent.mkdir(parents=True, exist_ok=True)
        (home / "include" / name).touch()
    return home


@pytest.fixture(scope="module")
def older() -> Plan:
    """The plan of a target without a toolkit of its own."""
    return plan(Catalogue(), "cu12.1-torch2.1")


def located(chosen: Plan, folder: Path, **variables: str) -> Path:
    """The toolkit whose nvcc lies in that folder of the PATH."""
    return toolkit.of_machine(chosen.target, {"PATH": f"{folder}:{os.environ['PATH']}", **variables})


# --- one folder of wheels


def test_wheels_become_one_folder(tmp_path: Path) -> None:
    """With the names that linkers look for, the folder in which nvcc does, and cuDNN and NCCL."""
    site = tmp_path / "site"
    for name in ("cu13/bin/nvcc", "cu13/lib/libcublas.so.13", "cu13/lib/libnvperf.so", "cu13/include/cublas.h"):
        (site / "nvidia" / name).parent.mkdir(parents=True, exist_ok=True)
        (site / "nvidia" / name).write_text(name)
    for part in ("cudnn", "nccl"):
        for name in (f"include/{part}.h", f"lib/lib{part}.so.2"):
            (site / "nvidia" / part / name).parent.mkdir(parents=True, exist_ok=True)
            (site / "nvidia" / part / name).write_text(name)
    target = Catalogue().target("cu13.0-torch2.11")
    for _ in range(2):  # an environment that already has it is left unchanged
        home = toolkit.assemble(site, target)
    assert home == site / "nvidia" / "cu13"
    assert (home / "lib64" / "libcublas.so").read_text() == "cu13/lib/libcublas.so.13"
    assert (home / "lib64" / "libnccl.so").read_text() == "lib/libnccl.so.2"
    assert (home / "include" / "cudnn.h").read_text() == "include/cudnn.h"
    assert not (home / "lib" / "libnvperf.so").is_symlink()


# --- the machine's


@pytest.mark.parametrize("kind", ["itself", "a script that runs it", "a link to it"])
def test_nvcc_says_where_its_toolkit_lies(older: Plan, tmp_path: Path, kind: str) -> None:
    home, other = installed(tmp_path / "cuda-12.1"), tmp_path / "bin"
    if kind == "itself":
        other = home / "bin"
    elif kind == "a script that runs it":
        script(other / "nvcc", f'#!/bin/sh\nexec {home}/bin/nvcc "$@"\n')
    else:
        other.mkdir()
        (other / "nvcc").symlink_to(home / "bin" / "nvcc")
    assert located(older, other) == home
    assert located(older, other, CUDA_HOME=str(home)) == home


@pytest.mark.parametrize(
    ("release", "variables", "message"),
    [
        (
            "13.0",
            {},
            "is CUDA 13.0, and target cu12.1-torch2.1 is compiled with CUDA 12.1: put the bin folder of a CUDA 12",
        ),
        (
            "12.1",
            {"CUDA_HOME": "/opt/other"},
            "CUDA_HOME is /opt/other, but the first nvcc on the PATH, .*bin/nvcc, belongs to .*: put /opt/other/bin",
        ),
    ],
    ids=["another version", "another nvcc on the PATH"],
)
def test_another_toolkit_is_refused(
    older: Plan, tmp_path: Path, release: str, variables: dict[str, str], message: str
) -> None:
    home = installed(tmp_path / "cuda", release)
    with pytest.raises(Refusal, match=message):
        located(older, home / "bin", **variables)


def test_an_nvcc_that_says_nothing_is_refused(older: Plan, tmp_path: Path) -> None:
    script(tmp_path / "nvcc", "#!/bin/sh\necho made up\n")
    with pytest.raises(
        Refusal, match=r"nvcc does not say which CUDA toolkit it belongs to .*: put the toolkit's own bin"
    ):
        located(older, tmp_path)


def test_no_nvcc_is_named(older: Plan, tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=r"compiled with CUDA 12\.1, and there is no nvcc on the PATH: install"):
        toolkit.of_machine(older.target, {"PATH": str(tmp_path)})


# --- the probe


def probed(chosen: Plan, home: Path, folder: Path) -> None:
    folder.mkdir()
    toolkit.probe(chosen, [pin for pin in chosen.pins if toolkit.needed_by(chosen, pin)], home, folder)


def needs(chosen: Plan, kind: str) -> set[str]:
    """The headers or libraries that any package of a target names."""
    return {name for pin in chosen.pins for name in getattr(pin.package, kind)}


def test_everything_that_is_missing_is_named_with_its_packages(older: Plan, tmp_path: Path) -> None:
    there = needs(older, "headers") - {"cusparse.h", "nvrtc.h"}
    home = installed(tmp_path / "cuda", headers=tuple(there))
    with pytest.raises(Refusal) as refused:
        probed(older, home, tmp_path / "headers")
    assert "cusparse.h (for torch 2.1.2); " in str(refused.value) or "; cusparse.h (for torch 2.1.2)" in str(
        refused.value
    )
    assert "nvrtc.h (for transformer-engine 1.7)" in str(refused.value)
    assert "cublas_v2.h" not in str(refused.value)
    assert all(f"lib{name}.so (for " in str(refused.value) for name in needs(older, "libraries"))
    installed(home, headers=("cusparse.h", "nvrtc.h"))
    (home / "lib64").mkdir()
    for name in needs(older, "libraries"):
        (home / "lib64" / f"lib{name}.so").write_text("")  # an empty linker script
    probed(older, home, tmp_path / "whole")


FAULTS = {
    "a newer g++": (TOO_NEW, r"does not accept this machine's C\+\+ compiler \(gcc versions later than 15 are not"),
    "an sm that it does not know": (
        "echo \"nvcc fatal   : Unsupported gpu architecture 'compute_90'\" >&2; exit 1",
        "cannot compile for compute_90, and target cu12.1-torch2.1 is for sm 8.0, 9.0: pass --sm",
    ),
    "no cicc": ("echo 'sh: 1: cicc: not found' >&2; exit 127", r"\(sh: 1: cicc: not found\): check the toolkit"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_toolkit_that_does_not_compile_is_refused(older: Plan, tmp_path: Path, fault: str) -> None:
    before, message = FAULTS[fault]
    home = installed(tmp_path / "cuda", headers=tuple(needs(older, "headers")), before=before)
    with pytest.raises(Refusal, match=message):
        probed(older, home, tmp_path / "probe")


def test_a_plan_says_what_a_build_would_lack(older: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = installed(tmp_path / "cuda")
    monkeypatch.setenv("PATH", f"{home / 'bin'}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    assert "a build on this machine would be refused. The CUDA toolkit " in toolkit.state(older)
    assert toolkit.state(plan(Catalogue(), "cpu")) == ""


# --- a pinned toolkit, built with


def wheel_of(shelf: Path, name: str, version: str, files: Mapping[str, str] = {}) -> Path:
    """A wheel that installs these files, executable."""
    module = name.replace("-", "_")
    path, info = shelf / f"{module}-{version}-py3-none-any.whl", f"{module}-{version}.dist-info"
    contents = {
        **{file: text.encode() for file, text in files.items()},
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{file},{entry(data)}\n" for file, data in contents.items()) + f"{info}/RECORD,,\n"
    with zipfile.ZipFile(path, "w") as archive:
        for file, data in {**contents, f"{info}/RECORD": record.encode()}.items():
            member = zipfile.ZipInfo(file)
            member.external_attr = 0o100755 << 16
            archive.writestr(member, data)
    return path


def locked(path: Path, *wheels: Path) -> None:
    """Add wheels to a lock."""
    with path.open("a") as lock:
        for wheel in wheels:
            name, version = wheel.name.split("-")[:2]
            lock.write(f"{name.replace('_', '-')}=={version} --hash=sha256:{sha256_of(wheel)}  # 1 bytes\n")


class Pinned:
    """`tiny` with a toolkit of its own, whose nvcc is in a wheel, and one compiled package."""

    def __init__(self, tiny: Tiny) -> None:
        self.tiny = tiny
        tiny.edit(tiny.targets, "[tiny]", '[tiny]\ntoolkit = "13.0.2"')
        text = tiny.targets.read_text()
        head, tail = text[: text.index("[tiny]")], text[text.index("[tiny]") :]
        tail = tail.replace('cuda = "none"', 'cuda = "13.0"').replace("sm = []", 'sm = ["9.0"]')
        tiny.targets.write_text(head + tail)
        (tiny.root / "patches" / "tinypkg" / "0001-say-two.patch").unlink()
        tiny.plant("tinypkg", COMPILED, requires=("tinydep",), compiler="c++", build_requires=("setuptools",))
        tiny.lock("setuptools")
        self.lock = tiny.root / "recipes" / "lock" / "tiny.txt"
        self.toolkit = self.lock.with_suffix(".toolkit.txt")
        locked(self.lock, wheel_of(tiny.shelf, "cuda-toolkit", "13.0.2"))
        self.write()

    def write(self, version: str = "13.0.88", before: str = "") -> Path:
        """The wheel of nvcc, and the lock that pins it."""
        files = {"nvidia/cu13/bin/nvcc": NVCC.format(release="13.0", before=before), "nvidia/cu13/lib/libx.so.1": ""}
        made = wheel_of(self.tiny.shelf, "nvidia-cuda-nvcc", version, files)
        self.toolkit.write_text("# inputs: none\n")
        locked(self.toolkit, made)
        self.tiny.renew_inputs()
        return made


@pytest.fixture
def pinned(tiny: Tiny) -> Pinned:
    return Pinned(tiny)


def test_a_pinned_toolkit_comes_before_any_nvcc_of_the_machine(pinned: Pinned, tmp_path: Path) -> None:
    """And its wheels are in the wheel's key and not in the environment."""
    script(tmp_path / "bin" / "nvcc", f"#!/bin/sh\ntouch {tmp_path}/was-run\nexit 1\n")
    variables = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "CUDA_HOME": "/nowhere"}
    pinned.tiny.succeed("build", "tiny", **variables)
    assert not (tmp_path / "was-run").exists()
    record = json.loads(next(pinned.tiny.cache.glob("wheels/*/wheel.json")).read_text())
    assert set(record["inputs"]["toolkit"]) == {"nvidia-cuda-nvcc", "script"}
    log = next(pinned.tiny.cache.glob("wheels/*/build.log")).read_text()
    (home,) = set(re.findall(r"CUDA_HOME=(.*/nvidia/cu13)$", log, re.MULTILINE))
    assert f"nvcc={home}/bin/nvcc" in log
    assert not list((pinned.tiny.root / "build" / "tiny" / "env").glob("lib/python*/site-packages/nvidia"))
    assert "toolkit: CUDA 13.0.2 from tiny.toolkit.txt: nvidia-cuda-nvcc 13.0.88" in pinned.tiny.succeed("plan", "tiny")


def test_a_toolkit_that_is_not_the_pinned_one_is_refused(pinned: Pinned) -> None:
    pinned.write(version="13.5.37")
    naming = ("tiny.toolkit.txt has nvidia-cuda-nvcc 13.5.37", "pins the CUDA toolkit 13.0.2", "nox -s lock -- tiny")
    pinned.tiny.refuse("build", "tiny", naming=naming)
    pinned.write()
    pinned.lock.write_text(pinned.lock.read_text().replace("cuda-toolkit==13.0.2", "cuda-toolkit==13.1.0"))
    pinned.tiny.refuse("build", "tiny", naming=("tiny.txt has cuda-toolkit 13.1.0", "nox -s lock -- tiny"))
    pinned.toolkit.unlink()
    pinned.tiny.refuse("build", "tiny", naming=("tiny.toolkit.txt does not exist", "nox -s lock -- tiny"))
    pinned.tiny.edit(
        pinned.tiny.targets, 'toolkit = "13.0.2"\nreason = "a test', 'toolkit = "12.1.0"\nreason = "a test'
    )
    pinned.tiny.refuse("plan", "tiny", naming=('toolkit "12.1.0" is not of CUDA 13.0',))


@pytest.mark.parametrize("verb", ["plan", "build"])
def test_a_toolkit_that_was_locked_beside_other_wheels_is_refused(pinned: Pinned, verb: str) -> None:
    text = pinned.toolkit.read_text()
    pinned.toolkit.write_text(text.replace(text.splitlines()[0], "# inputs: of before"))
    naming = ("tiny.toolkit.txt is out of date: the toolkit or the target's own lock changed", "nox -s lock -- tiny")
    pinned.tiny.refuse(verb, "tiny", naming=naming)


def test_a_truncated_wheel_of_a_toolkit_is_refused(pinned: Pinned) -> None:
    made = next(pinned.tiny.shelf.glob("nvidia_cuda_nvcc-*"))
    made.write_bytes(made.read_bytes()[:-40])
    pinned.tiny.refuse("build", "tiny", naming=("nvidia-cuda-nvcc 13.0.88", "is pinned: it is corrupted"))


def test_a_compiler_that_a_pinned_toolkit_does_not_take_is_refused(pinned: Pinned) -> None:
    pinned.write(before=TOO_NEW)
    naming = ("does not accept this machine's C++ compiler", "gcc versions later than 15", "install an older g++")
    pinned.tiny.refuse("build", "tiny", naming=naming)
    assert not any(pinned.tiny.cache.glob("wheels/*"))


GCC = """#!/bin/sh
case $1 in
    --version) echo 'c++ (GCC) 16.1.0'; echo 'Copyright (C) 2026 Free Software Foundation, Inc.' ;;
    -dumpfullversion) echo 16.1.0 ;;
esac
"""


def test_a_compiler_that_is_too_new_by_the_limits_is_refused(pinned: Pinned, tmp_path: Path) -> None:
    """Before a build environment is made; `plan` says the same."""
    script(tmp_path / "bin" / "c++", GCC)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    naming = ("C++ compiler is g++ 16.1.0", "compiled with CUDA 13.0", "https://", "install another g++")
    refused = pinned.tiny.run("build", "tiny", PATH=path)
    one_sentence(refused, naming)
    assert "prepare" not in refused.stdout
    shown = pinned.tiny.succeed("plan", "tiny", PATH=path)
    assert "a build on this machine would be refused. This machine's C++ compiler is g++ 16.1.0" in shown


def test_stages_of_an_image_have_the_same_toolkit(pinned: Pinned, tmp_path: Path) -> None:
    """Laid out apart from what the image installs, and with the key of the bare build's."""
    pinned.tiny.succeed("patch", "tiny", "--into", tmp_path / "out")
    given = tmp_path / "out" / "environment"
    assert [path.name for path in (given / "toolkit").iterdir()] == ["nvidia_cuda_nvcc-13.0.88-py3-none-any.whl"]
    assert (given / "toolkit.txt").read_text().startswith("nvidia-cuda-nvcc==13.0.88 --hash=sha256:")
    assert "nvcc" not in (given / "requirements.txt").read_text()
    inputs = json.loads((tmp_path / "out" / "inputs" / "tinypkg.json").read_text())["inputs"]
    assert set(inputs["toolkit"]) == {"nvidia-cuda-nvcc", "script"}
