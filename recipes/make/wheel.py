"""A wheel with some of its files changed, added or renamed: the same archive, its RECORD renewed.

What did not change is copied as it lies there, compressed, so a wheel of 2 GB takes seconds and no memory. What did is
stored uncompressed: its bytes then depend on no machine's zlib, and the same patch makes the same wheel everywhere.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, BinaryIO

from recipes.errors import Refusal
from recipes.make.audit import opened


def extract(wheel: Path, files: Iterable[str], into: Path) -> None:
    """Unpack those of the files that the wheel has."""
    with opened(wheel) as archive:
        for name in set(files) & set(archive.namelist()):
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            (into / name).write_bytes(archive.read(name))


def repack(wheel: Path, tree: Path, files: Iterable[str], final: Path) -> None:
    """Write `wheel` anew as `final`, these files taken from `tree`; order, dates and modes of all entries stay.

    A RECORD that does not describe the wheel is refused: every file must be in it, and those that change as they were.
    """
    with opened(wheel) as archive, wheel.open("rb") as source, zipfile.ZipFile(final, "w") as made:
        changed = {name: (tree / name).read_bytes() for name in files}
        record = record_of(wheel, archive)
        changed[record] = _renewed(wheel, archive, record, changed)
        ends = _ends(archive)
        for info in sorted(archive.infolist(), key=lambda info: info.header_offset):
            if info.filename in changed:
                made.writestr(_like(info, info.filename), changed[info.filename])
            else:
                _copy(source, info, ends[info.header_offset], made)


def relabel(wheel: Path, final: Path, renamed: Callable[[str], str], changed: Mapping[str, bytes]) -> None:
    """Write `wheel` anew as `final`: its entries under new names, these files changed or added, RECORD written anew.

    `changed` names files as they are called in `final`; those that the wheel lacks come last, before RECORD. A hash in
    the old RECORD that is not its file's is refused.
    """
    with opened(wheel) as archive, wheel.open("rb") as source, zipfile.ZipFile(final, "w") as made:
        record = record_of(wheel, archive)
        signatures = {f"{record}.jws", f"{record}.p7s"}  # signatures of the old RECORD
        rows = csv.reader(archive.read(record).decode("utf-8").splitlines())
        listed = {name: digest for name, digest, _ in rows if digest.startswith("sha256=")}
        ends = _ends(archive)
        entries: dict[str, list[str]] = {}
        for info in sorted(archive.infolist(), key=lambda info: info.header_offset):
            old, end = info.filename, ends[info.header_offset]
            if old in {record, *signatures}:
                continue
            new = renamed(old)
            with archive.open(info) as file:
                entry = _entry_of(file)
            if listed.get(old, entry[0]) != entry[0]:
                raise Refusal(
                    f"{wheel.name}: its RECORD says {listed[old]} of {old}, which has {entry[0]}: build it again."
                )
            if new in changed:
                entry = _entry(changed[new])
                made.writestr(_like(info, new), changed[new])
            elif new != old:
                made.writestr(_like(info, new), archive.read(info))
            else:
                _copy(source, info, end, made)
            if not info.is_dir():
                entries[new] = entry
        kind = archive.getinfo(record)
        for name in sorted(changed.keys() - entries.keys()):
            made.writestr(_like(kind, name), changed[name])
            entries[name] = _entry(changed[name])
        made.writestr(_like(kind, renamed(record)), _record(entries, renamed(record)))


def _record(entries: Mapping[str, list[str]], name: str) -> str:
    """The text of a RECORD of that name, which lists itself without a hash."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(
        [*([file, *entry] for file, entry in entries.items()), [name, "", ""]]
    )
    return text.getvalue()


def _ends(archive: zipfile.ZipFile) -> dict[int, int]:
    """Where each entry ends, by where it starts."""
    starts = sorted(info.header_offset for info in archive.infolist())
    return dict(zip(starts, [*starts[1:], archive.start_dir], strict=True))


def record_of(wheel: Path, archive: zipfile.ZipFile) -> str:
    """The name of a wheel's RECORD in its archive."""
    records = [name for name in archive.namelist() if name.endswith(".dist-info/RECORD") and name.count("/") == 1]
    if len(records) != 1:
        raise Refusal(f"{wheel.name} has {len(records)} RECORD files, and a wheel has one: check the recipe's file.")
    return records[0]


def _renewed(wheel: Path, archive: zipfile.ZipFile, record: str, changed: Mapping[str, bytes]) -> bytes:
    """RECORD with the changed files' hashes and sizes; every other line stays as it is."""
    lines = archive.read(record).decode("utf-8").splitlines(keepends=True)
    rows = [next(csv.reader([line])) for line in lines]
    listed, there = {row[0] for row in rows}, {info.filename for info in archive.infolist() if not info.is_dir()}
    unsigned = {record, f"{record}.jws", f"{record}.p7s"}  # a signature of RECORD cannot be in it (PEP 427)
    if strange := sorted((listed ^ there) - unsigned):
        fault = "lacks" if strange[0] in there else "lists the missing"
        raise Refusal(f"{wheel.name}: its RECORD {fault} {strange[0]}: report it to the package's publisher.")
    if new := sorted(set(changed) - there):
        raise Refusal(f"{wheel.name} has no file {new[0]}, and a patched wheel keeps its list: correct the patch.")
    # Only these: torch 1.12.1's RECORD is wrong about the size of its METADATA, which upstream edited afterwards.
    for index, row in enumerate(rows):
        if row[0] in changed:
            if row[1:] != _entry(before := archive.read(row[0])):
                raise Refusal(
                    f"{wheel.name}: its RECORD says {','.join(row[1:])} of {row[0]}, which has "
                    f"{','.join(_entry(before))}: report it to the package's publisher."
                )
            lines[index] = lines[index].replace(",".join(row[1:]), ",".join(_entry(changed[row[0]])))
    return "".join(lines).encode()


def _entry(data: bytes) -> list[str]:
    """Hash and size as RECORD has them (PEP 376, PEP 427)."""
    return _entry_of(io.BytesIO(data))


def _entry_of(file: IO[bytes]) -> list[str]:
    digest, count = hashlib.sha256(), 0
    while chunk := file.read(2**20):
        digest.update(chunk)
        count += len(chunk)
    return [f"sha256={base64.urlsafe_b64encode(digest.digest()).rstrip(b'=').decode()}", str(count)]


def _like(info: zipfile.ZipInfo, name: str) -> zipfile.ZipInfo:
    """An entry of that name with the same date and mode, uncompressed."""
    made = zipfile.ZipInfo(name, info.date_time)
    for name in ("create_system", "external_attr", "internal_attr"):
        setattr(made, name, getattr(info, name))
    return made


def _copy(source: BinaryIO, info: zipfile.ZipInfo, end: int, made: zipfile.ZipFile) -> None:
    """Copy an entry unchanged from `source`, from its header to the next entry's. zipfile has no way to do so."""
    assert made.fp
    start, info.header_offset = info.header_offset, made.start_dir
    made.fp.seek(made.start_dir)
    source.seek(start)
    left = end - start
    while left:
        chunk = source.read(min(left, 2**20))
        if not chunk:
            raise zipfile.BadZipFile(f"it ends inside {info.filename}")
        made.fp.write(chunk)
        left -= len(chunk)
    made.start_dir = made.fp.tell()
    made.filelist.append(info)
    made.NameToInfo[info.filename] = info
