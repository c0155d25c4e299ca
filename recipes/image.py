"""Images: the Dockerfile of each target, what its stages `sources` and `audit` do, and docker's part of it.

`docker build` runs `patch --into` (lay_out) in the stage `sources`, compiles each package in a stage of its own from
one folder of it, and runs `audit` (gather) on the wheels; the runtime stage installs what that wrote.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import jinja2
from docker.errors import DockerException

from recipes import audit, environment, evidence
from recipes.build import Builder, check_exported, installed
from recipes.cache import sha256_of, write_json, write_text
from recipes.environment import Wheel
from recipes.model import Image, Pin, Refusal, Target, build_environment, digest_of
from recipes.plan import Plan
from recipes.progress import console

SOURCES = Image(
    image="python:3.12-slim-bookworm", digest="sha256:782412e85d0f0984994c290652577d4018aff08145c85b262bb63dc0c7522254"
)
_QUIET_APT = " ".join(f"--mount=type=tmpfs,target=/var/{name}" for name in ("cache", "lib/apt/lists", "log"))


# --- the Dockerfile


def dockerfile(plan: Plan) -> str:
    """The text of docker/TARGET.Dockerfile."""
    folder = plan.root / "docker"
    template = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder), undefined=jinja2.StrictUndefined, trim_blocks=True, autoescape=False
    ).get_template("Dockerfile.template")
    own = {pin.name for pin in plan.pins if pin.release.kind == "source"}
    return template.render(
        target=plan.target,
        sources=SOURCES.reference,
        image=lambda image: image.reference,
        apt=_apt,
        apt_mounts=_QUIET_APT,
        uv="type=bind,from=sources,source=/tool/bin/uv,target=/usr/local/bin/uv",
        built=[pin for pin in plan.pins if pin.release.kind == "source"],
        needs=lambda pin: [name for name in pin.build.needs if name in own],
        labels=labels(plan),
        quoted=json.dumps,
    )


def _apt(image: Image) -> str:
    """The one layer of a stage that comes from its distribution; nothing where it needs none."""
    if not image.apt:
        return ""
    install = "apt-get install --yes --no-install-recommends"
    return (
        f"RUN {_QUIET_APT} \\\n    apt-get update && DEBIAN_FRONTEND=noninteractive {install} {' '.join(image.apt)}\n"
    )


def labels(plan: Plan) -> dict[str, str]:
    """What an image says of itself that follows from the data (OCI image annotations, and ours)."""
    target = plan.target
    said = {
        "org.opencontainers.image.title": f"fusebox {target.name}",
        "org.opencontainers.image.description": target.reason,
        "org.opencontainers.image.base.name": target.base.runtime.image,
        "org.opencontainers.image.base.digest": target.base.runtime.digest,
        "fusebox.target": target.name,
        "fusebox.python": target.python,
        "fusebox.cuda": target.cuda,
        "fusebox.sm": " ".join(target.sm) or "none",
        "fusebox.driver": target.driver or "none",
        "fusebox.packages": ", ".join(pin.label for pin in plan.pins),
    }
    return said | {f"fusebox.option.{package}": option for package, option in target.options.items()}


# --- stage `sources`


def base_of(target: Target) -> str:
    """What wheels are compiled on: image and digest, and what is installed there."""
    return " + ".join([target.base.wheels.reference, *target.base.wheels.apt])


def lay_out(plan: Plan, builder: Builder, into: Path, wheelcache: Path | None) -> None:
    """Write what the later stages read: environment/ to build in, and packages/NAME/ for each that is built."""
    files = builder.fetch()
    house = into / "environment" / "wheelhouse"
    house.mkdir(parents=True)
    lines = []
    for artifact in plan.locked.artifacts:
        shutil.copy(files[artifact.sha256], house)
        lines.append(f"{artifact.name}=={artifact.version} --hash=sha256:{artifact.sha256}\n")
    for pin in plan.pins:
        if pin.release.kind == "wheel":
            wheel = builder.given(pin, files)
            shutil.copy(wheel.path, house)
            lines.append(f"{pin.name}=={pin.release.metadata_version} --hash=sha256:{wheel.sha256}\n")
            write_json(into / "given" / f"{pin.name}.json", dict(wheel.record))
    options = "--system-site-packages\n" if plan.on_base else ""
    _write(into / "environment", requirements_txt="".join(lines), python=f"{plan.target.python}\n", options=options)
    for name, tree in builder.trees(files).items():
        pin = next(pin for pin in plan.pins if pin.name == name)
        folder = into / "packages" / name
        shutil.copytree(tree.path, folder / "source" / tree.path.name, symlinks=True)
        inputs = builder.inputs(pin, tree, pin.build.compiler, base_of(plan.target))
        env = build_environment(pin, plan.target)
        _write(
            folder, build_env="".join(f"{key}={value}\n" for key, value in env.items()),
            options="".join(f"{option}\n" for option in pin.build.options), subfolder=pin.release.subfolder or ".",
            mib_per_job=f"{pin.build.mib_per_job}\n",
        )  # fmt: skip
        write_json(into / "inputs" / f"{name}.json", {"inputs": inputs, "patches": list(tree.patches)})
        if wheelcache and (wheelcache / digest_of(inputs) / "wheel.json").exists():
            check_exported(wheelcache / digest_of(inputs))
            shutil.copytree(wheelcache / digest_of(inputs), folder / "wheel")
            builder.steps.say("cached", pin.label, digest_of(inputs)[:12])


def _write(folder: Path, **texts: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / {"requirements_txt": "requirements.txt", "build_env": "build.env"}.get(name, name)).write_text(text)


# --- stage `audit`


def gather(plan: Plan, out: Path, wheels: Path, into: Path) -> None:
    """Audit every wheel that was built, and write what the runtime stage installs and what the image says it holds.

    `out` is what `lay_out` wrote; `wheels` holds NAME/ of each built package.
    """
    house = out / "environment" / "wheelhouse"
    made: list[Wheel] = []
    with tempfile.TemporaryDirectory() as scratch:
        torch = _torch(plan, house, Path(scratch))
        for pin in plan.pins:
            if pin.release.kind == "wheel":
                record = json.loads((out / "given" / f"{pin.name}.json").read_text())
                path = _named(house, pin)
                made.append(Wheel(pin, path, sha256_of(path), record))
            elif pin.release.kind == "source":
                made.append(_audited(plan, pin, out, wheels / pin.name, torch, into))
    for wheel in made:
        audit.check_metadata(wheel.path, wheel.pin, plan.target)
    environment.describe(into, plan, made)
    requirements = (out / "environment" / "requirements.txt").read_text()
    for wheel in made:
        if wheel.pin.release.kind == "source":
            requirements += f"{wheel.pin.name}=={wheel.pin.release.metadata_version} --hash=sha256:{wheel.sha256}\n"
    _write(into, requirements_txt=requirements, python=f"{plan.target.python}\n", options="")
    if plan.on_base:
        _write(into, replaced="".join(f"{wheel.pin.name}\n" for wheel in made))


def _named(house: Path, pin: Pin) -> Path:
    """The wheel of a pinned package in a folder of wheels."""
    assert pin.release.file
    return house / pin.release.file


def _torch(plan: Plan, house: Path, scratch: Path) -> Path | None:
    """The libraries of the target's torch, unpacked; none where it has no torch, None where the base image has it."""
    if plan.torch and plan.torch.release.kind == "wheel":
        with zipfile.ZipFile(_named(house, plan.torch)) as archive:
            libraries = [name for name in archive.namelist() if re.match(r"torch/lib/[^/]*\.so", name)]
            archive.extractall(scratch, libraries)
    return None if plan.torch and plan.torch.release.kind == "provided" else scratch / "torch"


