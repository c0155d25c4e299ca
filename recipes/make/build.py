"""Pinned sources to wheels: fetch, patch, compile, audit; a wheel built from the same inputs is not built again.

The key of a wheel is the hash of everything that decides its bytes: the patched tree, the recipe's variables, and for
compiled ones torch, CUDA, GPU architectures, Python ABI, compiler and base. Compilation is docker/build-wheel.sh.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import signal
import subprocess
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from recipes.catalogue import limits, symptoms
from recipes.catalogue.load import build_environment
from recipes.catalogue.lock import Artifact, artifact_of
from recipes.catalogue.patch import Patch
from recipes.catalogue.plan import Plan
from recipes.catalogue.schema import Pin, Target
from recipes.errors import Refusal
from recipes.files import digest_of, disk_full, put, remove, sha256_of, write_json
from recipes.make import audit, ccache, environment, toolkit
from recipes.make.cache import Cache
from recipes.make.environment import Wheel
from recipes.make.export import Exported
from recipes.make.fetch import Downloads, unpack
from recipes.make.git import Git
from recipes.make.patch import apply_all, tree_hash
from recipes.make.wheel import extract, repack
from recipes.process import group
from recipes.progress import Step, Steps, size

# The caller's variables that the build script gets; the key of a wheel contains no others.
INHERITED = ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV")


@dataclass(frozen=True)
class Tree:
    """A patched source in the cache."""

    path: Path
    sha256: str
    patches: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class Workshop:
    """Where a package is compiled: `folder` with the environment env, the source in it, and the CUDA toolkit."""

    folder: Path
    source: Path
    toolkit: Path | None


class Builder:
    """Makes all wheels of a plan. `mirror` is a folder to fetch from before the network; `copies` keeps all of it.

    The wheels of `exported` serve instead of compiling.
    """

    def __init__(
        self,
        plan: Plan,
        cache: Cache,
        steps: Steps,
        mirror: Path | None = None,
        *,
        copies: bool = False,
        exported: Exported | None = None,
    ) -> None:
        self.plan, self.cache, self.steps, self.exported = plan, cache, steps, exported
        self.downloads = Downloads(cache, steps, mirror, plan.target)
        self.git = Git(cache, steps, mirror, copies)
        self._probed = False

    def fetch(self) -> dict[str, Path]:
        """Every file of the plan, by sha256; git sources come into the cache's repositories."""
        artifacts = [artifact for pin in self.plan.pins if (artifact := artifact_of(pin))]
        files = self.downloads.all([*artifacts, *self.plan.locked.artifacts, *self._toolkit])
        self.git.fetch_all((pin.label, pin.release) for pin in self.plan.pins if pin.release.repository)
        return files

    @property
    def _toolkit(self) -> tuple[Artifact, ...]:
        """The wheels of the pinned CUDA toolkit that are not of the environment."""
        return self.plan.toolkit.artifacts if self.plan.toolkit else ()

    def trees(self, files: Mapping[str, Path]) -> dict[str, Tree]:
        """Every source, patched, by package."""
        return {pin.name: self._tree(pin, files) for pin in self.plan.pins if pin.release.kind == "source"}

    def wheels(self) -> tuple[list[tuple[Artifact, Path]], list[Wheel]]:
        """The locked dependencies and the wheels of all packages, in build order."""
        if self.plan.on_base:
            python = environment.interpreter(self.plan.target, self.cache, self.steps)
            environment.check_base(self.plan, Path(python), self.cache)
        files = self.fetch()
        locked = [(artifact, files[artifact.sha256]) for artifact in self.plan.locked.artifacts]
        trees = self.trees(files)
        given = {pin.name: self.given(pin, files) for pin in self.plan.pins if pin.release.kind == "wheel"}
        environment.refuse_clashes(given.values())  # before an hour of compiling
        wheels: list[Wheel] = []
        for pin in self.plan.pins:
            if pin.release.kind == "provided":
                continue
            wheel = given.get(pin.name) or self._wheel(pin, trees[pin.name], files, wheels)
            audit.check_metadata(wheel.path, pin, self.plan.target)
            wheels.append(wheel)
        return locked, wheels

    def _tree(self, pin: Pin, files: Mapping[str, Path]) -> Tree:
        patches = self.plan.patches[pin.name]
        key = digest_of(
            [
                pin.release.model_dump(include={"sha256", "commit", "submodules", "without"}),
                [chosen.sha256 for chosen in patches],
            ]
        )
        final = self.cache.root / "trees" / key
        record = self.cache.record(final / "tree.json", "sha256", "patches")
        if record and [tree_hash(path) for path in final.iterdir() if path.is_dir()] != [record["sha256"]]:
            shutil.rmtree(final)  # damaged
            record = None
        if record is None:
            with self.cache.scratch("tree") as scratch:
                made = scratch / key
                made.mkdir()
                source = self._source(pin, files, scratch / "source")
                with self.steps.step("patch", pin.label) as step:
                    apply_all(patches, source)
                    step.note = f"{len(patches)} applied" if patches else "none"
                record = {"source": pin.label, "sha256": tree_hash(source), "patches": _touched(patches, source)}
                write_json(made / "tree.json", record)
                source.rename(made / source.name)
                put(made, final)
        return Tree(next(path for path in final.iterdir() if path.is_dir()), record["sha256"], tuple(record["patches"]))

    def pristine(self, pin: Pin, wanted: Iterable[str], into: Path) -> Path:
        """The unpatched source of a pin; of a wheel, the wanted files."""
        artifact = artifact_of(pin)
        files = {artifact.sha256: self.downloads.file(artifact)} if artifact else {}
        if pin.release.kind != "wheel":
            return self._source(pin, files, into)
        extract(next(iter(files.values())), wanted, into)
        return into

    def _source(self, pin: Pin, files: Mapping[str, Path], into: Path) -> Path:
        into.mkdir()
        if pin.release.sha256:
            return unpack(files[pin.release.sha256], into)
        return self.git.tree(pin.label, pin.release, into / f"{pin.name}-{pin.release.version}")

    def given(self, pin: Pin, files: Mapping[str, Path]) -> Wheel:
        """The wheel of a release of kind wheel: unchanged, or with its patches in it."""
        assert pin.release.sha256
        came, patches = files[pin.release.sha256], self.plan.patches[pin.name]
        if not patches:
            return Wheel(pin, came, pin.release.sha256, {})
        inputs = {"package": pin.label, "wheel": pin.release.sha256, "patches": [chosen.sha256 for chosen in patches]}
        return self._cached(pin, inputs, lambda: self._repack(pin, came, inputs))

    def _cached(self, pin: Pin, inputs: dict[str, Any], make: Callable[[], None]) -> Wheel:
        """The cache's wheel for these inputs; it is built if the cache lacks it."""
        cached = self.cache.wheel(digest_of(inputs))
        if cached is None:
            make()
            cached = self.cache.wheel(digest_of(inputs))
        assert cached is not None
        path, record = cached
        return Wheel(pin, path, record["sha256"], record)

    def _repack(self, pin: Pin, came: Path, inputs: dict[str, Any]) -> None:
        patches = self.plan.patches[pin.name]
        with self.cache.scratch("repack") as scratch, self.steps.step("patch", pin.label) as step:
            (scratch / "made").mkdir()
            final = scratch / "made" / came.name
            touched = patched_wheel(came, patches, final, scratch / f"{pin.name}-{pin.release.version}")
            record = {
                "file": came.name,
                "sha256": sha256_of(final),
                "inputs": inputs,
                "patches": [installed(patch, final) for patch in touched],
            }
            write_json(final.with_name("wheel.json"), record)
            put(final.parent, self.cache.root / "wheels" / digest_of(inputs))
            step.note = f"{len(patches)} applied, repacked"

    def _wheel(self, pin: Pin, tree: Tree, files: Mapping[str, Path], before: list[Wheel]) -> Wheel:
        base = f"bare, {' '.join(platform.libc_ver())}"
        try:
            compiler = self._compiler(pin) if pin.build.compiler != "none" else "none"
        except Refusal:  # without a compiler here, a wheel that was compiled elsewhere can still serve
            if wheel := self.exported_wheel(pin, self.inputs(pin, tree, "none here", base)):
                return wheel
            raise
        inputs = self.inputs(pin, tree, compiler, base)
        wheel = self.exported_wheel(pin, inputs)
        return wheel or self._cached(pin, inputs, lambda: self._build(pin, tree, inputs, files, before))

    def exported_wheel(self, pin: Pin, inputs: Mapping[str, Any]) -> Wheel | None:
        """The exported wheel that serves for these inputs, if any does."""
        serving = self.exported.serving(pin.label, inputs) if self.exported else None
        if serving is None:
            return None
        folder, record = serving
        self.steps.say("cached", pin.label, f"{folder.name[:12]}, {record['inputs'].get('base', 'any base')}")
        return Wheel(pin, folder / record["file"], record["sha256"], record)

    def inputs(self, pin: Pin, tree: Tree, compiler: str, base: str) -> dict[str, Any]:
        """What decides the bytes of a wheel built by that compiler on that base; its hash is the wheel's key."""
        target, torch = self.plan.target, self.plan.torch
        patched = [chosen.sha256 for chosen in self.plan.patches["torch"]] if torch else []
        inputs: dict[str, Any] = {
            "package": pin.label,
            "tree": tree.sha256,
            "env": build_environment(pin, target),
            "script": sha256_of(self._script),
            "python": f"cp{target.python.replace('.', '')}-{sysconfig.get_platform()}",
            "beside": self._beside(pin),
        }
        inputs |= {key: value for key, value in _settings(pin).items() if value}
        if pin.build.compiler != "none":
            inputs |= {
                "torch": torch.release.identity if torch else None,
                **({"torch_patches": patched} if patched else {}),
                "cuda": target.cuda,
                "sm": pin.architectures(target),
                "compiler": compiler,
                "base": base,
            }
        if self.plan.toolkit and toolkit.needed_by(self.plan, pin):
            inputs["toolkit"] = {artifact.name: artifact.sha256 for artifact in self._toolkit}
            inputs["toolkit"]["script"] = sha256_of(self.plan.root / "docker" / toolkit.SCRIPT)
        return inputs

    def _beside(self, pin: Pin) -> dict[str, Any]:
        """What a build imports or compiles against, by what decides its bytes: of the lock, and of the target's own.

        Not what those require in turn: a lock written anew would compile everything again.
        """
        imported = {canonicalize_name(Requirement(each).name) for each in pin.build.requires}
        against = "nvidia-" if pin.build.compiler != "none" else None  # these wheels hold headers and libraries
        beside: dict[str, Any] = {
            each.name: each.sha256
            for each in self.plan.locked.artifacts
            if each.name in imported or (against and each.name.startswith(against))
        }
        for each in self.plan.pins:
            if each.name in pin.build.needs and each.name != "torch":
                beside[each.name] = [each.release.identity, [patch.sha256 for patch in self.plan.patches[each.name]]]
        return beside

    @property
    def _script(self) -> Path:
        return self.plan.root / "docker" / "build-wheel.sh"

    def _compiler(self, pin: Pin) -> str:
        """The versions of a package's compilers, as the compilers report them."""
        if (compiler := shutil.which("c++")) is None:
            raise Refusal(
                f"{pin.label} is compiled and there is no c++ on the PATH: install one (Debian, "
                "Ubuntu: apt-get install g++)."
            )
        compilers = [_version_of(compiler)]
        if pin.build.compiler == "nvcc":
            compilers.append(
                toolkit.pinned_nvcc(self.plan) or _version_of(str(self._machines_toolkit / "bin" / "nvcc"))
            )
        return "; ".join(compilers)

    @cached_property
    def _machines_toolkit(self) -> Path:
        """The CUDA toolkit of this machine, where the target pins none."""
        return toolkit.of_machine(self.plan.target)

    def _toolkit_beside(self, pin: Pin, path: Path) -> Path | None:
        """The CUDA toolkit that a package is compiled with in that environment; the first time, it is probed."""
        if not toolkit.needed_by(self.plan, pin):
            return None
        if self.plan.toolkit:
            home = toolkit.assemble(environment.site_packages(path, self.plan.target), self.plan.target)
        else:
            home = self._machines_toolkit
        if not self._probed:
            compiled = [pin for pin in self.plan.pins if toolkit.needed_by(self.plan, pin)]
            with (
                self.steps.step("probe", f"the CUDA toolkit for {len(compiled)} packages"),
                self.cache.scratch("probe") as at,
            ):
                toolkit.probe(self.plan, compiled, home, at)
            self._probed = True
        return home

    @contextmanager
    def _workshop(self, pin: Pin, tree: Tree, files: Mapping[str, Path], before: list[Wheel]) -> Iterator[Workshop]:
        """A scratch folder with the build's environment (env), and in it a copy of the patched source."""
        wheels = list(self.plan.locked.artifacts)
        if toolkit.needed_by(self.plan, pin):
            toolkit.check_compiler(self.plan)
            wheels += self._toolkit
        locked = [(artifact, files[artifact.sha256]) for artifact in wheels]
        with self.cache.scratch("build") as scratch:
            interpreter = environment.interpreter(self.plan.target, self.cache, self.steps)
            with self.steps.step("prepare", f"{pin.label}: its build environment"):
                on_base = self.plan.on_base
                environment.create(scratch / "env", interpreter, locked, before, self.cache, over_base=on_base)
            self._refuse_missing_headers(pin, environment.python_of(scratch / "env"))
            home = self._toolkit_beside(pin, scratch / "env")
            source = scratch / tree.path.name
            shutil.copytree(tree.path, source, symlinks=True)
            yield Workshop(scratch, source, home)

    def _compile(self, pin: Pin, place: Workshop, step: Step) -> tuple[Path, dict[str, object]]:
        """The wheel that the build script makes from a source, and what building it cost."""
        made, settings = place.folder / "made", place.folder / "settings"
        write_settings(pin, self.plan.target, settings, self._through_ccache(pin, place))
        cost = self._run(pin, [str(self._script), str(settings), str(place.source), str(made)], place, step)
        wheel = self._only_wheel(pin, made)
        step.note = size(wheel.stat().st_size)
        return wheel, cost

    def _through_ccache(self, pin: Pin, place: Workshop) -> dict[str, str]:
        """The variables with which a package compiles through ccache; none where that is not asked for."""
        chosen = ccache.program() if pin.build.compiler != "none" else None
        links = place.folder / "compilers"
        remove(links)  # left by another wheel of the same tree
        return ccache.settings(chosen, self.plan.root, links) if chosen else {}

    def _build(
        self, pin: Pin, tree: Tree, inputs: dict[str, Any], files: Mapping[str, Path], before: list[Wheel]
    ) -> None:
        with self._workshop(pin, tree, files, before) as place:
            scratch = place.folder
            python = environment.python_of(scratch / "env")
            with self.steps.step("build", pin.label) as step:
                wheel, cost = self._compile(pin, place, step)
            torch = environment.module_folder(python, "torch") if self.plan.torch else scratch / "torch"
            record = {
                "file": wheel.name,
                "sha256": sha256_of(wheel),
                "inputs": inputs,
                "audit": audit.audit(wheel, pin, self.plan.target, torch.parent, platform.libc_ver()[1]),
                "patches": [installed(patch, wheel) for patch in tree.patches],
                "built_with": {
                    "python": self._version(python),
                    "compiler": inputs.get("compiler", "none"),
                    "where": inputs.get("base", "any"),
                    **({"sm": pin.architectures(self.plan.target)} if pin.build.compiler == "nvcc" else {}),
                    **cost,
                },
            }
            write_json(wheel.with_name("wheel.json"), record)
            shutil.copyfile(scratch / "build.log", wheel.with_name("build.log"))
            put(wheel.parent, self.cache.root / "wheels" / digest_of(inputs))

    def changed(self, pin: Pin, changes: Iterable[tuple[str, str, str]]) -> Iterator[Path]:
        """A wheel of a package per change (file, text in it, other text) of its patched source.

        One after another in the same tree, where only what changed is compiled again; each wheel is gone with the next.
        """
        _, wheels = self.wheels()
        files = self.fetch()
        before = wheels[: [wheel.pin.name for wheel in wheels].index(pin.name)]
        with self._workshop(pin, self.trees(files)[pin.name], files, before) as place:
            for file, old, new in changes:
                path = place.source / file
                text = path.read_text(encoding="utf-8") if path.is_file() else ""
                if text.count(old) != 1:
                    raise Refusal(
                        f"{pin.label}: {file} has {old!r} {text.count(old)} times: name text that occurs once."
                    )
                path.write_text(text.replace(old, new), encoding="utf-8")
                with self.steps.step("build", f"{pin.label}: {new}") as step:
                    wheel, _ = self._compile(pin, place, step)
                yield wheel
                path.write_text(text, encoding="utf-8")
                shutil.rmtree(wheel.parent)

    def _version(self, python: Path) -> str:
        return subprocess.run([str(python), "--version"], capture_output=True, text=True, check=True).stdout.split()[1]

    def _refuse_missing_headers(self, pin: Pin, python: Path) -> None:
        if pin.build.compiler == "none":
            return
        asked = "import sysconfig; print(sysconfig.get_path('include'))"
        include = subprocess.run([str(python), "-c", asked], capture_output=True, text=True, check=True).stdout.strip()
        if not Path(include, "Python.h").exists():
            version = self.plan.target.python
            raise Refusal(
                f"{pin.label} is compiled and {include}/Python.h is missing: install Python's headers "
                f"(Debian, Ubuntu: python{version}-dev)."
            )

    def _run(self, pin: Pin, command: list[str], place: Workshop, step: Step) -> dict[str, object]:
        """Run the build script; every line goes to build.log, and the display shows the last one."""
        scratch = place.folder
        variables = {
            key: value for key, value in environment.clean_variables(scratch / "env").items() if key in INHERITED
        }
        variables |= {"CUDA_HOME": str(place.toolkit)} if place.toolkit else {}
        if (scratch / "compilers").is_dir():  # made for ccache
            variables["PATH"] = f"{scratch / 'compilers'}:{variables['PATH']}"
        log, tail = scratch / "build.log", list[str]()
        with log.open("w", encoding="utf-8") as file, group(command, scratch, variables) as process:
            assert process.stdout
            for line in process.stdout:
                file.write(line)
                step.show(line)
                tail = [*tail[-200:], line]
                if re.search(r"\s-m(arch|cpu|tune)=native\b", line):
                    raise Refusal(
                        f"{pin.label} compiles with -march=native, which ties the wheel to this machine's "
                        "CPU: turn it off by a setting or a patch."
                    )
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0:
            raise self._failure(pin, log, tail, process.returncode)
        return {
            "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1),
            "peak_mib_per_process": usage.ru_maxrss // 1024,
            **longest_step(scratch),
            "jobs": int((scratch / "jobs").read_text()),
        }

    def _failure(self, pin: Pin, log: Path, tail: list[str], code: int) -> Refusal:
        copy = environment.folder(self.plan.root, self.plan.target) / f"{pin.name}.build.log"
        if "No space left on device" in "".join(tail):
            return disk_full(log)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(log, copy)
        text = log.read_text(encoding="utf-8") + ("\nKilled" if code == 128 + signal.SIGKILL else "")
        facts = limits.facts(self.plan.target, self.plan.lock, {})
        if causes := symptoms.diagnoses(symptoms.read(self.plan.root), text, facts, pin.name):
            others = f"; `nox -s doctor -- --error {copy}` names other causes" if len(causes) > 1 else ""
            return Refusal(
                f"{pin.label} did not build, since {causes[0].cause}: {causes[0].fix}; log in {copy}{others}."
            )
        lines = [*symptoms.errors(tail), *(line.strip() for line in tail if line.strip()), "no output"]
        return Refusal(
            f"{pin.label} did not build ({lines[0][:200]}), and no known cause explains it: read {copy}, and report it "
            "with that file."
        )

    def _only_wheel(self, pin: Pin, made: Path) -> Path:
        wheels = list(made.glob("*.whl"))
        if len(wheels) != 1:
            raise Refusal(
                f"{pin.label}: the build left {len(wheels)} wheels, and one was expected: see docker/build-wheel.sh."
            )
        return wheels[0]


