"""The core metadata of a published file, read without running any of its code."""

from __future__ import annotations

import re
import tarfile
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path

from packaging.requirements import Requirement

from recipes.make import audit


def metadata(path: Path) -> Message:
    """The metadata of a wheel, or of an sdist (empty where that has none)."""
    if path.suffix == ".whl":
        text = audit.described(path, "METADATA")
    else:
        with tarfile.open(path) as tar:
            text = of_sdist(tar, "PKG-INFO")
    return HeaderParser().parsestr(text.decode(errors="replace"))


def requires(described: Message) -> list[str] | None:
    """The requirements that hold without an extra; None where they are known only after a build."""
    listed = described.get_all("Requires-Dist")
    if listed is None:
        return None
    parsed = [Requirement(text) for text in listed]
    return [
        str(requirement) for requirement in parsed if not (requirement.marker and "extra" in str(requirement.marker))
    ]


def of_sdist(tar: tarfile.TarFile, name: str) -> bytes:
    """A file in the one folder of an open sdist; empty if it is not there."""
    member = next((entry for entry in tar if re.fullmatch(rf"[^/]+/{re.escape(name)}", entry.name)), None)
    file = tar.extractfile(member) if member else None
    return file.read() if file else b""
