"""Publishing: to the real registry behind a proxy that refuses; without engine or crane these tests are unproven."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import http.client
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import threading
import time
import uuid
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from recipes.catalogue.load import Catalogue
from recipes.catalogue.plan import plan
from recipes.errors import Refusal
from recipes.files import ROOT, write_json
from recipes.prove.claims import Room
from recipes.ship import cosign, layers, publish, registry, statements, verify
from recipes.ship.image import Options
from recipes.tests.conftest import REGISTRY, Checkout, oci_image
from recipes.verbs.ship import rollback


class Registry(ThreadingHTTPServer):
    """A proxy to the registry on this machine; a request that `refused` matches is answered with 503."""

    daemon_threads = True

    def __init__(self, refused: str) -> None:
        super().__init__(("127.0.0.1", 0), _Proxy)
        self.refused = refused
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.server_port}"


class _Proxy(BaseHTTPRequestHandler):
    server: Registry

    def _pass(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.server.refused and re.search(self.server.refused, f"{self.command} {self.path}"):
            self.send_error(503)
            return
        connection = http.client.HTTPConnection(REGISTRY)
        headers = {key: value for key, value in self.headers.items() if key.lower() not in ("host", "accept-encoding")}
        connection.request(self.command, self.path, body, headers | {"Host": self.server.host})
        answer = connection.getresponse()
        data = answer.read()
        self.send_response(answer.status)
        for key, value in answer.getheaders():
            if key.lower() not in ("transfer-encoding", "connection", "content-length"):
                self.send_header(key, value)
        length = answer.headers["Content-Length"] if self.command == "HEAD" else str(len(data))
        self.send_header("Content-Length", length or "0")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = _pass

    def log_message(self, *_: object) -> None:
        """Keep the test's output clean."""


REFUSING = {
    "a blob": (r"(POST|PATCH|PUT) .*/blobs/uploads", "cannot be pushed, and no tag was set"),
    "the manifest": (r"PUT .*/manifests/sha256:", "cannot be pushed, and no tag was set"),
    "the tag": (r"PUT .*/manifests/cpu", "cannot be set"),
}


@pytest.mark.usefixtures("crane")
@pytest.mark.parametrize("case", REFUSING)
def test_a_registry_that_refuses_leaves_no_tag(tmp_path: Path, case: str) -> None:
    refused, sentence = REFUSING[case]
    oci, digest = oci_image(tmp_path / "oci")
    repository = f"fusebox/{uuid.uuid4().hex[:8]}"
    with Registry(refused) as server:
        name = f"{server.host}/{repository}"
        with pytest.raises(Refusal, match=f"{sentence}.*check the registry"):
            registry.push(oci, name, digest)
            registry.set_tags(name, digest, ["cpu-0123", "cpu"])
        assert not tags_of(repository)
        server.refused = ""
        registry.push(oci, name, digest)
        assert not tags_of(repository)
        registry.set_tags(name, digest, ["cpu-0123", "cpu"])
        assert sorted(tags_of(repository)) == ["cpu", "cpu-0123"]
        server.shutdown()