def _version_of(compiler: str) -> str:
    """The lines with a version in what a compiler prints about itself."""
    text = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    return " ".join(line for line in text.splitlines() if re.search(r"\d+\.\d+", line))


def longest_step(scratch: Path) -> dict[str, float]:
    """The seconds of the longest step that ninja took; its log has a line per step, begun and ended in milliseconds."""
    lines = [line for log in scratch.rglob(".ninja_log") for line in log.read_text().splitlines() if line[:1] != "#"]
    times = [(int(end) - int(begun)) / 1e3 for begun, end, *_ in (line.split("\t") for line in lines)]
    return {"longest_seconds": round(max(times), 1)} if times else {}


def write_settings(pin: Pin, target: Target, into: Path, beside: Mapping[str, str] | None = None) -> None:
    """Write the settings of a package that docker/build-wheel.sh reads: the names of its header.

    `beside` are variables that decide no byte of the wheel.
    """
    into.mkdir(parents=True, exist_ok=True)
    variables = {**build_environment(pin, target), **(beside or {})}
    (into / "build.env").write_text("".join(f"{key}={value}\n" for key, value in variables.items()))
    (into / "options").write_text("".join(f"{option}\n" for option in pin.build.options))
    (into / "subfolder").write_text(pin.release.subfolder or ".")
    (into / "mib_per_job").write_text(f"{pin.build.mib_per_job}\n")
    (into / "parallel_extensions").write_text(pin.release.parallel_extensions or "")


