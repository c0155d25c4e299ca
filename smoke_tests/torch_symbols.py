"""Write torch_symbols.json, by which doctor.py traces a symbol: `python -m smoke_tests.torch_symbols WHEEL...`.

Of the wheels given, those of torch (built for CUDA) are the releases that the table knows; the others hold the
extensions whose symbols are looked up. The table has every symbol that has the qualified name of one of those and is
not in all of the releases: releases, separated by spaces -> the symbols that exactly these have.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Dict, Iterator, List, Pattern, Set

from smoke_tests import elf
from smoke_tests.distributions import release
from smoke_tests.doctor import OF_TORCH, ROOM

TORCH = re.compile(r"torch/lib/lib(c10|c10_cuda|torch_cpu|torch_python)\.so$")  # not libtorch_cuda: 1 GiB


def libraries(wheel: Path, chosen: Pattern[str]) -> Iterator[elf.Library]:
    """The shared libraries of a wheel whose names match."""
    with zipfile.ZipFile(str(wheel)) as archive, tempfile.TemporaryDirectory() as folder:
        for name in filter(chosen.search, archive.namelist()):
            path = Path(archive.extract(name, folder))
            yield elf.read(path)
            path.unlink()


def qualified(symbol: bytes) -> bytes:
    """The part of a mangled name before its arguments: those are what changes most."""
    match = re.match(rb"_ZN[rVK]*[RO]?", symbol)
    at = match.end() if match else len(symbol)
    while True:
        match = re.compile(rb"\d+").match(symbol, at)
        if not match:
            return symbol[:at]
        at = match.end() + int(match.group())


def table(wheels: List[Path]) -> Dict[str, List[str]]:
    """The content of torch_symbols.json for these wheels."""
    names: Set[bytes] = set()
    for wheel in wheels:
        if not wheel.name.startswith("torch-"):
            for library in libraries(wheel, re.compile(r"\.so$")):
                if any(name.startswith(("libtorch", "libc10")) for name in library.needed):
                    names |= {qualified(symbol) for symbol in library.wanted if OF_TORCH.match(symbol)}
    holders: Dict[str, List[str]] = {}
    torches = {wheel.name.split("-")[1]: wheel for wheel in wheels if wheel.name.startswith("torch-")}
    for version in sorted(torches, key=release):
        offered = {symbol for library in libraries(torches[version], TORCH) for symbol in library.offered}
        for mangled in offered:
            if OF_TORCH.match(mangled) and qualified(mangled) in names:
                holders.setdefault(mangled.decode(), []).append(version)
    changed: Dict[str, List[str]] = {}
    for symbol, versions in sorted(holders.items()):
        if len(versions) < len(torches):
            changed.setdefault(" ".join(versions), []).append(symbol)
    return {versions: changed[versions] for versions in sorted(changed)}


if __name__ == "__main__":
    text = json.dumps(table([Path(word) for word in sys.argv[1:]]), indent=0)
    (ROOM / "torch_symbols.json").write_text(text + "\n", encoding="utf-8")
