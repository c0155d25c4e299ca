"""Is a wheel what it claims to be, and will it load? Read from its bytes (pyelftools); nothing is imported or run.

For each extension: the CPU it was compiled for (from .GCC.command.line, so -march=native is seen whoever set it), the
GPUs (from .nv_fatbin, as `cuobjdump --list-elf` shows them), the newest GLIBC version it needs, and every undefined
symbol, looked up in the target's torch and the libraries that come with it (cuBLAS). Code compiled against another
torch may find all its symbols and still not understand this torch's objects: both must use the same pybind11.
"""

from __future__ import annotations

import contextlib
import io
import re
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from email.parser import HeaderParser
from functools import cached_property
from pathlib import Path
from typing import Any

from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from recipes.catalogue.schema import Pin, Target, is_version
from recipes.errors import Refusal

PORTABLE = ("x86-64", "x86-64-v2", "x86-64-v3")  # what a published wheel may be compiled for
_FATBIN, _CUBIN = bytes.fromhex("50ed55ba"), 2


@dataclass(frozen=True)
class Extension:
    """One shared object of a wheel."""

    name: str
    elf: Any

    @cached_property
    def cpus(self) -> set[str]:
        """What it was compiled for: -march values, and features beyond v3. gcc records `native` as what it found."""
        section = self.elf.get_section_by_name(".GCC.command.line")
        recorded = section.data().decode(errors="replace") if section else ""
        return {cpu or more for cpu, more in re.findall(r"-march=([\w.+-]+)|-m((?:avx512|avx10|amx)\S*)", recorded)}

    @cached_property
    def gpus(self) -> set[str] | None:
        """The GPU architectures that it has machine code for, as "9.0"; PTX is none. None if it has no GPU code."""
        section = self.elf.get_section_by_name(".nv_fatbin")
        return None if section is None else set(_machine_code(section.data()))

    @cached_property
    def glibc(self) -> Version:
        """The newest GLIBC version it wants."""
        wanted = [Version("2.0")]
        for section in self.elf.iter_sections():
            if isinstance(section, GNUVerNeedSection):
                for _, entries in section.iter_versions():
                    names = [entry.name for entry in entries]
                    wanted += [
                        Version(name.removeprefix("GLIBC_")) for name in names if re.fullmatch(r"GLIBC_[\d.]+", name)
                    ]
        return max(wanted)

    @cached_property
    def bindings(self) -> set[str]:
        """Under which names pybind11 shares objects with other modules: its version and the C++ ABI."""
        section = self.elf.get_section_by_name(".rodata")
        return {
            name.decode() for name in re.findall(rb"__pybind11_internals_\w+__", section.data() if section else b"")
        }

    @cached_property
    def defined(self) -> set[str]:
        """The dynamic symbols it defines."""
        return {symbol.name for symbol in self._dynamic.iter_symbols() if symbol["st_shndx"] != "SHN_UNDEF"}

    @cached_property
    def wanted(self) -> set[str]:
        """The symbols it wants from elsewhere. Weak ones may be missing; versioned ones are a system library's."""
        versions = self.elf.get_section_by_name(".gnu.version")
        return {
            symbol.name
            for index, symbol in enumerate(self._dynamic.iter_symbols())
            if symbol.name
            and symbol["st_shndx"] == "SHN_UNDEF"
            and symbol["st_info"]["bind"] != "STB_WEAK"
            and (versions is None or versions.get_symbol(index)["ndx"] in ("VER_NDX_GLOBAL", "VER_NDX_LOCAL"))
        }

    @cached_property
    def libraries(self) -> set[str]:
        """The libraries that it names to be loaded with it."""
        section = self.elf.get_section_by_name(".dynamic")
        return {tag.needed for tag in section.iter_tags("DT_NEEDED")} if section else set()

    @property
    def _dynamic(self) -> Any:
        return self.elf.get_section_by_name(".dynsym")


