"""Base images and their digests, with a real engine and a real registry; without them these tests are unproven."""

from __future__ import annotations

import gzip
import hashlib
import http.client
import io
import json
import os
import re
import shutil
import subprocess
import tarfile
import threading
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import docker
import pytest

from recipes import image
from recipes.cache import sha256_of
from recipes.model import ROOT, Catalogue, Refusal
from recipes.plan import Plan, plan
from recipes.tests.conftest import SOURCE, Checkout, Tiny, wheel

REGISTRY = "127.0.0.1:5000"


@pytest.fixture(scope="session")
def engine() -> docker.DockerClient:
    """The engine that is running."""
    try:
        return image.engine()
    except Refusal as refusal:
        pytest.skip(f"unproven here: {refusal}")


@pytest.fixture
def pushed(engine: docker.DockerClient) -> Iterator[tuple[str, str]]:
    """An image of one file in the registry on this machine, and its digest."""
    name, archive = f"{REGISTRY}/fusebox/{uuid.uuid4().hex[:8]}", io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        member = tarfile.TarInfo("file")
        tar.addfile(member, io.BytesIO())
    engine.api.import_image_from_data(archive.getvalue(), repository=name, tag="1")
    said = engine.images.push(name, tag="1")
    if "digest: sha256:" not in said:
        pytest.skip(f"unproven here: no registry on {REGISTRY}")
    yield f"{name}:1", said.partition("digest: ")[2].partition(" ")[0]
    engine.images.remove(f"{name}:1")


def test_the_module_docker_is_the_sdk() -> None:
    """The folder docker/ of this checkout is no package."""
    assert docker.__file__ and docker.DockerClient


def test_lock_resolves_digests_and_says_which_it_could_not(tiny: Tiny, pushed: tuple[str, str]) -> None:
    name, digest = pushed
    declared = tiny.targets.read_text()
    base = tiny.declared.base.wheels.image
    for part, put in (("wheels", name), ("runtime", f"{name}-absent")):
        before = f'{part} = {{ image = "{base}"'
        tiny.edit(tiny.targets, before, before.replace(base, put))
    assert "unresolved: the digest of" in tiny.succeed("plan", "tiny")
    found, missing = image.resolve(tiny.targets, tiny.declared)
    assert found == {name: digest}
    assert len(missing) == 1 and f"{name}-absent" in missing[0]
    assert tiny.declared.base.wheels.digest == digest
    assert tiny.declared.base.unresolved == [f"{name}-absent"]
    assert len(tiny.targets.read_text().splitlines()) == len(declared.splitlines())


def test_without_an_engine_the_digest_stays_unresolved(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tiny.root}/no.sock")
    before = tiny.targets.read_text()
    found, missing = image.resolve(tiny.targets, tiny.declared)
    assert not found and "No Docker engine answers" in missing[0]
    assert tiny.targets.read_text() == before


def test_readme_lists_what_is_unresolved() -> None:
    catalogue = Catalogue()
    readme = (catalogue.root / "README.md").read_text()
    for name, target in catalogue.targets.items():
        row = next(line for line in readme.splitlines() if line.startswith(f"| `{name}` |"))
        assert ("(digest unresolved)" in row) == (target.base.wheels.digest == "unresolved")


# --- what the Dockerfiles say


@pytest.mark.parametrize("name", list(Catalogue().targets))
def test_only_apt_and_the_sources_have_a_network(name: str) -> None:
    """After the stage `sources`, a RUN is offline or the one apt layer of its stage."""
    text = (ROOT / "docker" / f"{name}.Dockerfile").read_text()
    after = text[text.index(" AS toolchain") :].replace("\\\n", " ")
    runs = re.findall(r"^RUN (.*)$", after, re.MULTILINE)
    assert runs
    for run in runs:
        assert "--network=none" in run or " apt-get update && " in run, run
    for stage in after.split("\nFROM "):
        assert stage.count("apt-get install") <= 1


