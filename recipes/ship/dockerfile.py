"""The Dockerfile of each target, and the labels of its image."""

from __future__ import annotations

import json
from pathlib import Path

import jinja2

from recipes.catalogue.bases import bases
from recipes.catalogue.plan import Plan
from recipes.catalogue.schema import Image, Target
from recipes.make import environment
from recipes.ship import apt

ROOMS = ("catalogue", "make", "ship", "verbs")  # of recipes/: what `patch` and `audit` need inside `docker build`
LICENSES = "Apache-2.0 AND LicenseRef-upstream"  # of Fusebox, and of each package by its own metadata
_QUIET_APT = " ".join(f"--mount=type=tmpfs,target=/var/{name}" for name in ("cache", "lib/apt/lists", "log"))


def text(plan: Plan) -> str:
    """The text of docker/TARGET.Dockerfile."""
    folder = plan.root / "docker"
    template = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder), undefined=jinja2.StrictUndefined, trim_blocks=True, autoescape=False
    ).get_template("Dockerfile.template")
    own = {pin.name for pin in plan.pins if pin.release.kind == "source"}
    sources = bases(plan.root).sources
    return template.render(
        target=plan.target,
        sources=sources,
        rooms=ROOMS,
        image=lambda image: image.reference,
        apt=lambda image: _apt(plan.root, image),
        uv="type=bind,from=sources,source=/tool/bin/uv,target=/usr/local/bin/uv",
        built=[pin for pin in plan.pins if pin.release.kind == "source"],
        layers=_layers(plan),
        needs=lambda pin: [name for name in pin.build.needs if name in own],
        variables=environment.own_variables(plan.target, Path("/opt/fusebox")) | _driver(plan.target),
        labels=labels(plan),
        narrowable=any(pin.release.sm for pin in plan.pins),
        quoted=_quoted,
    )


def _layers(plan: Plan) -> list[str]:
    """The layers of the environment, as docker/split-layers.sh makes them; none where it is one with the base."""
    if plan.on_base:
        return []
    return [*(["cuda"] if plan.target.cuda != "none" else []), "torch", "dependencies", "packages"]


def _driver(target: Target) -> dict[str, str]:
    """The variables that NVIDIA's container hooks read; without them enroot mounts no driver (NVIDIA/enroot#205)."""
    if target.cuda == "none":
        return {}
    return {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}


def _quoted(text: str) -> str:
    """A value of LABEL or ENV as it is: docker knows no \\u00fc, and puts a variable where a $ stands."""
    return json.dumps(text, ensure_ascii=False).replace("$", r"\$")


def _apt(root: Path, image: Image) -> str:
    """The one layer of a stage with packages of its distribution, by their lock if there is one; or nothing."""
    if not image.apt:
        return ""
    packages = " ".join(image.apt)
    if (lock := apt.lock_of(root, image)) is None:
        install = f"DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends {packages}"
        return f"RUN {_QUIET_APT} \\\n    apt-get update && {install}\n"
    mounted = f"--mount=type=bind,source={lock.relative_to(root)},target=/{lock.name}"
    script = "--mount=type=bind,source=docker/apt.sh,target=/apt.sh"
    return (
        f"ARG APT=\nRUN {_QUIET_APT} \\\n    {script} {mounted} \\\n"
        f"    apt-get update && /apt.sh /{lock.name} {packages}\n"
    )


def labels(plan: Plan) -> dict[str, str]:
    """The labels that follow from the data (OCI image annotations, and ours), without the GPU architectures."""
    target = plan.target
    fixed = {
        "org.opencontainers.image.title": f"fusebox {target.name}",
        "org.opencontainers.image.description": target.reason,
        "org.opencontainers.image.licenses": LICENSES,
        "org.opencontainers.image.base.name": target.base.runtime.image,
        "org.opencontainers.image.base.digest": target.base.runtime.digest,
        "fusebox.target": target.name,
        "fusebox.python": target.python,
        "fusebox.cuda": target.cuda,
        "fusebox.driver": target.driver or "none",
        "fusebox.supported-until": bases(plan.root).supported_until(target),
        "fusebox.packages": plan.packages,
    }
    return fixed | {f"fusebox.option.{package}": option for package, option in target.options.items()}


def narrowed_labels(plan: Plan) -> dict[str, str]:
    """The labels that other GPU architectures change; the Dockerfile cannot know which packages these leave out."""
    absent = {
        f"fusebox.option.{pin.name}": "not in this image" for pin in plan.left_out if pin.name in plan.target.options
    }
    return {"fusebox.packages": plan.packages} | absent