def _machine_code(fatbin: bytes) -> Iterator[str]:
    """The architecture of each cubin in nvcc's containers, of which there is one for each source file.

    NVIDIA documents neither; CUDA 11 to 13 write them alike. A container: magic, version, length of this header, length
    of the entries. An entry: kind, length of its header, length of its payload, and architecture at byte 28.
    """
    at = 0
    while (at := fatbin.find(_FATBIN, at)) >= 0 and at + 16 <= len(fatbin):
        header, entries = struct.unpack_from("<6xHQ", fatbin, at)
        at += max(header, 16)
        end = min(at + entries, len(fatbin))
        while at + 32 <= end:
            kind, header, payload, sm = struct.unpack_from("<H2xIQ12xI", fatbin, at)
            if kind == _CUBIN:
                yield f"{sm // 10}.{sm % 10}"
            at += max(header + payload, 32)
        at = end


def extensions(wheel: Path) -> list[Extension]:
    """The shared objects of a wheel."""
    with opened(wheel) as archive:
        names = [name for name in archive.namelist() if re.search(r"\.so(\.\d+)*$", name)]
        return [Extension(name, ELFFile(io.BytesIO(archive.read(name)))) for name in names]


@contextlib.contextmanager
def readable(wheel: Path) -> Iterator[None]:
    """Refuse a wheel whose content cannot be read."""
    try:
        yield
    except (zipfile.BadZipFile, zlib.error, ELFError, LookupError, ValueError) as error:
        raise Refusal(
            f"{wheel.name} cannot be read as a wheel ({error}): check it, then build or export it again."
        ) from None


@contextlib.contextmanager
def opened(wheel: Path) -> Iterator[zipfile.ZipFile]:
    """A wheel, opened for reading; an unreadable one is refused."""
    with readable(wheel), zipfile.ZipFile(wheel) as archive:
        yield archive


def described(wheel: Path, part: str) -> bytes:
    """A file of the wheel's .dist-info folder: METADATA, RECORD."""
    with opened(wheel) as archive:
        return archive.read("".join(name for name in archive.namelist() if name.endswith(f".dist-info/{part}")))


def audit(wheel: Path, pin: Pin, target: Target, beside: Path | None, glibc: str) -> dict[str, object]:
    """Refuse a compiled wheel that is not portable, would not load or lacks a GPU; return what its record holds.

    `beside` is the site-packages that it was compiled beside, `glibc` the C library that it has to run on.
    """
    compiled = extensions(wheel)
    if pin.build.compiler != "none" and not compiled:
        raise Refusal(
            f"{pin.label}: {wheel.name} holds no compiled extension: the build left them out; see its log "
            "and the recipe's env."
        )
    for extension in compiled:
        refuse_unportable(pin.label, extension)
        if extension.glibc > Version(glibc):
            raise Refusal(
                f"{pin.label}: {extension.name} needs GLIBC {extension.glibc}, and the target runs on "
                f"{glibc}: build it on the declared base."
            )
    if beside is not None:
        _refuse_unresolved(pin, compiled, beside)
        _refuse_other_bindings(pin, compiled, beside / "torch" / "lib" / "libtorch_python.so")
    gpus = {"sm": check_architectures(pin, target, compiled)} if pin.build.compiler == "nvcc" else {}
    return {
        "extensions": sorted(extension.name for extension in compiled),
        "march": sorted(set().union(*(extension.cpus for extension in compiled))),
        "glibc": str(max((extension.glibc for extension in compiled), default="none")),
        **gpus,
    }