@pytest.mark.parametrize("name", list(Catalogue().targets))
def test_a_base_is_named_by_digest_where_it_is_known(name: str) -> None:
    catalogue = Catalogue()
    text = (ROOT / "docker" / f"{name}.Dockerfile").read_text()
    bases = {line.split()[1] for line in text.splitlines() if line.startswith("FROM ")}
    images = {base for base in bases if ":" in base}
    assert images == {
        one.reference
        for one in (image.SOURCES, catalogue.targets[name].base.wheels, catalogue.targets[name].base.runtime)
    }
    assert {base.partition("@")[0] for base in images if "@" not in base} == set(
        catalogue.targets[name].base.unresolved
    )


def test_a_standin_for_no_base_is_refused() -> None:
    target = Catalogue().targets["cpu"]
    with pytest.raises(Refusal, match=r"python:3 is no base of cpu: choose one of python:3\.12"):
        image.Options({"python:3": "x"}).arguments(target)


# --- stages `sources` and `audit`, without docker


@pytest.fixture
def laid_out(tiny: Tiny, tmp_path: Path) -> tuple[Plan, Path]:
    """What the stage `sources` writes for `tiny`."""
    tiny.succeed("patch", "tiny", "--into", tmp_path / "out")
    return plan(Catalogue(tiny.root), "tiny"), tmp_path / "out"


def test_sources_hold_what_the_later_stages_read(tiny: Tiny, laid_out: tuple[Plan, Path]) -> None:
    _, out = laid_out
    house = {path.name for path in (out / "environment" / "wheelhouse").iterdir()}
    assert {"tinydep-1.0-py3-none-any.whl", "tinywheel-1.0-py3-none-any.whl"} < house
    pinned = (out / "environment" / "requirements.txt").read_text().splitlines()
    assert all(re.fullmatch(r"\S+==\S+ --hash=sha256:[0-9a-f]{64}", line) for line in pinned)
    assert len(pinned) == len(house)
    package = out / "packages" / "tinypkg"
    assert "value = 2" in (package / "source" / "tinypkg-1.0" / "tinypkg.py").read_text()
    assert (package / "build.env").read_text() == "TINY_SECONDS=0\n"


def test_what_was_built_is_audited_and_described(tiny: Tiny, laid_out: tuple[Plan, Path], tmp_path: Path) -> None:
    _, out = laid_out
    wheels = tmp_path / "wheels" / "tinypkg"
    wheels.mkdir(parents=True)
    built = wheel(wheels, "tinypkg", ("tinydep",))
    (wheels / "compiler.txt").write_text("")
    tiny.succeed("audit", "tiny", "--out", out, "--wheels", tmp_path / "wheels", "--into", tmp_path / "install")
    manifest = json.loads((tmp_path / "install" / "fusebox" / "manifest.json").read_text())
    assert manifest["packages"]["tinypkg"]["sha256"] == sha256_of(built)
    assert f"tinypkg==1.0 --hash=sha256:{sha256_of(built)}" in (tmp_path / "install" / "requirements.txt").read_text()
    # It is kept as a wheel cache keeps it, and taken from there in place of a second build.
    again = tmp_path / "again"
    tiny.succeed("patch", "tiny", "--into", again, "--wheelcache", tmp_path / "install" / "wheels")
    assert sha256_of(again / "packages" / "tinypkg" / "wheel" / built.name) == sha256_of(built)


def test_a_wheel_of_something_else_is_refused(tiny: Tiny, laid_out: tuple[Plan, Path], tmp_path: Path) -> None:
    _, out = laid_out
    (tmp_path / "wheels" / "tinypkg").mkdir(parents=True)
    wheel(tmp_path / "wheels" / "tinypkg", "tinywheel")
    (tmp_path / "wheels" / "tinypkg" / "compiler.txt").write_text("")
    arguments = ("audit", "tiny", "--out", out, "--wheels", tmp_path / "wheels", "--into", tmp_path / "install")
    tiny.refuse(*arguments, naming=("tinywheel", "tinypkg 1.0"))


# --- docker build, with a stand-in for the bases


@pytest.fixture
def standin(engine: docker.DockerClient) -> str:
    """An image with Python that stands for every base."""
    reference = os.environ.get("FUSEBOX_STANDIN")
    if not reference:
        pytest.skip("unproven here: FUSEBOX_STANDIN names no image that stands for the bases")
    return reference


