"""`python -m smoke_tests` and `python -m smoke_tests.doctor` in planted environments; none of this needs torch."""

from __future__ import annotations

import base64
import hashlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from recipes.catalogue.load import Catalogue
from recipes.files import ROOT
from recipes.prove.evidence import imported
from recipes.tests.conftest import script
from recipes.tests.objects import library
from recipes.tests.rooms import ROOM, PlantedRoom, fake_nvidia_smi


class Site:
    """A folder of installed distributions, as pip leaves them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def install(
        self, name: str, version: str, files: dict[str, bytes], *requires: str, info: str = "", tag: str = ""
    ) -> dict[str, Path]:
        """Install a distribution with these files; where each of them is."""
        rows = []
        for path, content in files.items():
            place = self.folder / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content)
            code = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            rows.append(f"{path},sha256={code},{len(content)}\n")
        there = self.folder / f"{info or f'{name}-{version}'}.dist-info"
        there.mkdir()
        needs = "".join(f"Requires-Dist: {text}\n" for text in requires)
        (there / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")
        (there / "RECORD").write_text("".join(rows))
        (there / "WHEEL").write_text(f"Wheel-Version: 1.0\nTag: {tag or 'py3-none-any'}\n")
        return {path: self.folder / path for path in files}

    def torch(self, version: str = "2.11.0", *requires: str, cuda: str | None = None, **libraries: bytes) -> None:
        """A torch that sees no GPU; `libraries` are files of torch/lib/, without their endings."""
        built = f"cuda: Optional[str] = {cuda!r}\n"
        no_gpu = b"manual_seed = abs\nclass cuda:\n    device_count = staticmethod(lambda: 0)\n"
        files = {"torch/__init__.py": no_gpu, "torch/version.py": built.encode()}
        files |= {f"torch/lib/{name}.so": content for name, content in libraries.items()}
        self.install("torch", version, files, *requires)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path / "site-packages")


# --- the claims


class ForeignRoom(PlantedRoom):
    """A planted room with the command, beside a torch that is only metadata."""

    gpus = ""  # the indices of those that it may see

    def __init__(self, folder: Path, site: Site) -> None:
        super().__init__(folder)
        for name in ("__main__", "foreign", "distributions", "loaded_once", "test_environment"):
            shutil.copy(ROOM / f"{name}.py", self.folder)
        (self.folder / "test_environment.py").write_text("def loaded(): pass\n")
        self.site, self.json = site, folder / "evidence.json"

    def start(self, *options: str) -> subprocess.Popen[str]:
        variables = {**os.environ, "PYTHONPATH": str(self.site.folder), "CUDA_VISIBLE_DEVICES": self.gpus}
        evidence = () if "--list" in options else ("--json", str(self.json))
        return subprocess.Popen(
            [sys.executable, "-B", "-m", "smoke_tests", *evidence, *options],
            cwd=self.folder.parent, env=variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip

    def ended(self, *options: str) -> tuple[int, str, str]:
        """Run the command: its exit code, and what it printed on both outputs."""
        with self.start(*options) as process:
            stdout, stderr = process.communicate(timeout=60)
        assert "Traceback" not in stderr, stderr
        return process.returncode, stdout, stderr

    def reasons(self) -> dict[str, tuple[str, str]]:
        """Outcome and reason of each claim of the evidence, by the name of its test."""
        claims = json.loads(self.json.read_text())["claims"]
        return {claim["id"].partition("::")[2]: (claim["outcome"], claim["reason"]) for claim in claims}


@pytest.fixture
def foreign(tmp_path: Path, site: Site) -> ForeignRoom:
    site.torch()
    return ForeignRoom(tmp_path, site)


PROVED = '@proves("{0} holds")\ndef test_{0}(): pass\n'
EVERY_OUTCOME = (
    '@proves("one is two")\ndef test_sum(): assert 1 == 2\n'
    '@proves("a process lives")\ndef test_crash():\n    import os, signal\n    os.kill(os.getpid(), signal.SIGSEGV)\n'
    '@proves("a reference is there")\ndef test_reference(): import no_such_module\n'
    '@proves("the version is the pinned one")\ndef test_version_is_pinned(): assert False\n'
    '@proves("no lock of a compilation stays in the home folder")\n'
    'def test_extensions():\n    import os\n    assert "fusebox-claims-" in os.environ["TORCH_EXTENSIONS_DIR"]\n'
    '@proves("it lasts")\n@pytest.mark.long\ndef test_long(): assert False\n'
    '@proves("a GPU adds")\n@needs(cuda=True)\ndef test_gpu(): assert False\n'
)


def test_every_claim_gets_its_outcome(foreign: ForeignRoom) -> None:
    """Also the claims that a dead process has left: another process takes them."""
    foreign.plant(EVERY_OUTCOME + "".join(map(PROVED.format, "abcdef")), "test_torch.py")
    code, stdout, _ = foreign.ended()
    assert code == 1
    assert foreign.reasons() == {
        **{f"test_{name}": ("proved", "") for name in "abcdef"},
        "test_extensions": ("proved", ""),
        "test_sum": ("refuted", "assert 1 == 2"),
        "test_crash": ("refuted", "the process that ran it died (SIGSEGV)"),
        "test_reference": ("unproven", "needs no_such_module, which is not installed here"),
        "test_version_is_pinned": ("unproven", "unpinned: no manifest says which one belongs here"),
        "test_long": ("unproven", "takes long: --long runs it"),
    }  # a torch without CUDA has no claims about GPUs
    assert "torch 2.11.0\n" in stdout and "7 proved, 2 refuted, 3 unproven" in stdout
    whole = json.loads(foreign.json.read_text())
    assert whole["foreign"] and (whole["target"], whole["stack"]) == ("foreign", "unpinned")
    assert "__main__.py" in whole["files"] and whole["packages"] == {"torch": "2.11.0"}


def test_exit_codes_and_options(foreign: ForeignRoom) -> None:
    foreign.plant(PROVED.format("a"), "test_torch.py")
    foreign.plant(PROVED.format("b"), "test_apex.py")
    assert foreign.ended()[0] == 0 and set(foreign.reasons()) == {"test_a"}  # apex is not installed
    foreign.site.install("apex", "0.1", {"apex/__init__.py": b""})
    assert foreign.ended("--package", "apex")[0] == 0 and set(foreign.reasons()) == {"test_b"}
    foreign.json.unlink()
    code, listed, _ = foreign.ended("--list")
    assert code == 0 and "2 claims: torch 1, apex 1" in listed and not foreign.json.exists()
    for options, why in (
        (("--list", "--json", "out.json"), "--list runs no claim"),
        (("--json", "nowhere/out.json"), "--json nowhere/out.json is not a file in a folder that exists"),
        (("--json", ""), "--json . is not a file"),
        *((("--seconds", seconds), f"{seconds} is not a number above 0") for seconds in ("0", "-1", "nan")),
    ):
        code, _, sentence = foreign.ended(*options)
        assert code == 2 and why in sentence, options
    code, _, sentence = foreign.ended("--package", "flash_attn")
    assert code == 2 and "flash-attn is not installed here" in sentence and "torch, apex" in sentence
    foreign.plant('@proves("x")\ndef test_version_is_pinned(): pass\n', "test_apex.py")
    assert foreign.ended("--package", "apex")[0] == 3
    shutil.rmtree(foreign.site.folder / "torch-2.11.0.dist-info")
    code, _, sentence = foreign.ended()
    assert code == 2 and "torch is not installed in this environment" in sentence


def test_a_wheel_of_ours_says_how_it_is_patched(foreign: ForeignRoom) -> None:
    """A claim about flash-attn has to know whether kernels were left out, also where pip installed the wheel."""
    foreign.plant(
        '@proves("the patches are known")\ndef test_patches(manifest):\n'
        '    (patch,) = manifest["packages"]["flash-attn"]["patches"]\n'
        '    assert patch["file"] == "patches/flash-attn/0001-leave-out.patch"\n',
        "test_flash_attn.py",
    )
    foreign.site.install("flash-attn", "2.8.3+cu130torch2.11", {"flash_attn/__init__.py": b""})
    assert foreign.ended("--package", "flash-attn")[0] == 1  # a wheel of somebody else
    bill = foreign.site.folder / "flash-attn-2.8.3+cu130torch2.11.dist-info" / "sboms" / "fusebox.cdx.json"
    bill.parent.mkdir()
    issue = {"type": "defect", "id": "patches/flash-attn/0001-leave-out.patch"}
    pedigree = {"patches": [{"type": "unofficial", "resolves": [issue]}]}
    bill.write_text(json.dumps({"metadata": {"component": {"name": "flash-attn", "pedigree": pedigree}}}))
    assert foreign.ended("--package", "flash-attn")[0] == 0
    bill.write_text("{")
    code, _, sentence = foreign.ended()
    assert code == 2 and "flash-attn: its sboms/fusebox.cdx.json is not Fusebox's list of patches" in sentence


@pytest.mark.parametrize(
    ("compiled", "needed"),
    [
        ("sm_80 sm_86", "a newer CUDA"),
        ("sm_80 compute_80a", "a newer CUDA"),
        ("sm_100a compute_100", "an older CUDA"),
        ("sm_90a", ""),
        ("sm_80 compute_80", ""),
        ("sm_80 sm_90", ""),
        ("", ""),
    ],
)
def test_a_torch_without_kernels_for_the_gpu_is_refused(
    foreign: ForeignRoom, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: str, needed: str
) -> None:
    """As with torch 2.0.1, whose wheel for CUDA 11.7 ends at sm_86, on an H200."""
    fake_nvidia_smi(tmp_path / "bin", "NVIDIA H200, 9.0, 143771, 580.1")
    foreign.gpus = "0"
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    (site.folder / "torch/version.py").write_text("cuda = '11.7'\n")
    source = f"manual_seed = abs\nclass cuda:\n    get_arch_list = staticmethod(lambda: {compiled.split()})\n"
    (site.folder / "torch/__init__.py").write_text(source + "    device_count = staticmethod(lambda: 0)\n")
    foreign.plant(PROVED.format("a"), "test_torch.py")
    code, _, sentence = foreign.ended()
    if not needed:
        assert code == 0
    else:
        only = f"(NVIDIA H200, sm_90), only for {', '.join(compiled.split())}: install a torch for {needed}."
        assert code == 2 and f"torch 2.11.0 has no kernels for this GPU {only}" in sentence
        assert not foreign.json.exists()


def test_time_and_ctrl_c_end_it_with_all_processes(foreign: ForeignRoom, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    slow = (
        f'@proves("it ends")\ndef test_slow():\n    import os, pathlib, time\n'
        f"    pathlib.Path({str(pid)!r}).write_text(str(os.getpid()))\n    time.sleep(100)\n"
    )
    foreign.plant(slow, "test_torch.py")

    def begun() -> int:
        end = time.monotonic() + 40
        while time.monotonic() < end and not (pid.exists() and pid.read_text()):
            time.sleep(0.1)
        return int(pid.read_text())

    with foreign.start() as process:
        claim = begun()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    assert process.returncode == 130
    with pytest.raises(ProcessLookupError):
        os.kill(claim, 0)
    main = foreign.folder / "__main__.py"
    main.write_text(main.read_text().replace("GRACE = 8 ", "GRACE = 0.5 "))
    pid.unlink()
    with foreign.start("--seconds", "8") as process:
        claim = begun()
        process.communicate(timeout=60)
    assert process.returncode == 3
    assert foreign.reasons()["test_slow"][1].startswith("it did not end within 8 s")
    with pytest.raises(ProcessLookupError):
        os.kill(claim, 0)
    foreign.plant("import time\n\ntime.sleep(60)\n", "test_apex.py")
    code, _, sentence = foreign.ended("--seconds", "0.5")
    assert code == 2 and "had not collected the claims after 1 s: give --seconds more" in sentence


def test_every_package_of_the_catalogue_is_looked_for() -> None:
    modules = {name: package.module for name, package in Catalogue(ROOT).packages.items()}
    assert modules == imported("distributions").MODULES


# --- the doctor


@pytest.fixture
def doctor(site: Site, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The doctor's module, which sees only what `site` has."""
    for name in ("LD_LIBRARY_PATH", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    module = imported("doctor")
    importlib.import_module("packaging.requirements")
    for name in [name for name in sys.modules if name.partition(".")[0] == "pkg_resources"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [str(site.folder)])
    return module


def faults(doctor: Any) -> dict[str, str]:
    """What the doctor finds, without passes and FP8, and with the remedy."""
    importlib.invalidate_caches()
    checks = [check for check in doctor.of_environment() if check.state != "pass" and check.about != "FP8"]
    return {check.about: f"{check.state}: {check.finding} -> {check.remedy}" for check in checks}


def healthy(site: Site) -> None:
    site.torch("2.11.0", "numpy")
    site.install("numpy", "2.1.0", {"numpy/__init__.py": b""})


def test_a_healthy_environment_has_no_fault(site: Site, doctor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here it needs no compiler, since its torch is not for CUDA."""
    healthy(site)
    monkeypatch.setenv("PATH", "/nowhere")
    site.install("apex", "0.1", {"apex/__init__.py": b""}, "torch>=2", "gone; extra == 'all'")
    assert faults(doctor) == {}


def test_metadata_and_files_are_compared(site: Site, doctor: Any) -> None:
    healthy(site)
    files = site.install("apex", "0.1", {"apex/__init__.py": b"", "apex/a.py": b"1", "apex/b.py": b"2"}, "torch==2.1")
    files["apex/a.py"].unlink()
    files["apex/b.py"].write_text("22")
    site.install("deepspeed", "1.0", {"deepspeed/__init__.py": b"import pkg_resources\n"}, "missing>=1")
    site.install("numpy", "1.26", {}, info="numpy-old")
    seen = faults(doctor)
    assert "1 are missing (apex/a.py) and 1 have another size (apex/b.py)" in seen["files"]
    assert "--force-reinstall --no-deps apex==0.1" in seen["files"]
    assert "apex 0.1 requires torch==2.1, and 2.11.0 is installed" in seen["wheel of another torch"]
    assert "missing>=1, and it is not installed" in seen["requirements"]
    assert "which deepspeed import" in seen["setuptools"] and "'setuptools<81'" in seen["setuptools"]
    assert "1.26" in seen["installed twice"] and "2.1.0" in seen["installed twice"]
    assert set(seen) == {"files", "wheel of another torch", "requirements", "setuptools", "installed twice"}


def test_releases_that_do_not_go_together_are_named(site: Site, doctor: Any) -> None:
    site.torch("2.1.2", "triton==2.1.0; platform_system == 'Linux'", cuda="12.1")
    site.install("numpy", "2.1.0", {"numpy/__init__.py": b""})
    site.install("triton", "3.0.0", {"triton/__init__.py": b"1"})
    site.install("pytorch-triton", "3.0.0", {"triton/__init__.py": b"2"})
    seen = faults(doctor)
    assert "numpy 2.1.0 under torch 2.1.2" in seen["numpy"] and "'numpy<2'" in seen["numpy"]
    assert "triton 3.0.0 under torch 2.1.2, which requires 2.1.0" in seen["triton"]
    assert "triton/__init__.py" in seen["files of two packages"]


def test_two_copies_of_a_cuda_library_are_named(
    site: Site, doctor: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    healthy(site)
    site.install("nvidia-cudnn", "9", {"nvidia/cudnn/lib/libcudnn.so.9": b"", "nvidia/cu12/libcudart.so.12": b""})
    site.install("nvidia-cuda", "13", {"nvidia/cu13/libcudart.so.13": b""})
    assert "versions 12, 13" in faults(doctor)["two copies"]
    (tmp_path / "cuda").mkdir()
    (tmp_path / "cuda" / "libcudnn.so.9").touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path / "cuda"))
    copies = [check for check in doctor.of_environment() if check.about == "two copies"]
    assert any(f"LD_LIBRARY_PATH puts {tmp_path / 'cuda'} first" in check.finding for check in copies)


CALLS = [f"_load_cuda_library_from_{where}(lib_name)\n" for where in ("system", "python")]


@pytest.mark.parametrize("listed", [True, False])
def test_a_cudnn_of_the_system_beside_the_environments_is_named(
    site: Site, doctor: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: bool
) -> None:
    """As seen with transformer-engine 2.18.0 from pip on a machine with cuDNN for development."""
    healthy(site)
    own = site.install("nvidia-cudnn", "9", {"nvidia/cudnn/lib/libcudnn.so.9": b""})
    loader = "transformer_engine/common/__init__.py"
    (core,) = site.install("transformer-engine-cu13", "2.18.0", {loader: "".join(CALLS).encode()}).values()
    other = tmp_path / "system" / "libcudnn.so"
    other.parent.mkdir()
    other.touch()
    for name in ("CUDNN_HOME", "CUDNN_PATH", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(doctor, "TOOLKIT", str(tmp_path / "none"))
    if listed:
        script(other.with_name("ldconfig"), f"#!/bin/sh\necho '\tlibcudnn.so (libc6,x86-64) => {other}'\n")
        monkeypatch.setenv("PATH", str(other.parent), prepend=os.pathsep)
    else:
        monkeypatch.setenv("CUDA_HOME", str(other.parent))
    (named,) = [check for check in doctor.of_environment() if check.about == "two copies"]
    folder = own["nvidia/cudnn/lib/libcudnn.so.9"].parent
    assert named.finding == f"transformer-engine-cu13 2.18.0 loads {other} beside the cuDNN in {folder}"
    assert named.remedy == f"export CUDNN_HOME={folder.parent}"
    core.write_text("".join(reversed(CALLS)))  # as patches/transformer-engine/0006 has it
    assert "two copies" not in faults(doctor)
    core.write_text("".join(CALLS))
    monkeypatch.setenv("CUDNN_HOME", str(folder.parent))
    assert "two copies" not in faults(doctor)


SYMBOL = "namespace c10 {{ struct {name} {{ void {method}(int); }}; {body} }}"


@pytest.fixture
def compiled(site: Site, tmp_path: Path) -> Site:
    """A torch for CUDA 13 that has c10::Here::there(int)."""
    here = SYMBOL.format(name="Here", method="there", body="void Here::there(int) {}")
    torch = library(tmp_path / "torch", "libc10", here, "-Wl,-soname,libc10.so")
    site.torch("2.11.0", cuda="13.0", libc10=torch.read_bytes())
    site.install("numpy", "2.1.0", {"numpy/__init__.py": b""})
    site.install("triton", "3.6.0", {"triton/__init__.py": b""})
    return site


def test_what_triton_compiles_with_has_to_be_there(
    compiled: Site, doctor: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(doctor.sysconfig, "get_path", lambda *_: str(tmp_path))
    finding = faults(doctor)["compiler"]
    assert f"no C compiler is on the PATH and {tmp_path}/Python.h is missing, so torch.compile" in finding
    assert f"gcc python{sys.version_info[0]}.{sys.version_info[1]}-dev" in finding
    monkeypatch.setenv("CC", "/opt/cc")
    (tmp_path / "Python.h").touch()
    assert faults(doctor) == {}


def extension(folder: Path, code: str, *also: str) -> bytes:
    """An extension compiled against a torch, and libraries of these names, that have all that it wants."""
    stub = library(folder, "stub", "", "-Wl,-soname,libc10.so")
    flags = [str(stub), *(str(library(folder, name, "", f"-Wl,-soname,{name}")) for name in also)]
    return library(folder, "extension", code, "-Wl,--no-as-needed", *flags).read_bytes()


def test_what_an_extension_wants_has_to_be_there(compiled: Site, doctor: Any, tmp_path: Path) -> None:
    code = SYMBOL.format(name="Here", method="there", body="") + "void f() { c10::Here().there(1); }"
    compiled.install("apex", "0.1", {"apex.so": extension(tmp_path / "good", code)})
    assert faults(doctor) == {}
    code = "namespace c10 { struct TensorImpl { void gone(float); }; } void f() { c10::TensorImpl().gone(1); }"
    compiled.install("flash-attn", "2.5.8+torch2.1", {"flash.so": extension(tmp_path / "bad", code)})
    finding = faults(doctor)["wheel of another torch"]
    assert "(flash.so) wants 1 symbols that torch 2.11.0 lacks: c10::TensorImpl::gone" in finding
    assert "its file name says torch 2.1" in finding
    other = extension(tmp_path / "cuda", "", "libcudart.so.12")
    both = {"x/C.cpython-26-x86_64-linux-gnu.so": other, "x/D.so": other}
    compiled.install("xformers", "0.1", both, tag="cp310-abi3-linux_x86_64")
    compiled.install("rotary-emb", "0.1", {"rotary.so": extension(tmp_path / "cudnn", "", "libcudnn.so.7")})
    seen = faults(doctor)
    assert "-gnu.so and 1 more) is compiled for CUDA 12, and torch for CUDA 13.0" in seen["wheel of another CUDA"]
    assert "wheel of another Python" not in seen
    compiled.install("msamp-adamw", "0.1", {"y/C.so": other}, tag="cp26-cp26-linux_x86_64")
    assert "(y/C.so) is compiled for cp26, and this is cp3" in faults(doctor)["wheel of another Python"]
    assert "libcudnn.so.7, which is nowhere here" in seen["missing library"]


def test_of_extensions_for_several_torch_releases_only_the_fitting_one_counts(
    compiled: Site, doctor: Any, tmp_path: Path
) -> None:
    """torch-c-dlpack-ext 0.1.5 has one for each release from 2.4 to 2.9, and loads none beside a newer torch."""
    code = "namespace c10 { struct TensorImpl { void gone(float); }; } void f() { c10::TensorImpl().gone(1); }"
    other = extension(tmp_path / "other", code)
    files = {f"addon/libaddon_torch{number}-cuda.so": other for number in ("28", "29")}
    compiled.install("addon", "0.1", files)
    assert faults(doctor) == {}
    compiled.install("another", "0.1", {**files, "addon/libaddon_torch211-cuda.so": other})
    assert "another 0.1 (addon/libaddon_torch211-cuda.so) wants 1 symbols" in faults(doctor)["wheel of another torch"]


def test_the_other_abi_is_named(compiled: Site, doctor: Any, tmp_path: Path) -> None:
    code = (
        "#include <string>\nnamespace c10 { struct Error { void add(std::string); }; }\n"
        "void f() { c10::Error().add(std::string()); }"
    )
    stub = library(tmp_path / "old", "stub", "", "-Wl,-soname,libc10.so")
    old = library(tmp_path / "old", "extension", code, "-D_GLIBCXX_USE_CXX11_ABI=0", "-Wl,--no-as-needed", str(stub))
    new = "#include <string>\nnamespace c10 { struct Error { void s(std::string); }; void Error::s(std::string) {} }"
    torch = library(tmp_path / "new", "libc10", new, "-Wl,-soname,libc10.so").read_bytes()
    compiled.install("apex", "0.1", {"apex.so": old.read_bytes()})
    (compiled.folder / "torch" / "lib" / "libc10.so").write_bytes(torch)
    seen = faults(doctor)
    assert "uses the old C++ ABI and torch the new one, so that torch 2.11.0 lacks: c10::Error::add" in seen["C++ ABI"]


def test_symbols_are_traced_to_the_releases_that_have_them(doctor: Any) -> None:
    table: dict[str, list[str]] = json.loads((ROOM / "torch_symbols.json").read_text())
    symbol = next(symbol for symbol in table["2.1.2 2.11.0 2.15.0"] if symbol.startswith("_ZN3c10"))
    assert doctor.traces([symbol.encode()]).endswith("these have them: 2.1.2, 2.11.0, 2.15.0")
    older = table["1.12.1"][0]
    assert doctor.traces([older.encode()]).endswith("these have them: 1.12.1")
    assert doctor.traces([symbol.encode(), older.encode()]) == "" == doctor.traces([b"_ZN3c107UnknownEv"])


def test_no_elf_file_is_refused(tmp_path: Path) -> None:
    elf, path = imported("elf"), tmp_path / "x.so"
    for content, why in (
        (b"", "is empty"),
        (b"text", "no little-endian"),
        (b"\x7fELF\x02\x01" + b"\xff" * 58, "cut off"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=why):
            elf.read(path)


def test_the_command_says_it_in_its_exit_code_and_as_json(site: Site, tmp_path: Path) -> None:
    healthy(site)
    command = [sys.executable, "-m", "smoke_tests.doctor", "--json", str(tmp_path / "out.json")]
    variables = {**os.environ, "PYTHONPATH": f"{site.folder}:{ROOT}"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {row["about"] for row in json.loads((tmp_path / "out.json").read_text())} >= {"numpy", "FP8"}
    (site.folder / "torch" / "version.py").unlink()
    done = subprocess.run(command, env=variables, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 1 and "-> python -m pip install --force-reinstall" in done.stdout
