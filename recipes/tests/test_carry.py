"""An image in parts: what is written, and how the script on the other machine checks, unpacks and runs it."""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import socket
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from recipes.errors import Refusal
from recipes.ship import carry, prove_carried
from recipes.tests.conftest import script


def layer(*members: tuple[str, bytes | None]) -> bytes:
    """A layer's archive; a member without bytes is a folder."""
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.type = tarfile.DIRTYPE if content is None else tarfile.REGTYPE
            member.mode, member.size = (0o755 if content is None else 0o644), len(content or b"")
            archive.addfile(member, io.BytesIO(content or b""))
    return written.getvalue()


LAYERS = (
    layer(("etc", None), ("etc/kept", b"1"), ("etc/removed", b"1"), ("opt", None), ("opt/a", b"1"), ("opt/b", b"1")),
    layer(("etc", None), ("etc/.wh.removed", b""), ("opt", None), ("opt/.wh..wh..opq", b""), ("opt/c", b"2")),
)


class Registry:
    """An image of LAYERS as crane gives it: blobs by digest, and the manifest."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        layers = [self.keep(gzip.compress(content, mtime=0)) for content in LAYERS]
        diff_ids = [f"sha256:{hashlib.sha256(content).hexdigest()}" for content in LAYERS]
        config = self.keep(json.dumps({"config": {}, "rootfs": {"diff_ids": diff_ids}}).encode())
        kind = "application/vnd.oci.image.manifest.v1+json"
        manifest = {"mediaType": kind, "layers": [{**each, "mediaType": "a+gzip"} for each in layers], "config": config}
        self.digest = self.keep(json.dumps(manifest).encode())["digest"]

    def keep(self, content: bytes) -> dict[str, Any]:
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        self.blobs[digest] = content
        return {"digest": digest, "size": len(content)}


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    """crane, as a script that reads the blobs of one image."""
    image = Registry()
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for digest, content in image.blobs.items():
        (blobs / digest).write_bytes(content)
    does = f'for word; do last=$word; done\nexec cat "{blobs}/${{last#*@}}"'
    crane = script(tmp_path / "bin" / "crane", f"#!/bin/sh\n{does}\n")
    monkeypatch.setenv("PATH", f"{crane.parent}:/usr/bin:/bin")
    return image


@pytest.fixture
def carried(registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The image in parts of 512 bytes."""
    monkeypatch.setattr(carry.Parts, "__init__", _with_small_parts)
    carry.carry(f"example.org/fusebox@{registry.digest}", tmp_path / "parts", 1)
    return tmp_path / "parts"


def _with_small_parts(self: carry.Parts, folder: Path, _: int, original: Any = carry.Parts.__init__) -> None:
    original(self, folder, 512)


def unpacked(folder: Path, work: Path) -> Path:
    about = json.loads((folder / "image.json").read_text())
    prove_carried.join(folder, about["parts"], work / "oci")
    prove_carried.Image(work / "oci", about["digest"]).unpack(work / "root", "zstd")
    return work / "root"


