"""A wheel is judged by its bytes: CPU and GPUs it was compiled for, the C library it wants, the symbols it lacks."""

from __future__ import annotations

import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from recipes.catalogue.load import Catalogue
from recipes.catalogue.schema import Pin, Target
from recipes.errors import Refusal
from recipes.make import audit
from recipes.tests.objects import CUBIN, PORTABLE, PTX, fatbin, library

CPU, GPU = Catalogue().target("cpu"), Catalogue().target("cu13.0-torch2.11")


@pytest.fixture
def pin() -> Pin:
    """The cpu target's compiled package."""
    return pinned(CPU, "deepspeed")


@pytest.fixture
def apex() -> Pin:
    """A package with GPU code, in a target for sm 9.0."""
    return pinned(GPU, "apex")


def pinned(target: Target, package: str) -> Pin:
    """What a target pins of a package."""
    return next(pin for pin in Catalogue().pins(target) if pin.name == package)


def wheel(folder: Path, *files: Path, metadata: str = "") -> Path:
    """A zip file that holds these files, named like a wheel."""
    made = folder / "deepspeed-0.19.8-cp311-cp311-linux_x86_64.whl"
    with zipfile.ZipFile(made, "w") as archive:
        for file in files:
            archive.write(file, f"deepspeed/{file.name}")
        archive.writestr("deepspeed-0.19.8.dist-info/METADATA", metadata)
    return made


@pytest.fixture
def beside(tmp_path: Path) -> Path:
    """A site-packages: torch's one library defines at_work(), and cuBLAS, which comes with torch, multiply()."""
    site = tmp_path / "site-packages"
    library(site / "torch" / "lib", "libtorch", "void at_work() {}", "-Wl,--hash-style=gnu")
    library(site / "nvidia" / "cu13" / "lib", "libcublas", "void multiply() {}", "-Wl,--hash-style=gnu")
    return site


def test_a_portable_extension_passes(tmp_path: Path, pin: Pin, beside: Path) -> None:
    code = "void at_work(); void multiply(); void op() { at_work(); multiply(); }"
    made = library(tmp_path, "op", code, *PORTABLE)
    (beside / "rows.some.parquet").write_bytes(b"PAR1")  # pyarrow's tests have files with such names
    report = audit.audit(wheel(tmp_path, made), pin, CPU, beside, "2.36")
    assert report == {"extensions": ["deepspeed/op.so"], "march": ["x86-64-v3"], "glibc": report["glibc"]}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["-march=native", "-frecord-gcc-switches"], "march=native"),
        (["-march=haswell", "-frecord-gcc-switches"], "compiled for haswell"),
        ([*PORTABLE, "-mavx512f"], "avx512f"),
        (["-march=x86-64-v3"], "does not say which CPU"),
    ],
    ids=["native", "one CPU", "more than the name says", "unknown"],
)
def test_an_extension_for_one_cpu_is_refused(tmp_path: Path, pin: Pin, flags: list[str], message: str) -> None:
    made = library(tmp_path, "op", "void op() {}", *flags)
    with pytest.raises(Refusal, match=message):
        audit.audit(wheel(tmp_path, made), pin, CPU, None, "2.36")


def test_a_symbol_that_torch_lacks_is_named(tmp_path: Path, pin: Pin, beside: Path) -> None:
    made = library(tmp_path, "op", "void of_another_torch(); void op() { of_another_torch(); }", *PORTABLE)
    with pytest.raises(Refusal, match=r"op\.so has the undefined symbol _Z16of_another_torchv"):
        audit.audit(wheel(tmp_path, made), pin, CPU, beside, "2.36")


@pytest.mark.parametrize(("version", "refused"), [("v11_abi1", False), ("v5_abi0", True)])
def test_pybind11_is_torch_s(tmp_path: Path, pin: Pin, beside: Path, version: str, refused: bool) -> None:
    """Another torch's may find every symbol: all that torch 2.1 wants for a small extension, 2.11 still has."""
    name = 'const char *internals() {{ return "__pybind11_internals_{}__"; }}'
    library(beside / "torch" / "lib", "libtorch_python", name.format("v11_abi1"))
    made = library(tmp_path, "op", name.format(version), *PORTABLE)
    if not refused:
        audit.audit(wheel(tmp_path, made), pin, CPU, beside, "2.36")
        return
    with pytest.raises(Refusal, match=r"op\.so was compiled with __pybind11_internals_v5_abi0__, and this torch with"):
        audit.audit(wheel(tmp_path, made), pin, CPU, beside, "2.36")


def test_a_newer_c_library_than_the_target_s_is_refused(tmp_path: Path, pin: Pin) -> None:
    made = library(tmp_path, "op", '#include <cstdio>\nvoid op() { std::puts(""); }', *PORTABLE)
    with pytest.raises(Refusal, match=r"needs GLIBC 2\S*, and the target runs on 2\.1"):
        audit.audit(wheel(tmp_path, made), pin, CPU, None, "2.1")


def test_a_wheel_without_its_extensions_is_refused(tmp_path: Path, pin: Pin) -> None:
    with pytest.raises(Refusal, match="holds no compiled extension"):
        audit.audit(wheel(tmp_path), pin, CPU, None, "2.36")