def _audited(plan: Plan, pin: Pin, out: Path, built: Path, torch: Path | None, into: Path) -> Wheel:
    """A wheel that a stage built, with its record; kept as CACHE/wheels/KEY is, so that it can be taken out again."""
    planned = json.loads((out / "inputs" / f"{pin.name}.json").read_text())
    key = digest_of(planned["inputs"])
    if (built / "wheel.json").exists():  # it came from the wheel cache, with its record
        record = json.loads((built / "wheel.json").read_text())
        path = built / record["file"]
    else:
        found = list(built.glob("*.whl"))
        if len(found) != 1:
            raise Refusal(f"{pin.label}: its stage left {len(found)} wheels, and one was expected: read its build.log.")
        path = found[0]
        said = (built / "compiler.txt").read_text().splitlines()
        compiled, glibc = pin.build.compiler != "none", plan.target.base.glibc or plan.target.glibc
        checked: dict[str, Any] = audit.audit(path, pin, torch if compiled else None, glibc)
        if pin.build.compiler == "nvcc":
            listing = path.with_name(f"{path.name}.cuobjdump.txt")
            checked["sm"] = audit.check_architectures(pin, plan.target, listing.read_text() if listing.exists() else "")
        record = {
            "file": path.name,
            "sha256": sha256_of(path),
            "inputs": planned["inputs"],
            "audit": checked,
            "patches": [installed(patch, path) for patch in planned["patches"]],
            "built_with": {
                "python": plan.target.python,
                "compiler": "; ".join(said) if compiled else "none",
                "where": base_of(plan.target) if compiled else "any",
            },
        }
    kept = into / "wheels" / key
    kept.mkdir(parents=True)
    shutil.copy(path, kept)
    if (built / "build.log").exists():
        shutil.copy(built / "build.log", kept)
    write_json(kept / "wheel.json", record)
    (into / "wheelhouse").mkdir(exist_ok=True)
    os.link(kept / path.name, into / "wheelhouse" / path.name)
    return Wheel(pin, kept / path.name, record["sha256"], record)


