"""Is every package the pinned one? This is tested before anything else."""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib
import importlib.metadata
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Dict, Iterator, Optional, Set, Tuple

from smoke_tests.claims import needs, proves


def site_packages(package: str) -> Path:
    """The folder that a distribution is installed into."""
    return Path(str(importlib.metadata.distribution(package).locate_file(""))).resolve()


def record_of(package: str, manifest: Dict[str, Any]) -> bytes:
    """The pinned wheel's own RECORD, kept beside the manifest (an installer rewrites the installed one)."""
    return Path(manifest["path"].parent, package + ".RECORD").read_bytes()


def rows_of(record: bytes) -> Iterator[Tuple[str, str]]:
    """Path and sha256 (hex) of each file that a RECORD lists with a hash (it lists itself without one)."""
    for path, digest, _ in csv.reader(record.decode("utf-8").splitlines()):
        if digest:
            algorithm, _, code = digest.partition("=")
            assert algorithm == "sha256", f"{path} is recorded by {algorithm}"
            yield path, base64.urlsafe_b64decode(code + "=" * (-len(code) % 4)).hex()


def installed_path(path: str, root: Path) -> Path:
    """Where an installer puts a file of a wheel: `<name>.data/<scheme>/...` is spread out (PEP 427)."""
    folder, *rest = path.split("/")
    if not folder.endswith(".data"):
        return root / path
    places = {"scripts": Path(sys.prefix, "bin"), "data": Path(sys.prefix), "purelib": root, "platlib": root}
    return places[rest[0]].joinpath(*rest[1:])


def difference(row: Tuple[str, str], root: Path) -> Optional[str]:
    """What is wrong with the installed file of one RECORD row, or None."""
    path, pinned = row
    place = installed_path(path, root)
    if not place.is_file():
        return path + " is missing"
    # The installer rewrites the first line of a script, so only the presence of a script is checked.
    if ".data/scripts/" in path or hashlib.sha256(place.read_bytes()).hexdigest() == pinned:
        return None
    return path + " differs"


@proves("the installed version is the pinned one, by its metadata and by the module itself")
def test_version_is_pinned(package: str, manifest: Dict[str, Any], measured: Dict[str, Any]) -> None:
    entry = manifest["packages"][package]
    module = importlib.import_module(entry["module"])
    measured["version"] = importlib.metadata.version(package)
    assert measured["version"] == entry["version"]
    # The torch 2.11.0 of the index calls itself 2.11.0+cu130; the label only names the build.
    claimed = str(getattr(module, "__version__", entry["version"]))  # an object in transformer-engine 1.7
    assert entry["version"] in (claimed, claimed.partition("+")[0]), f"the module calls itself {claimed}"


@proves("the module that an import finds is a file of the pinned wheel, inside this environment")
def test_module_is_inside_the_environment(package: str, manifest: Dict[str, Any]) -> None:
    module = importlib.import_module(manifest["packages"][package]["module"])
    file = Path(str(module.__file__)).resolve()
    root = site_packages(package)
    assert Path(sys.prefix).resolve() in root.parents, f"{root} is not under {sys.prefix}"
    recorded = {installed_path(path, root) for path, _ in rows_of(record_of(package, manifest))}
    assert file in recorded, f"{file} was imported, which is no file of the pinned wheel"


@proves("every file of the pinned wheel is installed with the bytes that the wheel's RECORD names")
def test_files_are_the_pinned_bytes(package: str, manifest: Dict[str, Any], measured: Dict[str, Any]) -> None:
    record = record_of(package, manifest)
    assert hashlib.sha256(record).hexdigest() == manifest["packages"][package]["record_sha256"]
    rows, root = list(rows_of(record)), site_packages(package)
    with ThreadPoolExecutor() as pool:  # hashing releases the interpreter lock
        wrong = [fault for fault in pool.map(lambda row: difference(row, root), rows) if fault]
    measured["files"] = len(rows)
    assert rows and not wrong, "{} of {} files: {}".format(len(wrong), len(rows), ", ".join(wrong[:5]))


@proves("every file that a patch changes is installed as the patched tree had it")
def test_patch_is_installed(package: str, patch: Dict[str, Any], measured: Dict[str, Any]) -> None:
    root = site_packages(package)
    for path, pinned in patch["installed"].items():
        assert hashlib.sha256((root / path).read_bytes()).hexdigest() == pinned, path + " is not the patched file"
    measured["files"] = len(patch["installed"])


@proves("every requirement of every installed distribution is met, as pip checks it", package="torch")
def test_requirements_are_met() -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "check"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120)
    assert done.returncode == 0, done.stdout.decode()


def loaded(*stems: str) -> Dict[str, Set[Path]]:
    """Where this process has mapped libraries from: the folders of all that begin with each stem."""
    files = {Path(line.split()[-1]) for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line}
    return {stem: {file.resolve().parent for file in files if file.name.startswith(stem)} for stem in stems}


@needs(cuda=True)
@proves("one cuDNN, one cuBLAS, one NCCL and one CUDA runtime are loaded, those of this environment", package="torch")
def test_libraries_are_loaded_once(device: str, manifest: Dict[str, Any], measured: Dict[str, Any]) -> None:
    import torch

    for entry in manifest["packages"].values():
        importlib.import_module(entry["module"])
    torch.nn.functional.conv2d(torch.ones(1, 8, 8, 8, device=device), torch.ones(8, 8, 3, 3, device=device))
    for stem, folders in loaded("libcudnn", "libcublas", "libnccl", "libcudart").items():
        assert len(folders) == 1, f"{stem} is loaded from {sorted(map(str, folders))}"
        assert Path(sys.prefix).resolve() in folders.pop().parents, f"{stem} is not this environment's"
    measured["cudnn"] = torch.backends.cudnn.version()
