"""Shared objects of a compiled package, made here: compiled, or with the containers that nvcc leaves."""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path

PORTABLE = ["-march=x86-64-v3", "-frecord-gcc-switches"]


def library(folder: Path, name: str, code: str, *flags: str) -> Path:
    """A shared object compiled from C++ code."""
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / f"{name}.cpp"
    source.write_text(code)
    made = folder / f"{name}.so"
    subprocess.run(["c++", "-shared", "-fPIC", *flags, "-o", str(made), str(source)], check=True)
    return made


def fatbin(*entries: tuple[int, int]) -> str:
    """Assembler for what nvcc leaves in an object of one source file: (kind, architecture) of each entry."""
    body = b"".join(
        struct.pack("<HHIQIIHHI32x", kind, 0x101, 64, 8, 0, 0, 0, 1, sm) + b"\x7fELF...." for kind, sm in entries
    )
    container = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body
    bytes_ = ",".join(map(str, container))
    return f'__asm__(".section .nv_fatbin, \\"a\\"\\n.byte {bytes_}\\n.balign 8\\n.text");'


CUBIN, PTX = 2, 1
