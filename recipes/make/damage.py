"""What an environment lacks of what was installed into it, by the RECORD files of its distributions."""

from __future__ import annotations

import csv
import subprocess
from collections.abc import Iterable
from pathlib import Path

from packaging.utils import canonicalize_name
from packaging.version import Version

from recipes.catalogue.schema import is_version


def damage(python: Path, site: Path, distributions: Iterable[tuple[str, str]]) -> str:
    """The first thing that is wrong with an environment, or "".

    Its Python has to run, each of these distributions (name, version) has to be in `site`, its site-packages, and
    every file of each has to have its size. Hashes are left to the claims: reading gigabytes takes too long here.
    """
    try:
        runs = (
            subprocess.run([str(python), "-I", "-S", "-B", "-c", ""], capture_output=True, check=False).returncode == 0
        )
    except OSError:
        runs = False
    if not runs:
        return f"{python} does not run"
    folders = {}
    for info in site.glob("*.dist-info"):
        name, _, version = info.name.removesuffix(".dist-info").partition("-")
        if is_version(version):
            folders[canonicalize_name(name), Version(version)] = info
    for name, version in distributions:
        installed = folders.get((canonicalize_name(name), Version(version)))
        if installed is None:
            return f"{name} {version} is missing"
        if fault := _damaged_file(installed):
            return fault
    return ""


def _damaged_file(info: Path) -> str:
    """The first file of a distribution that is missing or has another size, or ""."""
    try:
        with (info / "RECORD").open(encoding="utf-8", newline="") as file:
            for name, _, size in csv.reader(file):
                path = info.parent / name
                if not path.exists():
                    return f"{path} is missing"
                if size and path.stat().st_size != int(size):
                    return f"{path} has {path.stat().st_size} bytes instead of {size}"
    except (OSError, ValueError) as error:
        return f"{info / 'RECORD'} cannot be read ({error})"
    return ""