# --- docker


def engine() -> docker.DockerClient:
    """The Docker engine that DOCKER_HOST or the default socket names; refused if none answers."""
    try:
        client = docker.from_env()
        client.ping()
    except DockerException as error:
        raise Refusal(f"No Docker engine answers ({_last(error)}): start one, or set DOCKER_HOST.") from None
    return client


def digest(image: str) -> str:
    """The digest ("sha256:...") that a registry has for an image's tag now."""
    try:
        found = engine().images.get_registry_data(image).id
    except DockerException as error:
        raise Refusal(
            f"The registry of {image} gives no digest for it ({_last(error)}): check the name and the network."
        ) from None
    return str(found)


def _last(error: Exception) -> str:
    """The last clause of what an engine or a registry said."""
    return re.sub(r"\s+", " ", str(error)).strip().rstrip(".")[-200:]


def resolve(targets_file: Path, target: Target) -> tuple[dict[str, str], list[str]]:
    """Ask for the digests that a target lacks and write them into targets.toml: those found, then why others were not.

    Every target with the same image gets the same digest.
    """
    found, missing = {}, []
    for image in target.base.unresolved:
        try:
            found[image] = digest(image)
        except Refusal as refusal:
            missing.append(f"the digest of {image} stays unresolved: {refusal}")
    text = targets_file.read_text(encoding="utf-8")
    for image, sha256 in found.items():
        text = text.replace(f'image = "{image}", digest = "unresolved"', f'image = "{image}", digest = "{sha256}"')
    if found:
        write_text(targets_file, text)
    return found, missing


@dataclass(frozen=True)
class Options:
    """How an image is built here: what stands in for bases, folders to take from, certificates, GPU architectures."""

    standins: dict[str, str]
    mirror: Path | None = None
    wheelcache: Path | None = None
    ca: Path | None = None
    sm: tuple[str, ...] = ()

    def arguments(self, target: Target) -> list[str]:
        """Options of `docker buildx build`; the Dockerfile stays as it is."""
        bases = {image.image: image.reference for image in (SOURCES, target.base.wheels, target.base.runtime)}
        if strangers := sorted(set(self.standins) - set(bases)):
            raise Refusal(f"--standin {strangers[0]} is no base of {target.name}: choose one of {', '.join(bases)}.")
        said = [f"--build-context={bases[name]}=docker-image://{other}" for name, other in self.standins.items()]
        said += [f"--build-context=mirror={self.mirror}"] if self.mirror else []
        said += [f"--build-context=wheelcache={self.wheelcache}"] if self.wheelcache else []
        said += [f"--secret=id=ca,src={self.ca}"] if self.ca else []
        said += [f"--build-arg=SM={','.join(self.sm)}"] if self.sm else []
        return said


def tag(target: Target) -> str:
    """The name of the image on this machine."""
    return f"fusebox:{target.name}"


def build(plan: Plan, options: Options) -> str:
    """Build the image of a target with `docker buildx build`, load it into the engine and return its id."""
    engine()
    _buildx(plan, options, "--tag", tag(plan.target), "--load")
    return str(engine().images.get(tag(plan.target)).id)


def _buildx(plan: Plan, options: Options, *output: str) -> None:
    command = [
        "docker", "buildx", "build", "--file", str(plan.root / "docker" / f"{plan.target.name}.Dockerfile"),
        "--provenance=false", "--network=host", *options.arguments(plan.target), *output, str(plan.root),
    ]  # fmt: skip
    if subprocess.run(command, check=False).returncode != 0:
        raise Refusal(f"docker buildx build of {plan.target.name} failed: read what it printed above.")


