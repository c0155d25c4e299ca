"""Read what a shared library needs and offers, from its ELF headers: little-endian 64-bit files, as on x86-64.

It needs the standard library only; recipes/make/audit.py reads more of a wheel's extensions, with pyelftools.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Iterator, List, NamedTuple, Set, Tuple

SECTION = struct.Struct("<IIQQQQIIQQ")  # Elf64_Shdr
SYMBOL = struct.Struct("<IBBHQQ")  # Elf64_Sym
ENTRY = struct.Struct("<qQ")  # Elf64_Dyn
DYNAMIC, DYNSYM = 6, 11  # types of sections
NEEDED = 1  # a tag in the dynamic section
WEAK = 2


class Library(NamedTuple):
    """One shared library: the libraries that it loads, and its symbols.

    wanted: the symbols that others must have (weak ones may be missing); offered: those that it has.
    """

    needed: Tuple[str, ...]
    wanted: Set[bytes]
    offered: Set[bytes]


def read(path: Path) -> Library:
    """The shared library at `path`; ValueError if it is none that this module can read, OSError as open() has it."""
    with open(str(path), "rb") as file:
        try:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:  # an empty file
            raise ValueError(f"{path} is empty") from None
        with content:
            if content[:6] != b"\x7fELF\x02\x01":
                raise ValueError(f"{path} is no little-endian 64-bit ELF file")
            try:
                return _library(content)
            except (struct.error, IndexError, OverflowError, ValueError):
                raise ValueError(f"{path} is cut off") from None


def _library(content: mmap.mmap) -> Library:
    (offset,), (size, count) = struct.unpack_from("<Q", content, 40), struct.unpack_from("<HH", content, 58)
    sections = [SECTION.unpack_from(content, offset + number * size) for number in range(count)]
    needed: List[str] = []
    wanted: Set[bytes] = set()
    offered: Set[bytes] = set()
    for section in sections:
        kind, at, length, link = section[1], section[4], section[5], section[6]
        if kind == DYNAMIC:
            for tag, value in ENTRY.iter_unpack(content[at : at + length]):
                if tag == NEEDED:
                    needed.append(_text(content, sections[link][4] + value).decode())
        elif kind == DYNSYM:
            for name, is_undefined, is_weak in _symbols(content, at, length, sections[link]):
                if not is_undefined:
                    offered.add(name)
                elif not is_weak:
                    wanted.add(name)
    return Library(tuple(needed), wanted, offered)


def _symbols(content: mmap.mmap, at: int, length: int, names: Tuple[int, ...]) -> Iterator[Tuple[bytes, bool, bool]]:
    """Name, whether it is undefined and whether it is weak, of each symbol of a table."""
    table = content[names[4] : names[4] + names[5]]
    for name, info, _, section, _, _ in SYMBOL.iter_unpack(content[at : at + length]):
        if name:
            yield table[name : table.index(b"\0", name)], section == 0, info >> 4 == WEAK


def _text(content: mmap.mmap, at: int) -> bytes:
    return content[at : content.find(b"\0", at)]
