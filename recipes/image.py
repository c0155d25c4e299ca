"""Images: the Dockerfile of each target, what its stages `sources` and `audit` do, and docker's part of it.

`docker build` runs `patch --into` (lay_out) in the stage `sources`, compiles each package in a stage of its own from
one folder of it, and runs `audit` (gather) on the wheels; the runtime stage installs what that wrote.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import zipfile
from dataclasses import dataclass
from pathlib import Path

import docker
import jinja2
from docker.errors import DockerException
from packaging.utils import parse_wheel_filename

from recipes import audit, environment
from recipes.build import Builder, check_exported, installed
from recipes.cache import sha256_of, write_json, write_text
from recipes.environment import Wheel
from recipes.model import Image, Pin, Refusal, Target, build_environment, digest_of
from recipes.plan import Plan
from recipes.progress import say

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
        variables=environment.own_variables(plan.target, Path("/opt/fusebox")) | _driver(plan.target),
        labels=labels(plan),
        quoted=_quoted,
    )


def _driver(target: Target) -> dict[str, str]:
    """What NVIDIA's container hooks read: without it enroot mounts no driver (NVIDIA/enroot#205)."""
    if target.cuda == "none":
        return {}
    return {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}


def _quoted(text: str) -> str:
    """A value of LABEL or ENV as it is: docker knows no \\u00fc, and puts a variable where a $ stands."""
    return json.dumps(text, ensure_ascii=False).replace("$", r"\$")


def _apt(image: Image) -> str:
    """The one layer of a stage that comes from its distribution; nothing where it needs none."""
    if not image.apt:
        return ""
    install = "apt-get install --yes --no-install-recommends"
    return (
        f"RUN {_QUIET_APT} \\\n    apt-get update && DEBIAN_FRONTEND=noninteractive {install} {' '.join(image.apt)}\n"
    )