@pytest.mark.usefixtures("crane")
def test_the_registry_is_tried_before_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the trial stays there, and nothing of the build here when the push fails."""
    repository = f"fusebox/{uuid.uuid4().hex[:8]}"
    chosen, commit, built = plan(Catalogue(), "cpu"), publish.Commit("0" * 40, 1777939200), []
    chosen = dataclasses.replace(chosen, root=tmp_path)
    monkeypatch.setattr(publish, "_refuse_classic_store", lambda: None)
    monkeypatch.setattr(publish.Commit, "of", lambda root: commit)
    monkeypatch.setattr(publish, "_build", lambda *given: built.append(oci_image(given[-1])))
    with Registry("POST .*/blobs/uploads") as server:
        name = f"{server.host}/{repository}"
        with pytest.raises(Refusal, match=r"accepts no upload .*503.*so nothing was built: check the registry"):
            publish.push(chosen, Options({}), name)
        assert not built
        server.refused = ""
        registry.try_upload(name)
        assert tags_of(repository) == []
        server.refused = "PUT .*/manifests/sha256:"
        with pytest.raises(Refusal, match="cannot be pushed"):
            publish.push(chosen, Options({}), name)
        assert built and not list((tmp_path / "build" / "cpu" / "image").iterdir())
        server.shutdown()
    with pytest.raises(Refusal, match="accepts no upload"):
        registry.try_upload(f"{server.host}/{repository}")


def test_an_image_is_described_by_the_names_of_oci(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In its labels and in the annotations of its manifest; a repository is named where it is known."""
    chosen, commit, built = plan(Catalogue(), "cpu"), publish.Commit("0" * 40, 1777939200), []
    monkeypatch.setattr(publish, "buildx", lambda *given: built.extend(given[2:]))
    monkeypatch.setenv("GITHUB_SERVER_URL", "https://github.com")
    monkeypatch.setenv("GITHUB_REPOSITORY", "owner/fusebox")
    publish._build(chosen, Options({chosen.target.base.runtime.image: "here/base@sha256:0"}), commit, tmp_path)
    prefix = "org.opencontainers.image."
    assert {f"--label={prefix}{line}" for line in (
        "title=fusebox cpu",
        f"description={chosen.target.reason}",
        "licenses=Apache-2.0 AND LicenseRef-upstream",
        f"revision={'0' * 40}",
        "created=2026-05-05T00:00:00+00:00",
        "version=cpu-000000000000",
        "source=https://github.com/owner/fusebox",
        f"url=https://github.com/owner/fusebox/blob/{'0' * 40}/docs/status/targets.md",
        "base.name=here/base",
        "base.digest=sha256:0",
    )} == {word for word in built if word.startswith(f"--label={prefix}")}  # fmt: skip
    labelled = {word.removeprefix("--label=") for word in built if word.startswith(f"--label={prefix}")}
    for start in ("--annotation=manifest:", "--annotation=manifest-descriptor:"):
        assert {word.removeprefix(start) for word in built if word.startswith(start)} == labelled


@pytest.mark.parametrize(
    ("origin", "source"),
    [
        ("https://github.com/owner/fusebox.git", "https://github.com/owner/fusebox"),
        ("https://token@github.com/owner/fusebox", ""),
        ("git@github.com:owner/fusebox.git", ""),
    ],
)
def test_the_source_is_the_address_of_the_origin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, origin: str, source: str
) -> None:
    """Never with what logs in."""
    monkeypatch.delenv("GITHUB_REPOSITORY", raising=False)
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    subprocess.run(["git", "-C", str(tmp_path), "remote", "add", "origin", origin], check=True)
    assert publish._source(tmp_path) == source


def layered(folder: Path, **sizes: int) -> tuple[Path, str]:
    """An OCI layout whose layer is that of the target's packages, with files of so many MiB, and its digest."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, mib in sizes.items():
            member = tarfile.TarInfo(f"opt/{name}")
            member.size = mib * 2**20
            archive.addfile(member, io.BytesIO(os.urandom(member.size)))
    return oci_image(folder, packed.getvalue(), "COPY /layers/packages / # buildkit")


@pytest.mark.usefixtures("crane")
def test_an_image_that_grew_is_not_pushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files that make it larger are named: of all, or those that the tagged image does not have."""
    host = f"{REGISTRY}/{uuid.uuid4().hex[:8]}"
    name = f"{host}/fusebox"
    commit = publish.Commit("0" * 40, 1777939200)
    target = Catalogue().target("cpu").model_copy(update={"layers": {"torch": 0.1, "packages": 3.0}})
    chosen = dataclasses.replace(plan(Catalogue(), "cpu"), root=tmp_path, target=target)
    monkeypatch.setattr(publish, "_refuse_classic_store", lambda: None)
    monkeypatch.setattr(publish.Commit, "of", lambda root: commit)
    monkeypatch.setattr(publish, "_build", lambda *given: layered(given[-1], old=2, new=1, grown=2))
    over = r"^The layer packages of cpu would take 5\.0 MiB .* over 5 % more than the 3 of recipes/targets\.toml \[cpu"
    with pytest.raises(Refusal, match=rf"{over}.* the largest of its files are opt/grown \(2\.0 MiB\), opt/old"):
        publish.push(chosen, Options({}), host)
    assert not list((tmp_path / "build" / "cpu" / "image").iterdir())
    before, digest = layered(tmp_path / "before", old=2, grown=1)
    layers.refuse_grown(target, before, name)
    registry.push(before, name, digest)
    registry.set_tags(name, digest, ["cpu"])
    with pytest.raises(Refusal, match=rf"{over}.* new or grown files are opt/grown \(2\.0 MiB\), opt/new "):
        publish.push(chosen, Options({}), host)


