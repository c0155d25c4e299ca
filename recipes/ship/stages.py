"""The tool's steps inside `docker build`: `patch --into` in the stage `sources`, `audit` in the stage `audit`.

`lay_out` writes a folder for each package, which a separate stage compiles; `gather` checks the wheels of these
stages, and writes what the runtime stage installs.
"""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from packaging.utils import parse_wheel_filename

from recipes.catalogue.lock import Artifact, hashed_requirement
from recipes.catalogue.plan import Plan
from recipes.catalogue.schema import Pin, Target
from recipes.errors import Refusal
from recipes.files import digest_of, sha256_of, write_json
from recipes.make import audit, environment
from recipes.make.build import Builder, Tree, installed, write_settings
from recipes.make.environment import Wheel

# --- stage `sources`


def base_of(target: Target, standin: str | None = None) -> str:
    """The base that wheels are compiled on, or its stand-in: image and digest, and the packages installed on it."""
    return " + ".join([standin or target.base.wheels.reference, *target.base.wheels.apt])


def lay_out(plan: Plan, builder: Builder, into: Path, standin: str | None = None) -> None:
    """Write the input of the later stages: environment/ to build in, and packages/NAME/ for each built package.

    `standin` is the image that stands for the base of the wheels: what is compiled on it has another key, and what it
    provides is not checked. The builder's exported wheels keep their own.
    """
    files = builder.fetch()
    house = into / "environment" / "wheelhouse"
    house.mkdir(parents=True)
    lines = _copied(plan.locked.artifacts, files, house)
    for pin in plan.pins:
        if pin.release.kind == "wheel":
            wheel = builder.given(pin, files)
            shutil.copy(wheel.path, house)
            lines.append(hashed_requirement(pin.name, pin.release.metadata_version, wheel.sha256) + "\n")
            write_json(into / "given" / f"{pin.name}.json", dict(wheel.record))
    _lay_out_toolkit(plan, files, into / "environment")
    options = "--system-site-packages\n" if plan.on_base else ""
    _write(
        into / "environment", requirements_txt="".join(lines), python=f"python{plan.target.python}\n", options=options
    )
    if plan.on_base and not standin:  # a stand-in may have another release
        listed = "".join(f"{pin.name} {pin.release.metadata_version}\n" for pin in plan.provided)
        _write(into / "environment", provided=listed)
    pins = {pin.name: pin for pin in plan.pins}
    for name, tree in builder.trees(files).items():
        pin = pins[name]
        inputs = builder.inputs(pin, tree, pin.build.compiler, base_of(plan.target, standin))
        if exported := builder.exported_wheel(pin, inputs):
            inputs = exported.record["inputs"]
        _lay_out_package(pin, plan.target, tree, inputs, into)
        if exported:
            shutil.copytree(exported.path.parent, into / "packages" / name / "wheel")
    for pin in plan.left_out:
        _write(into / "packages" / pin.name, left_out_txt=f"{pin.label} is left out: it {pin.release.reach}.\n")


def _lay_out_package(pin: Pin, target: Target, tree: Tree, inputs: dict[str, Any], into: Path) -> None:
    """Write the patched source of a package, the settings of its build, and what its wheel will be made from."""
    folder = into / "packages" / pin.name
    shutil.copytree(tree.path, folder / "source" / tree.path.name, symlinks=True)
    write_settings(pin, target, folder)
    write_json(into / "inputs" / f"{pin.name}.json", {"inputs": inputs, "patches": list(tree.patches)})


def _lay_out_toolkit(plan: Plan, files: Mapping[str, Path], into: Path) -> None:
    """Write the wheels of a pinned CUDA toolkit, which only the stage `toolchain` contains."""
    if plan.toolkit is None:
        return
    (into / "toolkit").mkdir()
    _write(into, toolkit_txt="".join(_copied(plan.toolkit.artifacts, files, into / "toolkit")))


def _copied(artifacts: Iterable[Artifact], files: Mapping[str, Path], into: Path) -> list[str]:
    """Copy wheels into a folder; return the line of each in a requirements file."""
    lines = []
    for artifact in artifacts:
        shutil.copy(files[artifact.sha256], into)
        lines.append(hashed_requirement(artifact.name, artifact.version, artifact.sha256) + "\n")
    return lines


def _write(folder: Path, **texts: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name.replace("_txt", ".txt")).write_text(text)


# --- stage `audit`


def gather(plan: Plan, out: Path, wheels: Path, built_in: Path, into: Path) -> None:
    """Audit every built wheel, and write what the runtime stage installs and the manifest of the image.

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
            requirements += hashed_requirement(wheel.pin.name, wheel.pin.release.metadata_version, wheel.sha256) + "\n"
    _write(into / "fusebox", constraints_txt=_constraints(plan))
    _write(into, requirements_txt=requirements, python=f"python{plan.target.python}\n", options="")
    if plan.on_base:
        _write(into, replaced="".join(f"{wheel.pin.name}\n" for wheel in made))
        if (provided := out / "environment" / "provided").exists():
            shutil.copy(provided, into)


def _constraints(plan: Plan) -> str:
    """Every distribution that the image has, at its version: what pip and uv on top of the image may not change."""
    versions = {artifact.name: artifact.version for artifact in plan.locked.artifacts}
    versions |= {pin.name: pin.release.metadata_version for pin in plan.pins}
    return "".join(f"{name}=={version}\n" for name, version in sorted(versions.items()))


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
        wheels = list(built.glob("*.whl"))
        if len(wheels) != 1:
            raise Refusal(
                f"{pin.label}: its stage left {len(wheels)} wheels, and one was expected: read its build.log."
            )
        path = wheels[0]
    audit.check_metadata(path, pin, plan.target)  # first: another package's wheel must not be kept as this one's
    compiled, glibc = pin.build.compiler != "none", plan.target.base.glibc or plan.target.glibc
    checked = audit.audit(path, pin, plan.target, beside, glibc)
    if not cached:
        compilers = (built / "compiler.txt").read_text().splitlines()
        record = {
            "file": path.name,
            "sha256": sha256_of(path),
            "inputs": planned["inputs"],
            "audit": checked,
            "patches": [installed(patch, path) for patch in planned["patches"]],
            "built_with": {
                "python": plan.target.python,
                "compiler": "; ".join(compilers) if compiled else "none",
                "where": planned["inputs"]["base"] if compiled else "any",
                **({"sm": pin.architectures(plan.target)} if pin.build.compiler == "nvcc" else {}),
            },
        }
    stored = _stored(path, record, built / "build.log", into, key)
    return Wheel(pin, stored, record["sha256"], record)


def _stored(path: Path, record: dict[str, Any], log: Path, into: Path, key: str) -> Path:
    """The wheel as INTO/wheels/KEY keeps it, with its record and its log; INTO/wheelhouse has a link to it."""
    stored = into / "wheels" / key
    stored.mkdir(parents=True)
    shutil.copy(path, stored)
    if log.exists():
        shutil.copy(log, stored)
    write_json(stored / "wheel.json", record)
    (into / "wheelhouse").mkdir(exist_ok=True)
    os.link(stored / path.name, into / "wheelhouse" / path.name)
    return stored / path.name