def test_parts_hold_the_image_and_unpack_to_its_layers(carried: Path, registry: Registry, tmp_path: Path) -> None:
    about = json.loads((carried / "image.json").read_text())
    assert (about["name"], about["digest"]) == ("example.org/fusebox", registry.digest)
    assert len(about["parts"]) > 2
    assert all((carried / part["name"]).stat().st_size == part["bytes"] <= 512 for part in about["parts"])
    assert (carried / "prove_carried.py").exists()
    root = unpacked(carried, tmp_path / "work")
    files = {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
    assert files == {"etc/kept": b"1", "opt/c": b"2"}


def test_a_layer_is_decompressed_once(carried: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    script(tmp_path / "bin" / "gzip", f'#!/bin/sh\necho "$*" >> "{log}"\nexec /usr/bin/gzip "$@"\n')
    unpacked(carried, tmp_path / "work")
    assert log.read_text().splitlines() == ["-d -c"] * len(LAYERS)


def unpacked_layers(root: Path, *layers: bytes) -> dict[str, bytes]:
    """The files that these layers leave in a root."""
    root.mkdir()
    for content in layers:
        blob = root.with_name("blob")
        blob.write_bytes(gzip.compress(content))
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        prove_carried.extract(blob, ["gzip", "-d", "-c"], digest, root)
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_a_layer_removes_what_is_below_it_and_nothing_of_its_own(tmp_path: Path) -> None:
    """Wherever the marker stands in it: the specification of OCI only recommends that it comes first."""
    below = layer(("a", None), ("a/old", b"1"), ("a/b", None), ("a/b/old", b"1"), ("c", None), ("c/old", b"1"))
    more = layer(("é", b"1"), (".dots", b"1"), ("dots", b"1"))
    above = layer(
        ("a", None), ("a/new", b"2"), ("a/b", None), ("a/b/new", b"2"), ("a/.wh..wh..opq", b""),
        (".wh.c", b""), ("c", b"2"), (".wh.é", b""), ("./.wh..dots", b""),
    )  # fmt: skip
    files = unpacked_layers(tmp_path / "root", below, more, above)
    assert files == {"a/new": b"2", "a/b/new": b"2", "c": b"2", "dots": b"1"}


@pytest.mark.parametrize("name", ["../.wh.beside", "a/../../.wh.beside", "a/.wh.", "a/.wh...", "a/.wh.."])
def test_a_layer_removes_nothing_outside_the_image(tmp_path: Path, name: str) -> None:
    (tmp_path / "beside").touch()
    with pytest.raises(prove_carried.Failure, match="does not name a place in the image"):
        unpacked_layers(tmp_path / "root", layer(("a", None), ("a/b", b"1")), layer((name, b"")))
    assert (tmp_path / "beside").exists() and (tmp_path / "root" / "a" / "b").exists()


def test_a_layer_that_ends_early_is_refused(registry: Registry, tmp_path: Path) -> None:
    blob = tmp_path / "blob"
    blob.write_bytes(next(content for content in registry.blobs.values() if content[:2] == b"\x1f\x8b")[:60])
    (tmp_path / "root").mkdir()
    with pytest.raises(prove_carried.Failure, match="cannot be unpacked: see the message above"):
        prove_carried.extract(blob, ["gzip", "-d", "-c"], "sha256:0", tmp_path / "root")


def test_a_damaged_part_is_named(carried: Path, tmp_path: Path) -> None:
    part = carried / "image.001"
    part.write_bytes(part.read_bytes()[::-1])
    with pytest.raises(prove_carried.Failure, match=r"missing or damaged: bring image\.001 again"):
        unpacked(carried, tmp_path / "work")


def test_a_blob_that_is_not_of_the_image_is_refused(carried: Path, tmp_path: Path) -> None:
    """The hashes of the parts could have been written anew; the image's digest decides."""
    about = json.loads((carried / "image.json").read_text())
    prove_carried.join(carried, about["parts"], tmp_path / "oci")
    image = prove_carried.Image(tmp_path / "oci", about["digest"])
    last = image.blob(image.manifest["layers"][1]["digest"])
    last.write_bytes(gzip.compress(layer(("etc/planted", b"x"))))
    with pytest.raises(prove_carried.Failure, match="unpacks to other bytes than the image names"):
        image.unpack(tmp_path / "root", "zstd")
    assert not (tmp_path / "root").exists()
    config = image.blob(image.manifest["config"]["digest"])
    config.write_text("{}")
    with pytest.raises(prove_carried.Failure, match="does not have the bytes of its name"):
        prove_carried.Image(tmp_path / "oci", about["digest"])


def test_an_image_is_carried_by_its_digest_alone(registry: Registry, tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=r"does not name an image by its digest: write NAME@sha256:DIGEST"):
        carry.carry("example.org/fusebox:cpu", tmp_path / "parts", 1)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(Refusal, match="is not empty: choose another folder"):
        carry.carry(f"example.org/fusebox@{registry.digest}", tmp_path / "full", 1)


def test_the_first_runtime_that_works_runs_it_and_the_others_say_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(container: prove_carried.Container, command: Any, output: int | None) -> int:
        raise prove_carried.Failure("it is not installed")

    def works(container: prove_carried.Container, command: Any, output: int | None) -> int:
        assert command[:2] == ["dumb-init", "python"]
        return 0

    monkeypatch.setattr(prove_carried, "RUNTIMES", {"enroot": absent, "runc": works, "unshare": absent})
    config = {"User": "10001:10001", "Entrypoint": ["dumb-init"], "Env": ["PATH=/bin"], "WorkingDir": "/tmp"}
    container = prove_carried.Container(tmp_path, config, prove_carried.Driver([], [], []), tmp_path, tmp_path)
    chosen = prove_carried.choose(container, ["enroot", "runc", "unshare"])
    assert chosen == ("runc", {"enroot": "it is not installed"})
    run = prove_carried._specification(container, ["smoke"])
    assert (run["root"]["readonly"], run["process"]["user"]) == (True, {"uid": 10001, "gid": 10001})
    assert "capabilities" not in run["process"]
    assert run["process"]["noNewPrivileges"]


def test_what_stands_behind_two_dashes_is_for_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[argparse.Namespace] = []

    def proved(options: argparse.Namespace) -> int:
        asked.append(options)
        return 0

    monkeypatch.setattr(prove_carried, "prove", proved)
    for behind in ([], ["--", "-n", "2"]):
        monkeypatch.setattr(sys, "argv", ["prove_carried.py", "parts", "--out", "out", *behind])
        assert prove_carried.main() == 0
    assert [(each.folder, each.arguments) for each in asked] == [(Path("parts"), []), (Path("parts"), ["-n", "2"])]


def test_the_container_knows_its_own_name(tmp_path: Path) -> None:
    """Also where an image's /etc/hosts leads out of its root."""
    outside, hosts = tmp_path / "hosts", tmp_path / "root" / "etc" / "hosts"
    hosts.parent.mkdir(parents=True)
    outside.touch()
    hosts.symlink_to(outside)
    prove_carried.write_hosts(tmp_path / "root")
    names = {name for line in hosts.read_text().splitlines() for name in line.split()[1:]}
    assert {"localhost", socket.gethostname(), prove_carried.HOSTNAME} == names and not outside.read_text()