def smoke(target: Target, image: str, *options: str, command: Iterable[str] = ("smoke",)) -> int:
    """Run an image's own `smoke` and return its exit code; `options` are those of `docker run`."""
    run = ["docker", "run", "--rm", *(["--gpus=all"] if target.cuda != "none" else []), *options, image, *command]
    return subprocess.run(run, check=False).returncode


def prove(plan: Plan, image: str) -> int:
    """Run an image's `smoke` and keep its evidence, which names the image; 1 if a claim is refuted."""
    outcomes = "/tmp/outcomes.json"
    gpus = ["--gpus=all"] if plan.target.cuda != "none" else []
    made = subprocess.run(
        ["docker", "create", *gpus, image, "smoke", "--evidence", outcomes], capture_output=True, text=True, check=False
    )
    if made.returncode != 0:
        raise Refusal(
            f"{image} cannot be run ({_last(Exception(made.stderr))}): read what the engine says and run again."
        )
    container = made.stdout.strip()
    try:
        code, log = evidence.watched(["docker", "start", "--attach", container], plan.root, os.environ)
        with tempfile.TemporaryDirectory() as scratch:
            for path in (outcomes, "/opt/fusebox/fusebox/manifest.json"):
                copied = ["docker", "cp", f"{container}:{path}", scratch]
                subprocess.run(copied, capture_output=True, check=False)  # one that is missing is refused below
            manifest = Path(scratch, "manifest.json")
            if not manifest.exists():
                raise Refusal(f"{image} does not say what it holds: build it with `nox -s image`.")
            return evidence.keep(plan, Path(scratch, "outcomes.json"), code, log, manifest.read_text(), image)
    finally:
        subprocess.run(["docker", "rm", "--force", container], capture_output=True, check=False)


def show(plan: Plan) -> None:
    """Print the size of the image by layer, unpacked."""
    image = engine().images.get(tag(plan.target))
    for layer in image.history():
        if layer["Size"]:
            console.print(f"{layer['Size'] / 2**20:8.1f} MiB  {layer['CreatedBy'][:100]}", soft_wrap=True, markup=False)


# --- publishing


@dataclass(frozen=True)
class Commit:
    """The commit that an image is made from, and its time in seconds since 1970."""

    sha: str
    seconds: int

    @classmethod
    def of(cls, root: Path) -> Commit:
        """The checkout's commit; changes that are not committed are refused, since the tag would not name them."""
        asked = (["status", "--porcelain"], ["log", "-1", "--format=%H %ct"])
        said = [
            subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=False)
            for words in asked
        ]
        if any(one.returncode for one in said):
            raise Refusal(f"{root} is not a git checkout, and an image is published from a commit: clone Fusebox.")
        if changes := said[0].stdout.split("\n")[0].strip():
            raise Refusal(f"{root} has changes that are not committed ({changes}): commit them, then publish.")
        sha, seconds = said[1].stdout.split()
        return cls(sha, int(seconds))

    @property
    def time(self) -> datetime.datetime:
        return datetime.datetime.fromtimestamp(self.seconds, datetime.UTC)


def tags(target: Target, commit: Commit) -> list[str]:
    """Every tag of a published image, the floating one last."""
    return [f"{target.name}-{commit.sha[:12]}", f"{target.name}-{commit.time:%Y%m%d}", target.name]


def publish(plan: Plan, options: Options, registry: str, floating: str | None) -> Path:
    """Build anew from the commit, push by digest, run what was pushed, and only then give it its tags.

    `floating` says why the target's own tag must not move, or None. Returns the folder with image.json and image.md.
    """
    if not plan.target.publish:
        reason = plan.target.unpublished
        raise Refusal(f"Target {plan.target.name} is not published ({reason}): build it with `nox -s image`.")
    _refuse_classic_store()
    commit, name = Commit.of(plan.root), f"{registry}/fusebox"
    folder = environment.folder(plan.root, plan.target) / "image"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    said = {"revision": commit.sha, "created": commit.time.isoformat()}
    labelled = [f"--label=org.opencontainers.image.{key}={value}" for key, value in said.items()]
    # Times come from the commit, so that the same commit makes the same bytes.
    _buildx(
        plan, options, *labelled, f"--label=fusebox.stack={plan.stack}",
        f"--build-arg=SOURCE_DATE_EPOCH={commit.seconds}",
        f"--output=type=oci,dest={folder / 'oci'},tar=false,rewrite-timestamp=true",
    )  # fmt: skip
    digest = digest_in(folder / "oci")
    push(folder / "oci", name, digest)
    if prove(plan, f"{name}@{digest}"):
        raise Refusal(f"{name}@{digest} was pushed and a claim of it is refuted: no tag was set, read its evidence.")
    wanted = [one for one in tags(plan.target, commit) if floating is None or one != plan.target.name]
    set_tags(name, digest, wanted)
    _describe(plan, folder, name, digest, wanted)
    for one in wanted:
        console.print(f"published {name}:{one}", soft_wrap=True)
    if floating:
        console.print(f"{name}:{plan.target.name} was not moved: {floating}", soft_wrap=True)
    return folder


