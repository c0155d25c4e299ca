"""A target's environment: a virtual environment of checked wheels only, made offline; it is complete or not there.

Where a base image provides packages, it is a layer on that image's own Python instead. It describes itself in
PREFIX/fusebox/: manifest.json (packages, versions, hashes, patches) and each pinned wheel's own RECORD, so that smoke
tests can tell what it should hold without this tool.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uv
from packaging.utils import canonicalize_name

from recipes.catalogue import symptoms
from recipes.catalogue.lock import Artifact, hashed_requirement
from recipes.catalogue.plan import Plan
from recipes.catalogue.schema import Pin, Target
from recipes.errors import Refusal
from recipes.files import OTHER_CACHE, OTHER_CHECKOUT, ROOT, disk_full, disk_named, remove, write_json
from recipes.make import audit
from recipes.make.cache import Cache
from recipes.make.damage import damage
from recipes.process import held
from recipes.progress import Steps

OTHER = "it is missing, or of other wheels"
BREAKS_THE_BASE = 3  # the exit code of docker/make-environment.sh where a layer breaks a requirement of its base


@dataclass(frozen=True)
class Wheel:
    """A wheel of a pinned package. `record` says how it was built; empty for one that came built."""

    pin: Pin
    path: Path
    sha256: str
    record: Mapping[str, Any]


def folder(root: Path, target: Target) -> Path:
    """ROOT/build/TARGET, which git ignores."""
    return root / "build" / target.name


def python_of(environment: Path) -> Path:
    return environment / "bin" / "python"


def site_packages(environment: Path, target: Target) -> Path:
    return environment / "lib" / f"python{target.python}" / "site-packages"


def clean_variables(environment: Path) -> dict[str, str]:
    """The variables for running something inside an environment: nothing of the caller's Python gets in."""
    ours = {
        key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PIP_", "UV_", "VIRTUAL_ENV"))
    }
    return {
        **ours,
        "PATH": f"{environment / 'bin'}:{os.environ.get('PATH') or os.defpath}",
        "VIRTUAL_ENV": str(environment),
        "PYTHONNOUSERSITE": "1",
    }


def own_variables(target: Target, environment: Path) -> dict[str, str]:
    """The target's variables in that environment, whose site-packages "{site}" stands for."""
    site = str(site_packages(environment, target))
    return {name: text.replace("{site}", site) for name, text in target.variables.items()}


def run_variables(target: Target, environment: Path) -> dict[str, str]:
    """The variables for a user's run in a target's environment: its own too, where the caller sets no others."""
    return own_variables(target, environment) | clean_variables(environment)


def interpreter(target: Target, cache: Cache, steps: Steps) -> str:
    """The target's Python: one of this machine, else the build of it that uv pins by hash."""
    find = ("python", "find", "--system", "--no-python-downloads", target.python)
    done = run_uv(cache, *find)
    if done.returncode != 0 and (switched_off := _in_pyenv(target.python)):
        return str(switched_off)
    if done.returncode != 0:
        with steps.step("fetch", f"Python {target.python}: none on this machine, uv brings one"):
            fetched = run_uv(cache, "python", "install", "--no-bin", target.python)
            done = run_uv(cache, *find)
            if done.returncode != 0:
                message = (fetched.stderr.strip().splitlines() or ["no message"])[-1].strip().rstrip(".")
                raise Refusal(
                    f"No Python {target.python} is on this machine, and uv cannot provide one ({message}): install it "
                    f"(a package such as python{target.python}) and run again."
                )
    return done.stdout.strip()


def _in_pyenv(version: str) -> Path | None:
    """pyenv's newest Python of that version; its shims only answer for versions that are switched on."""
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    pythons = [path for path in root.glob(f"versions/{version}.*/bin/python") if path.parts[-3][-1].isdigit()]
    return max(pythons, key=lambda path: int(path.parts[-3].rpartition(".")[2]), default=None)


def create(
    path: Path,
    python: str,
    locked: Iterable[tuple[Artifact, Path]],
    wheels: Iterable[Wheel],
    cache: Cache,
    *,
    over_base: bool = False,
) -> None:
    """Make a virtual environment of that Python at `path` and install exactly these files, each by its sha256.

    `over_base` lets it see what that Python itself has, as a base image provides it.
    """
    _run_script(path, python, locked, wheels, cache, options="--system-site-packages\n" if over_base else "")