def test_the_bounds_of_layers_are_of_layers() -> None:
    """Their names are those of docker/split-layers.sh, and none is so loose that it bounds nothing."""
    script = (ROOT / "docker" / "split-layers.sh").read_text()
    for target in Catalogue().targets.values():
        for part, bound in target.layers.items():
            assert part in script and 1 <= bound < 5000, (target.name, part)


@pytest.mark.usefixtures("crane")
def test_the_tag_of_a_commit_never_moves(tmp_path: Path) -> None:
    name = f"{REGISTRY}/fusebox/{uuid.uuid4().hex[:8]}"
    (first, digest), (_, other) = oci_image(tmp_path / "first"), oci_image(tmp_path / "second")
    registry.push(first, name, digest)
    registry.refuse_moving(name, "cpu-0123", digest)  # there is no such tag yet
    registry.set_tags(name, digest, ["cpu-0123"])
    registry.refuse_moving(name, "cpu-0123", digest)
    with pytest.raises(Refusal, match=f"cpu-0123 is {digest}, and this build of the same commit is {other}"):
        registry.refuse_moving(name, "cpu-0123", other)


def test_the_floating_tag_waits_for_the_claims_of_this_image() -> None:
    """Except for those that the target excepts by name."""
    target = Catalogue().targets["cpu"]
    excepted = list(target.unproven_in_image)
    assert publish._unproven_in(target, excepted) is None
    unproven = [*excepted, "test_torch.py::test_b[x]"]
    assert publish._unproven_in(target, unproven) == "test_torch.py::test_b[x] is unproven in this image"


def test_what_no_image_proves_is_a_claim() -> None:
    claims = Room(ROOT).claims
    for target in Catalogue().targets.values():
        assert set(target.unproven_in_image) <= set(claims), target.name


def test_a_container_that_proves_ends_with_the_tool(standin: str, tmp_path: Path) -> None:
    """Also by kill -9; on a GPU host it would hold the GPU."""
    image = f"fusebox-test:{uuid.uuid4().hex[:8]}"
    smoke = "#!/bin/sh\ntrap 'exit 0' TERM\nwhile :; do sleep 0.1; done\n"
    (tmp_path / "smoke").write_text(smoke)
    (tmp_path / "Dockerfile").write_text(f"FROM {standin}\nCOPY --chmod=755 smoke /usr/local/bin/smoke\n")
    subprocess.run(["docker", "build", "--quiet", "--network=none", "-t", image, str(tmp_path)], check=True)
    script = (
        "from recipes.catalogue import load, plan; from recipes.ship import publish; "
        f"publish.prove(plan.plan(load.Catalogue(), 'cpu'), {image!r})"
    )

    def running() -> str:
        command = ["docker", "ps", "--quiet", f"--filter=ancestor={image}"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    try:
        with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.DEVNULL) as tool:
            awaited(lambda: bool(running()))
            tool.kill()
        awaited(lambda: not running())
    finally:
        subprocess.run(["docker", "image", "rm", "--force", image], capture_output=True, check=False)


def awaited(is_so: Callable[[], bool], seconds: float = 60) -> None:
    """Wait until something is so."""
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.2)


@pytest.mark.usefixtures("crane")
def test_an_older_commit_moves_no_tag_back(tmp_path: Path) -> None:
    name = f"{REGISTRY}/fusebox/{uuid.uuid4().hex[:8]}"
    oci, digest = oci_image(tmp_path / "oci", **{"org.opencontainers.image.created": "2026-05-05T10:00:00+00:00"})
    registry.push(oci, name, digest)
    registry.set_tags(name, digest, ["cpu-20260505", "cpu"])
    chosen = plan(Catalogue(), "cpu")
    morning, evening = (publish.Commit("0" * 40, 1777939200 + 3600 * hour) for hour in (8, 20))
    assert (f"{morning.time:%Y%m%d %H}", f"{evening.time:%Y%m%d %H}") == ("20260505 08", "20260505 20")
    assert list(publish._unmoved(chosen, name, morning, None)) == ["cpu-20260505", "cpu"]
    assert publish._unmoved(chosen, name, evening, None) == {}
    assert publish._unmoved(chosen, name, evening, "why") == {"cpu": "why"}