def _settings(pin: Pin) -> dict[str, Any]:
    """What decides a build beside its environment: the part of the tree, and the arguments of setup.py."""
    return {"subfolder": pin.release.subfolder, "options": pin.build.options}


def patched_wheel(came: Path, patches: list[Patch], final: Path, tree: Path) -> list[dict[str, Any]]:
    """Write a wheel with its patches in it as `final`; `tree` is a new folder for the files that they touch."""
    files = sorted({file for chosen in patches for file in chosen.files})
    tree.mkdir()
    extract(came, files, tree)
    apply_all(patches, tree)
    repack(came, tree, files, final)
    return _touched(patches, tree)


def _touched(patches: list[Patch], tree: Path) -> list[dict[str, Any]]:
    """The patches' records, with the files that each changed, by their hash in the patched tree."""
    return [
        {
            "file": chosen.name,
            "sha256": chosen.sha256,
            "touched": {file: sha256_of(tree / file) for file in chosen.files},
        }
        for chosen in patches
    ]


def installed(patch: Mapping[str, Any], wheel: Path) -> dict[str, Any]:
    """A patch's record, with the files that it changed and the wheel installs, by their hash."""
    installed = {}
    with audit.opened(wheel) as archive:
        for file, sha256 in patch["touched"].items():
            for name in archive.namelist():
                same_place = f"/{file}".endswith(f"/{name}")
                if same_place and hashlib.sha256(archive.read(name)).hexdigest() == sha256:
                    installed[name] = sha256
    return {"file": patch["file"], "sha256": patch["sha256"], "installed": installed}