def labels(plan: Plan) -> dict[str, str]:
    """What an image says of itself that follows from the data (OCI image annotations, and ours); not its sm."""
    target = plan.target
    said = {
        "org.opencontainers.image.title": f"fusebox {target.name}",
        "org.opencontainers.image.description": target.reason,
        "org.opencontainers.image.base.name": target.base.runtime.image,
        "org.opencontainers.image.base.digest": target.base.runtime.digest,
        "fusebox.target": target.name,
        "fusebox.python": target.python,
        "fusebox.cuda": target.cuda,
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


def gather(plan: Plan, out: Path, wheels: Path, built_in: Path, into: Path) -> None:
    """Audit every wheel that was built, and write what the runtime stage installs and what the image says it holds.

    `out` is what `lay_out` wrote; `wheels` holds NAME/ of each built package; `built_in` is the environment that they
    were compiled in, with the target's torch, unless the base image has that.
    """
    house = out / "environment" / "wheelhouse"
    made: list[Wheel] = []
    beside = None if plan.on_base else environment.site_packages(built_in, plan.target)
    for pin in plan.pins:
        if pin.release.kind == "wheel":
            record = json.loads((out / "given" / f"{pin.name}.json").read_text())
            path = house / str(pin.release.file)
            audit.check_metadata(path, pin, plan.target)
            made.append(Wheel(pin, path, sha256_of(path), record))
        elif pin.release.kind == "source":
            made.append(_audited(plan, pin, out, wheels / pin.name, beside, into))
    environment.describe(into, plan, made)
    whole = sorted([*house.glob("*.whl"), *(into / "wheelhouse").glob("*.whl")])
    write_json(into / "fusebox" / "bytes.json", {parse_wheel_filename(path.name)[0]: _unpacked(path) for path in whole})
    requirements = (out / "environment" / "requirements.txt").read_text()
    for wheel in made:
        if wheel.pin.release.kind == "source":
            requirements += f"{wheel.pin.name}=={wheel.pin.release.metadata_version} --hash=sha256:{wheel.sha256}\n"
    _write(into, requirements_txt=requirements, python=f"{plan.target.python}\n", options="")
    if plan.on_base:
        _write(into, replaced="".join(f"{wheel.pin.name}\n" for wheel in made))


def _unpacked(wheel: Path) -> int:
    """The bytes of the files of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return sum(member.file_size for member in archive.infolist())


def _audited(plan: Plan, pin: Pin, out: Path, built: Path, beside: Path | None, into: Path) -> Wheel:
    """A wheel that a stage built, with its record; kept as CACHE/wheels/KEY is, so that it can be taken out again."""
    planned = json.loads((out / "inputs" / f"{pin.name}.json").read_text())
    key = digest_of(planned["inputs"])
    if cached := (built / "wheel.json").exists():
        record = json.loads((built / "wheel.json").read_text())
        path = built / record["file"]
    else:
        found = list(built.glob("*.whl"))
        if len(found) != 1:
            raise Refusal(f"{pin.label}: its stage left {len(found)} wheels, and one was expected: read its build.log.")
        path = found[0]
    audit.check_metadata(path, pin, plan.target)  # before another package's wheel is judged and kept as this one's
    compiled, glibc = pin.build.compiler != "none", plan.target.base.glibc or plan.target.glibc
    checked = audit.audit(path, pin, plan.target, beside, glibc)
    if not cached:
        said = (built / "compiler.txt").read_text().splitlines()
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
                **({"sm": plan.target.sm} if pin.build.compiler == "nvcc" else {}),
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
    """The Docker engine that DOCKER_HOST or the default socket names; refused if none answers, or without `docker`."""
    if shutil.which("docker") is None:
        raise Refusal("There is no command docker on the PATH, which builds and runs images: install Docker's client.")
    try:
        client = docker.from_env()
        client.ping()
    except DockerException as error:
        raise Refusal(f"No Docker engine answers ({last_words(error)}): start one, or set DOCKER_HOST.") from None
    return client


def digest(image: str) -> str:
    """The digest ("sha256:...") that a registry has for an image's tag now."""
    try:
        found = engine().images.get_registry_data(image).id
    except DockerException as error:
        raise Refusal(
            f"The registry of {image} gives no digest for it ({last_words(error)}): check the name and the network."
        ) from None
    return str(found)


def last_words(said: object) -> str:
    """The last clause of what an engine or a registry said."""
    return re.sub(r"\s+", " ", str(said)).strip().rstrip(".")[-200:]


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
    """How an image is built here: stand-ins for bases, folders to take from, certificates, architectures, network."""

    standins: dict[str, str]
    mirror: Path | None = None
    wheelcache: Path | None = None
    ca: Path | None = None
    sm: tuple[str, ...] = ()
    network: str | None = None

    def arguments(self, target: Target) -> list[str]:
        """Options of `docker buildx build`; the Dockerfile stays as it is."""
        bases = {image.image: image.reference for image in (SOURCES, target.base.wheels, target.base.runtime)}
        if strangers := sorted(set(self.standins) - set(bases)):
            raise Refusal(f"--standin {strangers[0]} is no base of {target.name}: choose one of {', '.join(bases)}.")
        said = [f"--build-context={bases[name]}=docker-image://{other}" for name, other in self.standins.items()]
        if other := self.standins.get(target.base.runtime.image):
            name, _, digest = other.partition("@")
            base = "--label=org.opencontainers.image.base"
            said += [f"{base}.name={name}", f"{base}.digest={digest}"]
        for name, folder in (("mirror", self.mirror), ("wheelcache", self.wheelcache)):
            if folder:
                _refuse_links_out_of(folder, name)
                said.append(f"--build-context={name}={folder}")
        said += [f"--secret=id=ca,src={self.ca}"] if self.ca else []
        said += [f"--build-arg=SM={','.join(self.sm)}"] if self.sm else []
        said += [f"--network={self.network}"] if self.network else []
        return said


def _refuse_links_out_of(folder: Path, name: str) -> None:
    """docker takes a link along, and not what lies beyond: the stage would find nothing there, and ask the network."""
    for path in sorted(path for path in folder.rglob("*") if path.is_symlink()):
        inside = path.resolve().is_relative_to(folder.resolve())
        if path.readlink().is_absolute() or not inside:
            link, fault = path.relative_to(folder), "names a place from / on" if inside else "is a link out of it"
            raise Refusal(f"--{name} {folder}: {link} {fault}: copy there what it names.")


def tag(target: Target) -> str:
    """The name of the image on this machine."""
    return f"fusebox:{target.name}"


def build(plan: Plan, options: Options) -> str:
    """Build the image of a target with `docker buildx build`, load it into the engine and return its id."""
    engine()
    buildx(plan, options, "--tag", tag(plan.target), "--load")
    return str(engine().images.get(tag(plan.target)).id)


def buildx(plan: Plan, options: Options, *output: str) -> None:
    """Run `docker buildx build` on a target's Dockerfile; what it prints goes to the terminal."""
    command = [
        "docker", "buildx", "build", "--file", str(plan.root / "docker" / f"{plan.target.name}.Dockerfile"),
        "--provenance=false", *options.arguments(plan.target), *output, str(plan.root),
    ]  # fmt: skip
    if subprocess.run(command, check=False).returncode != 0:
        raise Refusal(f"docker buildx build of {plan.target.name} failed: read what it printed above.")


def smoke(target: Target, image: str, *options: str) -> int:
    """Run an image's own `smoke` and return its exit code; `options` are those of `docker run`."""
    run = ["docker", "run", "--rm", *(["--gpus=all"] if target.cuda != "none" else []), *options, image, "smoke"]
    return subprocess.run(run, check=False).returncode


def show(plan: Plan) -> None:
    """Print the size of the image by layer, unpacked."""
    image = engine().images.get(tag(plan.target))
    for layer in image.history():
        if layer["Size"]:
            say(f"{layer['Size'] / 2**20:8.1f} MiB  {layer['CreatedBy'][:100]}")