UNPUBLISHABLE: dict[str, tuple[dict[str, Any], str]] = {
    "fewer GPUs": ({"sm": ("9.0",)}, "it is compiled for some of its GPUs only"),
    "a stand-in": ({"standins": {"a": "b@sha256:0"}}, "its base is a stand-in"),
    "no apt lock": ({"unlocked": True}, "apt installed what the distribution had, whatever the locks say"),
}


def provenance(**how: Any) -> dict[str, Any]:
    """The provenance of an image of the target cpu."""
    time, sm = datetime.datetime.fromtimestamp(0, datetime.UTC), how.pop("sm", ())
    return statements.provenance(plan(Catalogue(), "cpu"), "0" * 40, "host:here", time, sm, **how)


def test_only_what_is_pinned_and_complete_gets_the_floating_tag() -> None:
    """Elsewhere than in a registry on this machine, which serves tests."""
    far, here = "registry.invalid/x", f"{REGISTRY}/x"
    assert publish.unpublishable(provenance(), far) is None
    for how, reason in UNPUBLISHABLE.values():
        assert publish.unpublishable(provenance(**how), far) == reason
        assert publish.unpublishable(provenance(**how), here) == (reason if "sm" in how else None)
    silent = provenance()
    del silent["buildDefinition"]["internalParameters"]["standins"]
    assert "does not say whether its base is a stand-in" in str(publish.unpublishable(silent, far))