def check_architectures(pin: Pin, target: Target, compiled: Iterable[Extension]) -> dict[str, list[str]]:
    """Refuse a CUDA wheel with an extension that lacks a target architecture; return those of each extension.

    More architectures than the target's are allowed: some packages cannot be narrowed (transformer-engine before 1.11).
    """
    gpus = {extension.name: sorted(extension.gpus) for extension in compiled if extension.gpus is not None}
    if not gpus:
        raise Refusal(
            f"{pin.label}: its wheel holds no GPU code at all: set FORCE_CUDA or its like in the recipe's env."
        )
    for name, has in sorted(gpus.items()):
        if missing := [sm for sm in pin.architectures(target) if sm not in has]:
            raise Refusal(
                f"{pin.label}: {name} is compiled for sm {', '.join(has) or 'none, PTX only,'} and target "
                f"{target.name} is for {missing[0]}: set the package's architectures in its recipe's env."
            )
    return dict(sorted(gpus.items()))


def refuse_unportable(label: str, extension: Extension) -> None:
    """Refuse an extension compiled for the machine that built it."""
    if not extension.cpus:
        raise Refusal(
            f"{label}: {extension.name} does not say which CPU it was compiled for: build it with "
            "docker/build-wheel.sh."
        )
    if wrong := sorted(extension.cpus - set(PORTABLE)):
        raise Refusal(
            f"{label}: {extension.name} was compiled for {wrong[0]} (-march=native?) and may not run elsewhere: "
            f"name one of {', '.join(PORTABLE)} by a setting or a patch."
        )


def _refuse_unresolved(pin: Pin, compiled: Iterable[Extension], beside: Path) -> None:
    own = set().union(*(extension.defined for extension in compiled))
    # torch's libraries first: they define nearly all symbols; then CUDA's and those of packages it was built beside.
    named = (path for path in beside.rglob("*.so*") if re.search(r"\.so(\.\d+)*$", path.name))
    libraries = sorted(named, key=lambda path: (path.parent != beside / "torch" / "lib", path))
    for extension in compiled:
        wanted = {name for name in extension.wanted - own if not re.match(r"_?Py", name)}
        for library in libraries:
            if wanted:
                with library.open("rb") as file:
                    table: Any = ELFFile(file).get_section_by_name(".gnu.hash")
                    wanted = {name for name in wanted if table is None or table.get_symbol(name) is None}
        if wanted:
            raise Refusal(
                f"{pin.label}: {extension.name} has the undefined symbol {min(wanted)}, not in this torch: "
                "build it against the target's torch."
            )


def _refuse_other_bindings(pin: Pin, compiled: Iterable[Extension], torch: Path) -> None:
    if not torch.exists():
        return
    with torch.open("rb") as file:
        ours = Extension(torch.name, ELFFile(file)).bindings
    for extension in compiled:
        if ours and (strange := extension.bindings - ours):
            raise Refusal(
                f"{pin.label}: {extension.name} was compiled with {min(strange)}, and this torch with {min(ours)}: "
                "build it against the target's torch."
            )


def check_metadata(wheel: Path, pin: Pin, target: Target) -> None:
    """Refuse a wheel whose name, version or requirements are not what the recipe says."""
    metadata = HeaderParser().parsestr(described(wheel, "METADATA").decode(errors="replace"))
    name, version = metadata["Name"] or "nothing", metadata["Version"] or ""
    same = is_version(version) and Version(version) == Version(pin.release.metadata_version)
    if canonicalize_name(name) != pin.name or not same:
        raise Refusal(
            f"{wheel.name} calls itself {name} {version}, and the recipe says {pin.label}: correct the recipe."
        )
    with readable(wheel):
        theirs = _normalised(metadata.get_all("Requires-Dist") or [], target)
    ours = _normalised(pin.release.requires, target)
    if difference := sorted(theirs ^ ours):
        side = "lacks" if difference[0] in theirs else "should not have"
        raise Refusal(
            f"recipes/packages/{pin.name}.toml: release {pin.release.version}: requires {side} "
            f"{difference[0]!r} (says {wheel.name}): correct it."
        )


def _normalised(requirements: Iterable[str], target: Target) -> set[str]:
    parsed = [Requirement(text) for text in requirements]
    return {
        f"{canonicalize_name(requirement.name)}{requirement.specifier}"
        for requirement in parsed
        if target.applies(requirement)
    }