def _run_script(
    prefix: Path,
    python: str,
    locked: Iterable[tuple[Artifact, Path]],
    wheels: Iterable[Wheel],
    cache: Cache,
    **texts: str,
) -> None:
    """Run docker/make-environment.sh as a stage of an image does; `texts` are the other files of its input."""
    files = [(artifact.name, artifact.version, artifact.sha256, file) for artifact, file in locked]
    files.extend((wheel.pin.name, wheel.pin.release.metadata_version, wheel.sha256, wheel.path) for wheel in wheels)
    lines = [hashed_requirement(name, version, sha256) + "\n" for name, version, sha256, _ in files]
    with cache.scratch("environment") as scratch:
        house = scratch / "wheelhouse"
        house.mkdir()
        for *_, file in files:
            (house / file.name).symlink_to(file)
        for name, text in {**texts, "python": python, "requirements.txt": "".join(lines)}.items():
            (scratch / name).write_text(text, encoding="utf-8")
        variables = _uv_variables() | {"UV_CACHE_DIR": str(cache.root / "uv"), "TMPDIR": str(scratch)}
        variables["PATH"] = f"{Path(uv.find_uv_bin()).parent}:{os.environ.get('PATH') or os.defpath}"
        command = [str(ROOT / "docker" / "make-environment.sh"), str(prefix), str(scratch), str(house)]
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False, close_fds=False)
    if done.returncode == BREAKS_THE_BASE:
        raise Refusal(done.stderr.strip().removeprefix("fusebox: "))
    if done.returncode != 0:
        raise _refused("uv", prefix, cache, done.stderr)


def check(path: Path, cache: Cache) -> None:
    """Refuse an environment in which a requirement is not met (`pip check`)."""
    done = run_uv(cache, "pip", "check", "--python", str(python_of(path)))
    if done.returncode != 0:
        raise _refused("uv pip check", path, cache, done.stderr)


def _uv_variables() -> dict[str, str]:
    """What uv runs with: of the caller's settings of it only those of the network and of where Python comes from."""
    prefixes = (
        "UV_PYTHON_INSTALL",
        "UV_HTTP",
        "UV_NATIVE_TLS",
        "UV_SYSTEM_CERTS",
        "UV_INSECURE_HOST",
        "UV_KEYRING_PROVIDER",
    )
    apart = ("UV_", "VIRTUAL_ENV", "PYTHON")
    ours = {key: text for key, text in os.environ.items() if key.startswith(prefixes) or not key.startswith(apart)}
    # This metadata holds times; without it, the same wheels give the same environment.
    return {**ours, "UV_NO_INSTALLER_METADATA": "1"}


def run_uv(cache: Cache, *arguments: str) -> subprocess.CompletedProcess[str]:
    """uv with this cache, and without any setting of the caller's."""
    command = [uv.find_uv_bin(), "--no-config", "--cache-dir", str(cache.root / "uv"), "--no-progress", *arguments]
    return subprocess.run(command, env=_uv_variables(), capture_output=True, text=True, check=False, close_fds=False)


def _refused(what: str, path: Path, cache: Cache, message: str) -> Refusal:
    """The error for an environment that could not be made, by what uv printed."""
    if "No space left" in message:
        return disk_full(path, OTHER_CACHE if path.is_relative_to(cache.root) else OTHER_CHECKOUT)
    cure = "correct the recipe or write the lock again"
    if causes := symptoms.diagnoses(symptoms.read(ROOT), message):
        cure = f"{causes[0].cause}, so {causes[0].fix}"
    return Refusal(f"{what} refused the environment ({' '.join(message.split())[:300]}): {cure}.")


def install(plan: Plan, locked: list[tuple[Artifact, Path]], wheels: list[Wheel], cache: Cache, steps: Steps) -> Path:
    """ROOT/build/TARGET/env with these wheels; an environment that already is exactly this is kept."""
    if plan.on_base:
        return layer(plan, Path(interpreter(plan.target, cache, steps)), locked, wheels, cache, steps)
    final = folder(plan.root, plan.target) / "env"
    if _fault(plan, final, locked, wheels):
        with held(final.parent, steps.wait):
            fault = _fault(plan, final, locked, wheels)
            if fault not in ("", OTHER):
                steps.say("repair", plan.target.name, fault)
            if fault:  # otherwise another run has made it meanwhile
                _make(plan, final, locked, wheels, cache, steps)
            if fault and _fault(plan, final, locked, wheels):
                # uv links to the files that it unpacked once, so a file changed in an environment changed there too.
                remove(cache.root / "uv")
                _make(plan, final, locked, wheels, cache, steps)
    return final


def _fault(plan: Plan, final: Path, locked: list[tuple[Artifact, Path]], wheels: list[Wheel]) -> str:
    """Why an environment is not the one of these wheels, whole: OTHER, or its damage; "" if it is."""
    if not _is_described(final / "fusebox" / "manifest.json", _manifest(plan, wheels)):
        return OTHER
    distributions = [(artifact.name, artifact.version) for artifact, _ in locked]
    distributions += [(wheel.pin.name, wheel.pin.release.metadata_version) for wheel in wheels]
    return damage(python_of(final), site_packages(final, plan.target), distributions)


def _make(
    plan: Plan, final: Path, locked: list[tuple[Artifact, Path]], wheels: list[Wheel], cache: Cache, steps: Steps
) -> None:
    """Make the environment beside its place, and give it its name when it is whole."""
    for left in final.parent.glob(".env.*"):  # left by a killed run; the lock shows that nobody uses it
        shutil.rmtree(left)
    partial = final.with_name(f".env.{os.getpid()}")
    with steps.step("install", f"{plan.target.name}: {len(locked) + len(wheels)} wheels") as step:
        try:
            with disk_named(partial, OTHER_CHECKOUT):
                create(partial, interpreter(plan.target, cache, steps), locked, wheels, cache)
                check(partial, cache)
                describe(partial, plan, wheels)
                if final.exists():
                    final.rename(final.with_name(f".env.{os.getpid()}.old"))
                partial.rename(final)
        finally:
            for left in final.parent.glob(".env.*"):
                shutil.rmtree(left)
        step.note = str(final)