# --- GPU code


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([[(CUBIN, 90)]], ""),
        ([[(CUBIN, 80)], [(PTX, 90), (CUBIN, 90)]], ""),
        ([[(CUBIN, 80)]], r"op\.so is compiled for sm 8\.0 and target cu13\.0-torch2\.11 is for 9\.0"),
        ([[(CUBIN, 80), (CUBIN, 120)]], r"compiled for sm 12\.0, 8\.0 and target"),
        ([[(PTX, 90)]], r"compiled for sm none, PTX only, and target"),
        ([], "holds no GPU code at all"),
    ],
    ids=["its GPU", "more than its GPU", "another GPU", "two others", "PTX only", "no GPU"],
)
def test_gpu_code_is_for_the_target_s_gpu(
    tmp_path: Path, apex: Pin, files: list[list[tuple[int, int]]], message: str
) -> None:
    made = library(tmp_path, "op", "\n".join(fatbin(*entries) for entries in files) + "\nvoid op() {}", *PORTABLE)
    if not message:
        assert audit.audit(wheel(tmp_path, made), apex, GPU, None, "2.39")["sm"] == {
            "deepspeed/op.so": sorted({f"{sm / 10:.1f}" for entries in files for kind, sm in entries if kind == CUBIN})
        }
        return
    with pytest.raises(Refusal, match=message):
        audit.audit(wheel(tmp_path, made), apex, GPU, None, "2.39")


def test_an_extension_without_gpu_code_beside_one_with_it_passes(tmp_path: Path, apex: Pin) -> None:
    made = [library(tmp_path, "op", fatbin((CUBIN, 90)), *PORTABLE), library(tmp_path, "host", "", *PORTABLE)]
    assert audit.audit(wheel(tmp_path, *made), apex, GPU, None, "2.39")["sm"] == {"deepspeed/op.so": ["9.0"]}


def test_a_package_for_some_gpus_needs_gpu_code_for_those_alone(tmp_path: Path, apex: Pin) -> None:
    target = GPU.model_copy(update={"sm": ["8.0", "9.0", "10.0"]})
    narrow = apex.model_copy(update={"release": apex.release.model_copy(update={"sm": ["9.0"]})})
    made = wheel(tmp_path, library(tmp_path, "op", fatbin((CUBIN, 90)), *PORTABLE))
    assert audit.audit(made, narrow, target, None, "2.39")["sm"] == {"deepspeed/op.so": ["9.0"]}
    with pytest.raises(Refusal, match=r"is for 8\.0: set the package's architectures"):
        audit.audit(made, apex, target, None, "2.39")


def test_a_damaged_list_of_gpu_code_ends() -> None:
    for damaged in (b"\x50\xed\x55\xba", b"\x50\xed\x55\xba" * 64, b"\x50\xed\x55\xba" + bytes(64), bytes(4096)):
        assert not list(audit._machine_code(damaged))


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="unproven here: no nvcc")
@pytest.mark.parametrize(
    ("code", "has"),
    [("sm_90", {"9.0"}), ("compute_90", set())],
)
def test_what_nvcc_writes_is_read(tmp_path: Path, code: str, has: set[str]) -> None:
    source, made = tmp_path / "kernel.cu", tmp_path / "kernel.so"
    source.write_text("__global__ void kernel(float *x) { *x += 1; }")
    options = ["-gencode", f"arch=compute_90,code={code}", "-shared", "-Xcompiler", "-fPIC", "-o", str(made)]
    subprocess.run(["nvcc", *options, str(source)], check=True)
    assert [extension.gpus for extension in audit.extensions(wheel(tmp_path, made))] == [has]


# --- what a wheel says about itself


def metadata(pin: Pin, *extra: str, version: str = "0.19.8") -> str:
    return "\n".join(
        [
            f"Name: {pin.name}",
            f"Version: {version}",
            *(f"Requires-Dist: {requirement}" for requirement in [*pin.release.requires, *extra]),
        ]
    )


@pytest.mark.parametrize(
    ("version", "extra", "message"),
    [
        ("0.19.8", [], ""),
        ("0.19.8", ["left-pad>=1"], "lacks 'left-pad>=1'"),
        ("0.19.7", [], "calls itself deepspeed 0.19.7"),
    ],
    ids=["agrees", "another requirement", "another version"],
)
def test_metadata_must_be_what_the_recipe_says(
    tmp_path: Path, pin: Pin, version: str, extra: list[str], message: str
) -> None:
    made = wheel(tmp_path, metadata=metadata(pin, *extra, version=version))
    if not message:
        audit.check_metadata(made, pin, CPU)
        return
    with pytest.raises(Refusal, match=message):
        audit.check_metadata(made, pin, CPU)


def test_an_extra_s_requirement_is_not_the_package_s(tmp_path: Path, pin: Pin) -> None:
    made = wheel(tmp_path, metadata=metadata(pin, 'sphinx; extra == "docs"'))
    audit.check_metadata(made, pin, CPU)


def test_metadata_may_leave_out_what_the_recipe_calls_undeclared(tmp_path: Path, pin: Pin) -> None:
    release = pin.release.model_copy(update={"undeclared": ["left-pad>=1"]})
    assert "left-pad>=1" in release.needs
    made = wheel(tmp_path, metadata=metadata(pin))
    audit.check_metadata(made, pin.model_copy(update={"release": release}), CPU)