def buildx(tiny: Tiny, standin: str, mirror: Path, stage: str) -> str:
    """Build a stage of `tiny` and return what docker printed."""
    bases = (image.SOURCES, tiny.declared.base.wheels, tiny.declared.base.runtime)
    certificates = Path("/etc/ssl/certs/ca-certificates.crt")
    options = image.Options({base.image: standin for base in bases}, mirror, ca=certificates)
    command = ["docker", "buildx", "build", "--progress=plain", "--network=host", "--provenance=false"]
    command += ["--file", str(tiny.root / "docker" / "tiny.Dockerfile"), "--target", stage]
    done = subprocess.run(
        [*command, *options.arguments(tiny.declared), str(tiny.root)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_what_stands_for_the_bases_is_no_richer_than_they_are(standin: str) -> None:
    """It has Python, and neither compiler nor git: what a build needs beyond that, its Dockerfile brings."""
    look = "command -v python3; for tool in cc gcc g++ make git nvcc; do command -v $tool; done; true"
    found = subprocess.run(["docker", "run", "--rm", standin, "sh", "-c", look], capture_output=True, text=True)
    assert (found.returncode, [Path(line).name for line in found.stdout.split()]) == (0, ["python3"])


def test_adding_a_package_builds_only_that_package(tiny: Tiny, standin: str, tmp_path: Path) -> None:
    """Each package is a stage of its own, cached by what it reads; what another package reads changes nothing."""
    more = {name.replace("tinypkg", "tinymore"): text.replace("tinypkg", "tinymore") for name, text in SOURCE.items()}
    tiny.plant("tinymore", more, requires=("tinydep",))
    tiny.succeed("render")
    tiny.succeed("fetch", "tiny", "--into", tmp_path / "first")
    first = buildx(tiny, standin, tmp_path / "first", "audit")
    assert re.search(r"\[wheel-tinypkg 1/1\] RUN", first)
    tiny.edit(tiny.targets, 'tinywheel = "1.0"', 'tinywheel = "1.0"\ntinymore = "1.0"')
    tiny.succeed("render")
    tiny.succeed("fetch", "tiny", "--into", tmp_path / "second")
    second = buildx(tiny, standin, tmp_path / "second", "audit")
    steps = dict(re.findall(r"^#(\d+) \[(wheel-\w+) 1/1\] RUN", second, re.MULTILINE))
    cached = set(re.findall(r"^#(\d+) CACHED$", second, re.MULTILINE))
    assert {name: number in cached for number, name in steps.items()} == {
        "wheel-tinypkg": True,
        "wheel-tinymore": False,
    }


# --- publishing, to the real registry behind a proxy that refuses


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
        kept = {key: value for key, value in self.headers.items() if key.lower() not in ("host", "accept-encoding")}
        connection.request(self.command, self.path, body, kept | {"Host": self.server.host})
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

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = _pass

    def log_message(self, *_: object) -> None:
        """Keep the test's output clean."""


def oci_image(folder: Path) -> tuple[Path, str]:
    """An OCI layout with one image of one small layer that no registry has yet, and its digest."""
    layer = gzip.compress(uuid.uuid4().bytes, mtime=0)
    config = {"architecture": "amd64", "os": "linux", "rootfs": {"type": "layers", "diff_ids": []}, "config": {}}
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def put(data: bytes, kind: str) -> dict[str, object]:
        digest = hashlib.sha256(data).hexdigest()
        (blobs / digest).write_bytes(data)
        return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": f"sha256:{digest}", "size": len(data)}

    manifest = {
        "schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": put(json.dumps(config).encode(), "config.v1+json"), "layers": [put(layer, "layer.v1.tar+gzip")],
    }  # fmt: skip
    described = put(json.dumps(manifest).encode(), "manifest.v1+json")
    (folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [described]}))
    (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return folder, str(described["digest"])


REFUSING = {
    "a blob": (r"(POST|PATCH|PUT) .*/blobs/uploads", "cannot be pushed, and no tag was set"),
    "the manifest": (r"PUT .*/manifests/sha256:", "cannot be pushed, and no tag was set"),
    "the tag": (r"PUT .*/manifests/cpu", "cannot be set"),
}


@pytest.fixture
def crane(pushed: tuple[str, str]) -> None:
    """What publishes, and a registry that takes it."""
    if shutil.which("crane") is None:
        pytest.skip("unproven here: crane is not installed")


@pytest.mark.usefixtures("crane")
@pytest.mark.parametrize("case", REFUSING)
def test_a_registry_that_refuses_leaves_no_tag(tmp_path: Path, case: str) -> None:
    refused, sentence = REFUSING[case]
    oci, digest = oci_image(tmp_path / "oci")
    repository = f"fusebox/{uuid.uuid4().hex[:8]}"
    with Registry(refused) as registry:
        name = f"{registry.host}/{repository}"
        with pytest.raises(Refusal, match=f"{sentence}.*check the registry"):
            image.push(oci, name, digest)
            image.set_tags(name, digest, ["cpu-0123", "cpu"])
        assert not tags_of(repository)
        registry.refused = ""
        image.push(oci, name, digest)
        assert not tags_of(repository)
        image.set_tags(name, digest, ["cpu-0123", "cpu"])
        assert sorted(tags_of(repository)) == ["cpu", "cpu-0123"]
        registry.shutdown()


def tags_of(repository: str) -> list[str]:
    """The tags that the registry has for a repository."""
    connection = http.client.HTTPConnection(REGISTRY)
    connection.request("GET", f"/v2/{repository}/tags/list")
    return list(json.loads(connection.getresponse().read()).get("tags") or [])


def test_an_image_is_published_from_a_commit(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="is not a git checkout"):
        image.Commit.of(tmp_path)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=A", "-c", "user.email=a@example.org"]
    (tmp_path / "file").touch()
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "add", "file"], check=True)
    subprocess.run([*git, "commit", "--quiet", "-m", "x"], check=True)
    commit = image.Commit.of(tmp_path)
    target = Catalogue().targets["cpu"]
    assert image.tags(target, commit) == [f"cpu-{commit.sha[:12]}", f"cpu-{commit.time:%Y%m%d}", "cpu"]
    (tmp_path / "file").write_text("changed")
    with pytest.raises(Refusal, match="changes that are not committed"):
        image.Commit.of(tmp_path)