def _is_described(path: Path, manifest: dict[str, Any]) -> bool:
    """Whether an environment's manifest is there, whole, and this one."""
    try:
        return bool(json.loads(path.read_text(encoding="utf-8")) == manifest)
    except (OSError, ValueError):
        return False


def layer(
    plan: Plan, python: Path, locked: list[tuple[Artifact, Path]], wheels: list[Wheel], cache: Cache, steps: Steps
) -> Path:
    """Install onto the Python of a base image that provides packages, and return its prefix.

    What the target replaces is uninstalled first. A dependency that the base has stays the base's; and the base's own
    unmet requirements (`pip check`) are no fault, but one more is.
    """
    prefix = Path(_output_of(python, "import sys; print(sys.prefix)"))
    manifest = prefix / "fusebox" / "manifest.json"
    if _is_described(manifest, _manifest(plan, wheels)):
        return prefix
    base = check_base(plan, python, cache)
    replaced = [wheel.pin.name for wheel in wheels if wheel.pin.name in base]
    image = plan.target.base.runtime.image
    with steps.step("install", f"{plan.target.name}: {len(wheels)} wheels onto {image}"):
        _run_script(prefix, str(python), locked, wheels, cache, replaced="".join(f"{name}\n" for name in replaced))
        if replaced:
            steps.say("replace", ", ".join(f"{name} {base[name]}" for name in replaced), "uninstalled from the base")
        describe(prefix, plan, wheels)
    return prefix


def check_base(plan: Plan, python: Path, cache: Cache) -> dict[str, str]:
    """What that Python has, by distribution; refused where it is not the base that the target is a layer on."""
    base = _distributions(python, cache)
    for pin in plan.provided:
        if base.get(pin.name) != pin.release.metadata_version:
            has, image = base.get(pin.name, "none"), plan.target.base.wheels.image
            raise Refusal(
                f"{pin.label} comes with {image}, and {python} has {has}: build target {plan.target.name} inside that "
                "image."
            )
    return base


def _output_of(python: Path, script: str) -> str:
    command = [str(python), "-I", "-c", script]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _distributions(python: Path, cache: Cache) -> dict[str, str]:
    """Name and version of everything installed for that Python."""
    listed = run_uv(cache, "pip", "list", "--format", "json", "--python", str(python))
    if listed.returncode != 0:
        raise Refusal(f"{python} cannot be read ({listed.stderr.strip()[:200]}): check that it is the base's Python.")
    return {canonicalize_name(entry["name"]): entry["version"] for entry in json.loads(listed.stdout)}


def describe(prefix: Path, plan: Plan, wheels: list[Wheel]) -> None:
    """Describe an environment in files inside it: each wheel's RECORD, and last the manifest."""
    refuse_clashes(wheels)
    (prefix / "fusebox").mkdir(exist_ok=True)
    for wheel in wheels:
        (prefix / "fusebox" / f"{wheel.pin.name}.RECORD").write_bytes(audit.described(wheel.path, "RECORD"))
    write_json(prefix / "fusebox" / "manifest.json", _manifest(plan, wheels))


def module_folder(python: Path, module: str) -> Path:
    """Where that Python would import a package from."""
    script = f"import importlib.util; print(importlib.util.find_spec({module!r}).submodule_search_locations[0])"
    return Path(_output_of(python, script))


def _manifest(plan: Plan, wheels: list[Wheel]) -> dict[str, Any]:
    return {
        "target": plan.target.name,
        "python": plan.target.python,
        "cuda": plan.target.cuda,
        "driver": plan.target.driver,
        "proves_on": plan.target.proves_on,
        "stack": plan.stack,
        "packages": {
            wheel.pin.name: {
                "version": wheel.pin.release.metadata_version,
                "release": wheel.pin.release.version,
                "module": wheel.pin.package.module,
                "kind": wheel.pin.release.kind,
                "wheel": wheel.path.name,
                "sha256": wheel.sha256,
                "record_sha256": hashlib.sha256(audit.described(wheel.path, "RECORD")).hexdigest(),
                "built_with": wheel.record.get("built_with", {}),
                "patches": wheel.record.get("patches", []),
            }
            for wheel in wheels
        },
    }


def refuse_clashes(wheels: Iterable[Wheel]) -> None:
    """Refuse wheels that contain one file with different content: the one installed last would silently win."""
    owners: dict[str, tuple[str, str]] = {}
    for wheel in wheels:
        for path, digest, _ in csv.reader(audit.described(wheel.path, "RECORD").decode().splitlines()):
            name, other = owners.setdefault(path, (wheel.pin.name, digest))
            if other != digest:
                raise Refusal(
                    f"{name} and {wheel.pin.name} both contain {path} and differ: patch both alike, or remove one."
                )
