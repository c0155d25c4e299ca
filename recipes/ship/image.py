"""Build and run images with docker on this machine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import docker
from docker.errors import DockerException

from recipes.catalogue.bases import bases
from recipes.catalogue.plan import Plan
from recipes.catalogue.schema import Target
from recipes.errors import Refusal
from recipes.files import write_text
from recipes.progress import say
from recipes.ship import dockerfile

EPOCH = 315532800  # 1980-01-01, the time of every file in a layer, as docker/build-wheel.sh sets it in wheels


def engine() -> docker.DockerClient:
    """The Docker engine at DOCKER_HOST or the default socket; refused if none answers or `docker` is missing."""
    if shutil.which("docker") is None:
        raise Refusal("The command docker, which builds and runs images, is not on the PATH: install Docker's client.")
    try:
        client = docker.from_env()
        client.ping()
    except DockerException as error:
        place = os.environ.get("DOCKER_HOST") or "the default socket"
        raise Refusal(
            f"No Docker engine answers at {place} ({_reason(error)}): start one, or set DOCKER_HOST."
        ) from None
    return client


def _reason(error: BaseException) -> str:
    """What the system says in an error or behind it, such as "Connection refused"; else the error's own words."""
    behind: BaseException | None = error
    while behind:
        if isinstance(behind, OSError) and behind.strerror:
            return behind.strerror
        behind = behind.__cause__ or behind.__context__
    return last_words(error)


def digest(image: str) -> str:
    """The digest ("sha256:...") that a registry gives for an image's tag now."""
    try:
        identity = engine().images.get_registry_data(image).id
    except DockerException as error:
        raise Refusal(
            f"The registry of {image} gives no digest for it ({last_words(error)}): check the name and the network."
        ) from None
    return str(identity)


def last_words(message: object) -> str:
    """The end of a message from an engine or a registry, on one line and without its full stop."""
    return re.sub(r"\s+", " ", str(message)).strip().rstrip(".")[-200:]


def resolve(targets_file: Path, target: Target) -> tuple[dict[str, str], list[str]]:
    """Write missing digests of a target into targets.toml; return those written, and why others are still missing.

    Every target with the same image gets the same digest.
    """
    digests, missing = {}, []
    for image in target.base.unresolved:
        try:
            digests[image] = digest(image)
        except Refusal as refusal:
            missing.append(f"the digest of {image} stays unresolved: {refusal}")
    text = targets_file.read_text(encoding="utf-8")
    for image, sha256 in digests.items():
        text = text.replace(f'image = "{image}", digest = "unresolved"', f'image = "{image}", digest = "{sha256}"')
    if digests:
        write_text(targets_file, text)
    return digests, missing


@dataclass(frozen=True)
class Options:
    """How an image is built here: stand-ins for bases, folders of files, secrets, GPU architectures, network.

    `cache` is where a registry keeps the stages between runs.
    `apt` is "locked" or "newest"; None keeps to the locks unless a stand-in is used, of which they are not.
    """

    standins: dict[str, str]
    mirror: Path | None = None
    wheelcache: Path | None = None
    ca: Path | None = None
    pip_conf: Path | None = None
    sm: tuple[str, ...] = ()
    network: str | None = None
    elsewhere: bool = False
    apt: str | None = None
    cache: str | None = None

    @property
    def unlocked(self) -> bool:
        """Whether apt installs what the distribution has today."""
        return self.apt == "newest" or (self.apt is None and bool(self.standins))

    def base(self, target: Target) -> dict[str, str]:
        """The labels of a stand-in for the base that an environment runs on; none without one."""
        if (other := self.standins.get(target.base.runtime.image)) is None:
            return {}
        name, _, digest = other.partition("@")
        return {"org.opencontainers.image.base.name": name, "org.opencontainers.image.base.digest": digest}

    def arguments(self, target: Target) -> list[str]:
        """Options of `docker buildx build`; the Dockerfile stays as it is."""
        references = {image.image: image.reference for image in bases().of(target)}
        if strangers := sorted(set(self.standins) - set(references)):
            raise Refusal(
                f"--standin {strangers[0]} is not a base of {target.name}: choose one of {', '.join(references)}."
            )
        words = [f"--build-context={references[name]}=docker-image://{other}" for name, other in self.standins.items()]
        words += [f"--label={key}={value}" for key, value in self.base(target).items()]
        if other := self.standins.get(target.base.wheels.image):
            words.append(f"--build-arg=STANDIN={other}")
        for name, folder in (("mirror", self.mirror), ("wheelcache", self.wheelcache)):
            if folder:
                _refuse_links_out_of(folder, name)
                words.append(f"--build-context={name}={folder}")
        words += [f"--secret=id=ca,src={self.ca}"] if self.ca else []
        words += [f"--secret=id=pip,src={self.pip_conf}"] if self.pip_conf else []
        words += [f"--build-arg=SM={','.join(self.sm)}"] if self.sm else []
        words += [f"--network={self.network}"] if self.network else []
        words += ["--build-arg=ELSEWHERE=yes"] if self.elsewhere else []
        words += ["--build-arg=APT=newest"] if self.unlocked else []
        if self.cache:
            place = f"type=registry,ref={self.cache}"
            words += [f"--cache-from={place}", f"--cache-to={place},mode=max"]
        return words


def _refuse_links_out_of(folder: Path, name: str) -> None:
    """Refuse links that docker would copy without their targets: the stage would go to the network instead."""
    for path in sorted(path for path in folder.rglob("*") if path.is_symlink()):
        inside = path.resolve().is_relative_to(folder.resolve())
        if path.readlink().is_absolute() or not inside:
            link, fault = path.relative_to(folder), "is an absolute link" if inside else "is a link out of the folder"
            raise Refusal(f"--{name} {folder}: {link} {fault}: replace it with a copy of what it points to.")


def tag(target: Target) -> str:
    """The name of the image on this machine."""
    return f"fusebox:{target.name}"


def build(plan: Plan, options: Options) -> str:
    """Build the image of a target with `docker buildx build`, load it into the engine and return its id."""
    engine()
    buildx(plan, options, "--tag", tag(plan.target), "--load")
    return str(engine().images.get(tag(plan.target)).id)


def buildx(plan: Plan, options: Options, *output: str) -> None:
    """Run `docker buildx build` on a target's Dockerfile; what it prints goes to the terminal.

    Each build has the same time, because folders of WORKDIR have it: another time makes all stages after them anew.
    """
    narrowed = [f"--label={name}={value}" for name, value in dockerfile.narrowed_labels(plan).items() if options.sm]
    command = [
        "docker", "buildx", "build", "--file", str(plan.root / "docker" / f"{plan.target.name}.Dockerfile"),
        "--provenance=false", f"--build-arg=SOURCE_DATE_EPOCH={EPOCH}", *options.arguments(plan.target), *narrowed,
        *output, str(plan.root),
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