def _refuse_classic_store() -> None:
    """An OCI layout needs the containerd image store, or a builder with one of its own."""
    store = str(engine().info().get("DriverStatus"))
    builder = subprocess.run(["docker", "buildx", "inspect"], capture_output=True, text=True, check=False).stdout
    if re.search(r"^Driver:\s+docker$", builder, re.MULTILINE) and "containerd" not in store:
        raise Refusal(
            "The engine's classic image store cannot write an image as it will be pushed: run "
            "`docker buildx create --use --driver docker-container` first, or turn on the containerd image store."
        )


def digest_in(oci: Path) -> str:
    """The digest of the one image manifest of an OCI layout."""
    (manifest,) = json.loads((oci / "index.json").read_text())["manifests"]
    return str(manifest["digest"])


def push(oci: Path, name: str, digest: str) -> None:
    """Push an OCI layout by its digest, without a tag."""
    _crane(f"{name}@{digest} cannot be pushed, and no tag was set", "push", str(oci), f"{name}@{digest}")


def set_tags(name: str, digest: str, wanted: Iterable[str]) -> None:
    """Give a pushed digest its tags, in this order."""
    for one in wanted:
        _crane(f"{name}:{one} cannot be set", "tag", f"{name}@{digest}", one)


def _crane(fault: str, *words: str) -> None:
    """Run crane; a registry on this machine may be without TLS."""
    if shutil.which("crane") is None:
        raise Refusal("Publishing needs crane (go-containerregistry), which is not installed: install it.")
    local = ["--insecure"] if any(re.match(r"(127\.0\.0\.1|localhost)[:/]", word) for word in words) else []
    done = subprocess.run(["crane", *local, *words], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = _last(Exception(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "no message"))
        raise Refusal(f"{fault} ({said}): check the registry and your rights there, then publish again.")


def _describe(plan: Plan, folder: Path, name: str, digest: str, wanted: list[str]) -> None:
    """Write image.json and image.md: what the image holds, from its own manifest, and its layers' sizes."""
    blobs = folder / "oci" / "blobs" / "sha256"
    manifest = json.loads((blobs / digest.removeprefix("sha256:")).read_text())
    config = json.loads((blobs / manifest["config"]["digest"].removeprefix("sha256:")).read_text())
    made_by = [entry.get("created_by", "base") for entry in config["history"] if not entry.get("empty_layer")]
    inside = _read_inside(f"{name}@{digest}", "cat", "/opt/fusebox/fusebox/manifest.json")
    layers = [
        {"bytes": layer["size"], "digest": layer["digest"], "made_by": by.partition(" # ")[0]}
        for layer, by in zip(manifest["layers"], made_by, strict=True)
    ]
    packages = json.loads(inside)["packages"]
    for pin in plan.pins:
        if pin.name in packages:
            packages[pin.name]["source"] = pin.release.identity
    about = {
        "name": name, "digest": digest, "tags": wanted, "labels": config["config"].get("Labels", {}),
        "layers": layers, "packages": packages,
    }  # fmt: skip
    write_json(folder / "image.json", about)
    rows = [
        f"| {package} | {held.get('release', held['version'])} | `{held.get('source', '')[:12]}` | "
        f"{', '.join(Path(patch['file']).stem for patch in held['patches'])} |"
        for package, held in packages.items()
    ]
    sizes = [f"| {layer['bytes'] / 2**20:.1f} | {layer['made_by'][:90]} |" for layer in layers]
    total = sum(layer["bytes"] for layer in layers) / 2**20
    lines = [
        f"# {name}@{digest}", "", f"Tags: {', '.join(wanted)}.", "",
        "| package | version | commit or sha256 | patches |", "| --- | --- | --- | --- |", *rows, "",
        f"{total:.1f} MiB in the registry:", "", "| MiB | layer |", "| --- | --- |", *sizes,
    ]  # fmt: skip
    write_text(folder / "image.md", "\n".join(lines) + "\n")


def _read_inside(image: str, *command: str) -> str:
    """What a command in an image prints."""
    return str(engine().containers.run(image, list(command), remove=True).decode())