def test_a_target_that_is_not_published_says_why(checkout: Checkout) -> None:
    checkout.refuse(
        "publish", "ngc-23.10", "--registry", REGISTRY, naming=("not published", "another publisher's image")
    )


def build_check(name: str, dockerfile: Path, standin: str) -> subprocess.CompletedProcess[str]:
    """What docker itself says against a target's Dockerfile; `standin` is its every base."""
    target = Catalogue().target(name)
    bases = {base.image: standin for base in (image.SOURCES, target.base.wheels, target.base.runtime)}
    given = image.Options(bases).arguments(target)
    command = ["docker", "buildx", "build", "--check", "--file", str(dockerfile), *given, str(ROOT)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", Catalogue().targets)
def test_docker_has_nothing_against_a_dockerfile(name: str, pushed: tuple[str, str]) -> None:
    done = build_check(name, ROOT / "docker" / f"{name}.Dockerfile", "@".join(pushed))
    assert done.returncode == 0 and "no warnings found" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("text", "fault", "rule"),
    [
        (" AS toolchain", " as toolchain", "FromAsCasing"),
        ("WORKDIR /fusebox", "WORKDIR /$FUSEBOX", "UndefinedVar"),
        ("ARG SM=", "ARG GITHUB_TOKEN=", "SecretsUsedInArgOrEnv"),
    ],
)
def test_docker_sees_a_planted_fault(text: str, fault: str, rule: str, pushed: tuple[str, str], tmp_path: Path) -> None:
    declared = (ROOT / "docker" / "cpu.Dockerfile").read_text()
    assert text in declared
    (tmp_path / "Dockerfile").write_text(declared.replace(text, fault, 1))
    done = build_check("cpu", tmp_path / "Dockerfile", "@".join(pushed))
    assert done.returncode != 0 and rule in done.stdout, done.stdout + done.stderr
