"""Write an image as parts that can be carried to a machine without a registry, with the script that proves it there."""

from __future__ import annotations

import hashlib
import io
import json
import re
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import IO, Any

from recipes.errors import Refusal
from recipes.files import disk_named, write_json
from recipes.process import ends_with_us
from recipes.ship import registry

SCRIPT = Path(__file__).with_name("prove_carried.py")
_INDEX = "application/vnd.oci.image.index.v1+json"


class Parts(io.RawIOBase):
    """A file that is written as parts of `size` bytes: FOLDER/image.000 and so on, each with its sha256."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self.size = folder, size
        self.parts: list[dict[str, Any]] = []
        self._file: IO[bytes] | None = None
        self._hash = hashlib.sha256()
        self._left = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data)
        while view:
            if self._left == 0:
                self.finish()
                self._file = (self.folder / f"image.{len(self.parts):03}").open("wb")
                self._hash, self._left = hashlib.sha256(), self.size
            assert self._file
            block = view[: self._left]
            self._file.write(block)
            self._hash.update(block)
            self._left -= len(block)
            view = view[len(block) :]
        return len(data)

    def finish(self) -> None:
        """Close the part that is being written, and note it."""
        if self._file:
            name, count = Path(self._file.name).name, self._file.tell()
            self._file.close()
            self.parts.append({"name": name, "bytes": count, "sha256": self._hash.hexdigest()})
        self._file, self._left = None, 0


def carry(image: str, into: Path, mib: int) -> dict[str, Any]:
    """Write an image of a registry, NAME@DIGEST, as a tar archive of its OCI layout in parts of `mib` MiB.

    `into` also gets image.json, which names the image and each part by its hash, and prove_carried.py. Returns what
    image.json says. The layers are as the registry has them, in their order: an image that differs in its last layer
    alone has the same parts before it.
    """
    name, _, digest = image.partition("@")
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
        raise Refusal(f"{image} does not name an image by its digest: write NAME@sha256:DIGEST.")
    if into.exists() and any(into.iterdir()):
        raise Refusal(f"{into} is not empty: choose another folder.")
    registry.refuse_without_crane("Carrying an image needs")
    text = _asked("manifest", image)
    if f"sha256:{hashlib.sha256(text).hexdigest()}" != digest:
        raise Refusal(f"The registry's manifest of {image} does not match its digest: push the image again.")
    manifest = json.loads(text)
    if "layers" not in manifest:
        raise Refusal(f"{image} is an index of several images: name the manifest of one platform by its digest.")
    into.mkdir(parents=True, exist_ok=True)
    parts = Parts(into, mib << 20)
    described = {"mediaType": manifest["mediaType"], "digest": digest, "size": len(text)}
    index = {"schemaVersion": 2, "mediaType": _INDEX, "manifests": [described]}
    with disk_named(into):
        with tarfile.open(fileobj=parts, mode="w|", format=tarfile.PAX_FORMAT) as archive:
            for blob in [*manifest["layers"], manifest["config"]]:
                _add_blob(archive, name, blob)
            _add(archive, _place(digest), text)
            _add(archive, "oci-layout", b'{"imageLayoutVersion": "1.0.0"}')
            _add(archive, "index.json", json.dumps(index).encode())
        parts.finish()
        shutil.copy(SCRIPT, into)
    about = {"name": name, "digest": digest, "parts": parts.parts}
    write_json(into / "image.json", about)
    return about


def _place(digest: str) -> str:
    return f"blobs/{digest.replace(':', '/')}"


def _add(archive: tarfile.TarFile, place: str, content: bytes) -> None:
    member = tarfile.TarInfo(place)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def _add_blob(archive: tarfile.TarFile, name: str, blob: dict[str, Any]) -> None:
    """Add a blob as it comes from the registry; crane checks it by its digest."""
    member = tarfile.TarInfo(_place(blob["digest"]))
    member.size = blob["size"]
    with subprocess.Popen(
        registry.crane_command("blob", f"{name}@{blob['digest']}"), stdout=subprocess.PIPE, preexec_fn=ends_with_us
    ) as crane:
        try:
            archive.addfile(member, crane.stdout)
        except OSError as error:
            if error.errno is not None:
                raise
            crane.kill()  # tarfile's "unexpected end of data"
    if crane.returncode:
        raise Refusal(f"{name}@{blob['digest']} cannot be read from the registry: see crane's message above.")


def _asked(*words: str) -> bytes:
    done = registry.run_crane(*words)
    if done.returncode != 0:
        raise Refusal(f"{words[-1]} cannot be read from its registry ({done.stderr.strip()[-200:]}): check its name.")
    return done.stdout.encode()