@pytest.mark.parametrize("case", [*UNPUBLISHABLE, ""])
def test_a_rollback_refuses_what_a_release_does(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A verified image does not get the floating tag if `release` would not give it that."""
    how, reason = UNPUBLISHABLE.get(case, ({}, ""))
    name, digest, moved = "registry.invalid/fusebox", f"sha256:{'0' * 64}", []
    monkeypatch.setattr(cosign, "refuse_without", lambda: None)
    monkeypatch.setattr(registry, "refuse_without_crane", lambda needs: None)
    monkeypatch.setattr(registry, "label", lambda image, key: "cpu")
    monkeypatch.setattr(registry, "set_tags", lambda *given: moved.append(given))
    monkeypatch.setattr(verify, "verify", lambda *given: [])
    monkeypatch.setattr(verify, "provenance", lambda image, signer: provenance(**how))
    options = argparse.Namespace(image=f"{name}:old@{digest}", key=Path("key"), identity=None)
    if not case:
        assert rollback(options) == 0 and moved == [(name, digest, ["cpu"])]
        return
    sentence = f"{name}:cpu was not moved to {name}@{digest}: {reason}; choose another image."
    with pytest.raises(Refusal, match=f"^{re.escape(sentence)}$"):
        rollback(options)
    assert not moved


def test_the_steps_of_publishing_keep_to_one_image(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of the checkout's commit; each step refuses what another commit, or another image, left."""
    chosen = dataclasses.replace(plan(Catalogue(), "cpu"), root=tmp_path)
    monkeypatch.setattr(publish.Commit, "of", lambda root: publish.Commit("0" * 40, 1777939200))
    with pytest.raises(Refusal, match=r"image\.json does not exist: push the image first"):
        publish.prove_pushed(chosen)
    about = {"image": "here@sha256:0", "name": "here", "digest": "sha256:0"}
    folder = publish.folder_of(chosen)
    write_json(folder / "image.json", about | {"labels": {"org.opencontainers.image.revision": "1" * 40}})
    with pytest.raises(Refusal, match=f"is of commit {'1' * 40}, and this checkout is {'0' * 40}"):
        publish.prove_pushed(chosen)
    write_json(folder / "image.json", about | {"labels": {"org.opencontainers.image.revision": "0" * 40}})
    write_json(folder / "evidence.json", {"image": "here@sha256:1"})
    with pytest.raises(Refusal, match="The evidence is of here@sha256:1, and here@sha256:0 was pushed"):
        publish.release(chosen, None)
    write_json(folder / "evidence.json", {"image": "here@sha256:0"})
    monkeypatch.setattr(publish, "prove", lambda plan, image: (True, {}))
    with pytest.raises(Refusal, match="a claim of it was refuted, so no tag was set"):
        publish.prove_pushed(chosen)
    with pytest.raises(Refusal, match=r"evidence\.json does not exist: prove the image first"):
        publish.release(chosen, None)  # not with what an earlier run proved


@pytest.mark.parametrize(
    ("name", "good"),
    [("ghcr.io/owner", True), ("127.0.0.1:5000", True), ("HOST:5000/a/b", True), ("Ghcr.io/a", True), ("owner", True)]
    + [(name, False) for name in ("MyOrg", "ghcr.io/Owner", "a b", "https://ghcr.io/a", "host:/a", "")],
)
def test_a_registry_is_where_an_image_can_be_pushed(name: str, good: bool) -> None:
    assert bool(re.fullmatch(registry.REGISTRY, name)) == good


def tags_of(repository: str) -> list[str]:
    """The tags that the registry has for a repository."""
    connection = http.client.HTTPConnection(REGISTRY)
    connection.request("GET", f"/v2/{repository}/tags/list")
    return list(json.loads(connection.getresponse().read()).get("tags") or [])


def test_an_image_is_published_from_a_commit(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=r"cannot be read as a git checkout \(fatal: not a git repository"):
        publish.Commit.of(tmp_path)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=A", "-c", "user.email=a@example.org"]
    (tmp_path / "file").touch()
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "add", "file"], check=True)
    subprocess.run([*git, "commit", "--quiet", "-m", "x"], check=True)
    commit = publish.Commit.of(tmp_path)
    target = Catalogue().targets["cpu"]
    assert publish.tags(target, commit) == [f"cpu-{commit.sha[:12]}", f"cpu-{commit.time:%Y%m%d}", "cpu"]
    (tmp_path / "smoke_tests" / "__pycache__").mkdir(parents=True)
    (tmp_path / "smoke_tests" / "__pycache__" / "a.pyc").touch()
    (tmp_path / ".git" / "info" / "exclude").write_text("*.pyc\n*.key\n")
    assert publish.Commit.of(tmp_path) == commit
    (tmp_path / "smoke_tests" / "my.key").touch()
    with pytest.raises(Refusal, match=r"smoke_tests/my\.key, which git ignores but an image would contain"):
        publish.Commit.of(tmp_path)
    (tmp_path / "smoke_tests" / "my.key").unlink()
    (tmp_path / "smoke_tests" / "new").touch()
    subprocess.run([*git, "config", "status.showUntrackedFiles", "no"], check=True)
    with pytest.raises(Refusal, match="changes that are not committed"):
        publish.Commit.of(tmp_path)
    (tmp_path / "smoke_tests" / "new").unlink()
    (tmp_path / "file").write_text("changed")
    with pytest.raises(Refusal, match="changes that are not committed"):
        publish.Commit.of(tmp_path)


@pytest.mark.parametrize("place", ["", "https://ghcr.io/owner", "ghcr.io/", "ghcr.io/Owner", "ghcr.io/owner:tag"])
def test_a_registry_that_is_none_is_refused_before_the_build(checkout: Checkout, place: str) -> None:
    checkout.refuse("publish", "cpu", "--registry", place, naming=(f"--registry {place!r}", "HOST[:PORT]"))


def test_what_publishing_lacks_is_refused_before_the_build(checkout: Checkout, tmp_path: Path) -> None:
    """crane; then a base by its digest."""
    checkout.refuse("publish", "cpu", "--registry", REGISTRY, naming=("needs crane",), PATH=str(tmp_path))
    digest = Catalogue().targets["cpu"].base.wheels.digest
    checkout.edit(checkout.targets, digest, "unresolved")
    checkout.refuse("publish", "cpu", "--registry", REGISTRY, naming=("targets.toml [cpu.base]", "nox -s lock -- cpu"))


@pytest.mark.parametrize(
    "place", ["127.0.0.1:5000", "localhost:5000/a", "ghcr.io/some-owner", "registry.example/a/b_c"]
)
def test_a_registry_is_a_host_with_port_and_path(place: str) -> None:
    assert re.fullmatch(registry.REGISTRY, place)


def test_a_target_that_is_not_published_says_why(checkout: Checkout) -> None:
    checkout.refuse(
        "publish", "ngc-23.10", "--registry", REGISTRY, naming=("not published", "another publisher's image")
    )
