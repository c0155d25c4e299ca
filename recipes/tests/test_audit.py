"""A wheel is judged by its bytes: the CPU it was compiled for, the C library it wants, the symbols it lacks."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path

import pytest

from recipes import audit
from recipes.model import Catalogue, Pin, Refusal

PORTABLE = ["-march=x86-64-v3", "-frecord-gcc-switches"]


@pytest.fixture
def pin() -> Pin:
    """The cpu target's compiled package."""
    catalogue = Catalogue()
    return next(pin for pin in catalogue.pins(catalogue.target("cpu")) if pin.name == "deepspeed")


def library(folder: Path, name: str, code: str, *flags: str) -> Path:
    """A shared object compiled from C++ code."""
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / f"{name}.cpp"
    source.write_text(code)
    made = folder / f"{name}.so"
    subprocess.run(["c++", "-shared", "-fPIC", *flags, "-o", str(made), str(source)], check=True)
    return made


def wheel(folder: Path, *files: Path, metadata: str = "") -> Path:
    """A zip file that holds these files, named like a wheel."""
    made = folder / "deepspeed-0.19.8-cp311-cp311-linux_x86_64.whl"
    with zipfile.ZipFile(made, "w") as archive:
        for file in files:
            archive.write(file, f"deepspeed/{file.name}")
        archive.writestr("deepspeed-0.19.8.dist-info/METADATA", metadata)
    return made


@pytest.fixture
def torch(tmp_path: Path) -> Path:
    """A torch package whose one library defines at_work()."""
    library(tmp_path / "torch" / "lib", "libtorch", "void at_work() {}", "-Wl,--hash-style=gnu")
    return tmp_path / "torch"


def test_a_portable_extension_passes(tmp_path: Path, pin: Pin, torch: Path) -> None:
    made = library(tmp_path, "op", "void at_work(); void op() { at_work(); }", *PORTABLE)
    report = audit.audit(wheel(tmp_path, made), pin, torch, "2.36")
    assert report == {"extensions": ["deepspeed/op.so"], "march": ["x86-64-v3"], "glibc": report["glibc"]}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["-march=native", "-frecord-gcc-switches"], "march=native"),
        (["-march=haswell", "-frecord-gcc-switches"], "compiled for haswell"),
        ([*PORTABLE, "-mavx512f"], "avx512f"),
        (["-march=x86-64-v3"], "does not say which CPU"),
    ],
    ids=["native", "one CPU", "more than the name says", "unknown"],
)
def test_an_extension_for_one_cpu_is_refused(tmp_path: Path, pin: Pin, flags: list[str], said: str) -> None:
    made = library(tmp_path, "op", "void op() {}", *flags)
    with pytest.raises(Refusal, match=said):
        audit.audit(wheel(tmp_path, made), pin, None, "2.36")


def test_a_symbol_that_torch_lacks_is_named(tmp_path: Path, pin: Pin, torch: Path) -> None:
    made = library(tmp_path, "op", "void of_another_torch(); void op() { of_another_torch(); }", *PORTABLE)
    with pytest.raises(Refusal, match=r"op\.so has the undefined symbol _Z16of_another_torchv"):
        audit.audit(wheel(tmp_path, made), pin, torch, "2.36")


def test_a_newer_c_library_than_the_target_s_is_refused(tmp_path: Path, pin: Pin) -> None:
    made = library(tmp_path, "op", '#include <cstdio>\nvoid op() { std::puts(""); }', *PORTABLE)
    with pytest.raises(Refusal, match=r"wants GLIBC 2\S*, and the target runs on 2\.1"):
        audit.audit(wheel(tmp_path, made), pin, None, "2.1")


def test_a_wheel_without_its_extensions_is_refused(tmp_path: Path, pin: Pin) -> None:
    with pytest.raises(Refusal, match="holds no compiled extension"):
        audit.audit(wheel(tmp_path), pin, None, "2.36")


def metadata(pin: Pin, *extra: str, version: str = "0.19.8") -> str:
    return "\n".join(
        [
            f"Name: {pin.name}",
            f"Version: {version}",
            *(f"Requires-Dist: {one}" for one in [*pin.release.requires, *extra]),
        ]
    )


@pytest.mark.parametrize(
    ("version", "extra", "said"),
    [
        ("0.19.8", [], ""),
        ("0.19.8", ["left-pad>=1"], "lacks 'left-pad>=1'"),
        ("0.19.7", [], "calls itself deepspeed 0.19.7"),
    ],
    ids=["agrees", "another requirement", "another version"],
)
def test_metadata_must_be_what_the_recipe_says(
    tmp_path: Path, pin: Pin, version: str, extra: list[str], said: str
) -> None:
    made = wheel(tmp_path, metadata=metadata(pin, *extra, version=version))
    if not said:
        audit.check_metadata(made, pin, Catalogue().target("cpu"))
        return
    with pytest.raises(Refusal, match=said):
        audit.check_metadata(made, pin, Catalogue().target("cpu"))


def test_an_extra_s_requirement_is_not_the_package_s(tmp_path: Path, pin: Pin) -> None:
    made = wheel(tmp_path, metadata=metadata(pin, 'sphinx; extra == "docs"'))
    audit.check_metadata(made, pin, Catalogue().target("cpu"))
