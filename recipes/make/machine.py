"""Checks of this machine: what it has for building and running targets, and what it lacks."""

from __future__ import annotations

import os
import platform
import re
import shutil
import site
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from packaging.version import Version

from recipes.catalogue import limits, symptoms
from recipes.catalogue.plan import Plan
from recipes.catalogue.schema import Limit, Pin, Target, is_version
from recipes.errors import Refusal
from recipes.make import costs, toolkit
from recipes.make.cache import default_cache
from recipes.make.fetch import PipSettings
from recipes.progress import size

ANSWER = 10  # seconds that a program or a server may take to answer
LIBRARY = re.compile(r"lib(cuda|cudart|cublas\w*|cudnn\w*|cusparse|nvJitLink|nccl|stdc\+\+)\.so")  # torch has its own
NEWEST_GCC = 20  # the newest that a remedy may name


@dataclass(frozen=True)
class Check:
    """One check: the finding, and the command or step that fixes a problem."""

    about: str
    state: Literal["pass", "warning", "failure"]
    finding: str
    remedy: str = ""


def of_target(plan: Plan, rows: list[Limit]) -> Iterator[Check]:
    """What decides whether a target can be built and run here; `rows` are those of limits.toml."""
    yield _driver(plan, rows)
    yield _compiler(plan, rows)
    yield _toolkit(plan)
    yield _c_library(plan.target)
    yield _memory(plan)
    yield _disk(plan)


def of_machine(root: Path) -> Iterator[Check]:
    """What is the same for all targets; `root` is the checkout."""
    yield Check("cores", "pass", f"{len(os.sched_getaffinity(0))}, with {size(costs.memory_limit())} of memory")
    yield _engine()
    yield from _variables()
    yield _user_site()
    yield _temporary()
    yield from _pip()
    yield from _proxies()
    yield _clock(root)


# --- the GPU and its driver


def _driver(plan: Plan, rows: list[Limit]) -> Check:
    """NVIDIA's driver against what the target's CUDA needs, and the first GPU against what it is compiled for."""
    target = plan.target
    if target.cuda == "none":
        return Check("driver", "pass", "none is needed")
    needed = f"driver {target.driver} or newer" if target.driver else "a driver"
    if shutil.which("nvidia-smi") is None:
        finding = f"none, and {needed} is needed to run: this machine can only compile"
        return Check(
            "driver", "warning", finding, "take the environment to a machine with a GPU (docs/use/elsewhere.md)"
        )
    done = _asked("nvidia-smi", "--query-gpu=driver_version,compute_cap,name", "--format=csv,noheader")
    first = [cell.strip() for cell in done.stdout.partition("\n")[0].split(",")]
    if done.returncode != 0 or len(first) != 3 or not is_version(first[0]):
        return _diagnosed("driver", "nvidia-smi fails", done.stdout + done.stderr, plan.root)
    version, capability, name = first
    is_old = target.driver is not None and Version(version) < Version(target.driver)
    if is_old or limits.barred(rows, target.cuda, "driver", version):
        remedy = f"apt-get install nvidia-driver-{(target.driver or '580').partition('.')[0]}, and reboot"
        return Check("driver", "failure", f"{version} is too old for CUDA {target.cuda}: {needed} is needed", remedy)
    if capability not in target.sm:
        finding = f"{version}; {name} is sm {capability}, and the target is for sm {', '.join(target.sm)}"
        return Check("driver", "warning", finding, f"pass --sm {capability}")
    return Check("driver", "pass", f"{version}, {name}")


def _diagnosed(about: str, what: str, output: str, root: Path) -> Check:
    """A failure whose cause is read from what a program printed."""
    if causes := symptoms.diagnoses(symptoms.read(root), output):
        return Check(about, "failure", f"{what}: {causes[0].cause}", causes[0].fix)
    return Check(about, "failure", f"{what} ({_first_line(output)})", "repair it, and run this again")


def _refused(about: str, refusal: Refusal) -> Check:
    """A failure made from a build's refusal: what is wrong, then what to do."""
    finding, _, remedy = str(refusal).rstrip(".").rpartition(": ")
    return Check(about, "failure", finding, remedy)


# --- what compiles


def _compiled(plan: Plan) -> list[Pin]:
    """The packages for which a compiler runs."""
    return [pin for pin in plan.pins if pin.release.kind == "source" and pin.build.compiler != "none"]


def _compiler(plan: Plan, rows: list[Limit]) -> Check:
    """The C++ compiler, and whether the target's nvcc accepts it."""
    compiler, version = shutil.which("c++"), toolkit.gcc_of_machine()
    if not _compiled(plan):
        return Check("C++ compiler", "pass", "none is needed")
    if compiler is None:
        return Check("C++ compiler", "failure", "there is no c++ on the PATH", "apt-get install g++")
    if version is None:
        return Check("C++ compiler", "warning", f"{compiler} is not g++, for which nvcc's limits are known")
    if rule := limits.barred(rows, plan.target.cuda, "gcc", version):
        taken = [major for major in range(NEWEST_GCC) if not limits.barred(rows, plan.target.cuda, "gcc", f"{major}.1")]
        remedy = f"apt-get install g++-{max(taken)}, and put it first on the PATH as c++"
        # This machine's toolkit may be newer than the target's, so its probe decides.
        return Check("C++ compiler", "failure" if plan.toolkit else "warning", f"g++ {version}: {rule}", remedy)
    return Check("C++ compiler", "pass", f"g++ {version}")


def _toolkit(plan: Plan) -> Check:
    """The CUDA toolkit, by the probe that a build begins with."""
    try:
        return Check("CUDA toolkit", "pass", toolkit.inspect(plan) or "none is needed")
    except Refusal as refusal:
        return _refused("CUDA toolkit", refusal)


def _c_library(target: Target) -> Check:
    """The C library against the newest that wheels of the target's lock may ask for; most ask for an older one."""
    name, version = platform.libc_ver()
    if name != "glibc":
        return Check("C library", "failure", "is not glibc, which all wheels need", "use Debian, Ubuntu or RHEL")
    if Version(version) < Version(target.glibc):
        finding = f"glibc {version}, and wheels of the target's lock may need up to {target.glibc}"
        return Check("C library", "warning", finding, f'nox -s "image({target.name})", which brings its own')
    return Check("C library", "pass", f"glibc {version}")


# --- room


def _memory(plan: Plan) -> Check:
    """Whether one compile job of each package fits into the memory."""
    most = max(_compiled(plan), key=lambda pin: pin.build.mib_per_job, default=None)
    if most is None:
        return Check("memory", "pass", "nothing is compiled")
    needed, limit = most.build.mib_per_job * 2**20, costs.memory_limit()
    if limit < needed:
        finding = f"{most.name} takes {size(needed)} per compile job, and there is {size(limit)}"
        remedy = "compile on a larger machine, and bring its wheels: nox -s cache -- export DIR"
        return Check("memory", "failure", finding, remedy)
    return Check("memory", "pass", f"{size(needed)} per compile job of {most.name}: {costs.jobs(most)} at a time")


def _disk(plan: Plan) -> Check:
    """Whether the disk of the cache has room for a cold build."""
    try:
        root = default_cache()
    except Refusal as refusal:
        return _refused("disk", refusal)
    place = next(parent for parent in [root, *root.parents] if parent.exists())
    free, (_, needed) = shutil.disk_usage(place).free, costs.disk(plan)
    if free < needed:
        finding = f"{size(free)} free for the cache, and a cold build takes {size(needed)}"
        return Check("disk", "warning", finding, "export FUSEBOX_CACHE=FOLDER, on a larger disk")
    return Check("disk", "pass", f"{size(free)} free for the cache, and a cold build takes {size(needed)}")


# --- what runs images


def _engine() -> Check:
    """The container engines, and whether Docker can give a container the GPU."""
    engines = [name for name in ("docker", "podman", "apptainer", "singularity", "enroot") if shutil.which(name)]
    if not engines:
        return Check("containers", "warning", "no engine to build or run images with", "apt-get install docker.io")
    if "docker" in engines:
        done = _asked("docker", "info", "--format", "{{json .Runtimes}}")
        if done.returncode != 0:
            finding = f"docker does not answer ({_first_line(done.stderr)})"
            return Check("containers", "warning", finding, "sudo systemctl start docker")
        if shutil.which("nvidia-smi") and "nvidia" not in done.stdout and not shutil.which("nvidia-ctk"):
            remedy = "apt-get install nvidia-container-toolkit && sudo nvidia-ctk runtime configure --runtime=docker"
            return Check("containers", "warning", "docker, without NVIDIA's container toolkit", remedy)
    return Check("containers", "pass", ", ".join(engines))


# --- what leaks in


def _variables() -> Iterator[Check]:
    """Variables that change what a Python or a loader finds."""
    for name in ("PYTHONPATH", "PYTHONHOME", "LD_PRELOAD"):
        if value := os.environ.get(name):
            finding = f"is set to {value[:80]}, which gets into an activated environment"
            yield Check(name, "warning", finding, f"unset {name}")
        elif name == "PYTHONPATH":
            yield Check(name, "pass", "is not set")
    leaks = []
    for folder in filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":")):
        names = [entry.name for entry in Path(folder).iterdir()] if Path(folder).is_dir() else []
        if libraries := sorted(filter(LIBRARY.match, names)):
            finding = f"{folder} has {', '.join(libraries[:3])}, which hide those of torch's wheels"
            leaks.append(Check("LD_LIBRARY_PATH", "warning", finding, "unset LD_LIBRARY_PATH"))
    yield from leaks or [Check("LD_LIBRARY_PATH", "pass", "has none of the libraries of torch's wheels")]


def _user_site() -> Check:
    """Packages in ~/.local, which a Python outside a virtual environment sees, such as that of a base image."""
    places = Path(site.getuserbase()).glob("lib/python3.*/site-packages/*.dist-info")
    packages = sorted({info.name.partition("-")[0] for info in places})
    if packages and not os.environ.get("PYTHONNOUSERSITE"):
        finding = f"has {len(packages)} packages ({', '.join(packages[:3])}), seen in containers that mount your home"
        return Check("~/.local", "warning", finding, "export PYTHONNOUSERSITE=1")
    return Check("~/.local", "pass", "no packages that leak in")


def _temporary() -> Check:
    """The folder for temporary files, in which what was compiled at run time is loaded."""
    folder = tempfile.gettempdir()
    if os.statvfs(folder).f_flag & os.ST_NOEXEC:
        finding = f"{folder} is mounted noexec, so that nothing compiled there can be loaded"
        return Check("temporary files", "warning", finding, "export TMPDIR=FOLDER, on another file system")
    return Check("temporary files", "pass", f"{folder} takes programs")


# --- what fetches


def _pip() -> Iterator[Check]:
    """pip's configuration, and whether its indexes answer; they may hold a password and are not printed."""
    try:
        settings = PipSettings.read()
    except Refusal as refusal:
        yield _refused("pip", refusal)
        return
    listed = _asked(sys.executable, "-m", "pip", "config", "list").stdout
    for setting in re.finditer(r"^(\w+)\.(user|target|prefix)='(?!false|no|0)", listed, re.MULTILINE):
        finding = f"its configuration sets {setting[1]}.{setting[2]}, which changes where packages go"
        yield Check("pip", "warning", finding, f"python -m pip config unset {setting[1]}.{setting[2]}")
        break
    else:
        yield Check("pip", "pass", "its configuration leaves packages where they belong")
    if not settings.indexes and not settings.find_links:
        remedy = "python -m pip config unset global.no-index, or pass --mirror DIR"
        yield Check("pip", "failure", "neither an index nor find-links is configured", remedy)
    for number, index in enumerate(settings.indexes, 1):
        about, fault = f"pip's index {number}", _unreachable(index, settings.timeout)
        remedy = "check the network and `python -m pip config list`, or pass --mirror DIR"
        finding = f"does not answer ({fault})" if fault else "answers"
        yield Check(about, "warning" if fault else "pass", finding, remedy)


def _unreachable(url: str, seconds: float) -> str:
    """Why an address does not answer, or ""; an answer that refuses is one."""
    if not url.startswith(("http://", "https://")):
        return ""
    try:
        urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=min(seconds, ANSWER)).close()
    except urllib.error.HTTPError:
        return ""
    except (OSError, ValueError) as error:
        return str(getattr(error, "reason", error)).replace(urlsplit(url).netloc, "its host")
    return ""


def _proxies() -> Iterator[Check]:
    """Proxies that are set, and whether they answer."""
    names = ("http_proxy", "https_proxy", "all_proxy")
    if not any(os.environ.get(key) for name in names for key in (name, name.upper())):
        yield Check("proxies", "pass", "none is set")
    for name in names:
        values = {key: text for key in (name, name.upper()) if (text := os.environ.get(key))}
        if len(set(values.values())) > 1:
            yield Check(name, "warning", f"{name} and {name.upper()} differ", f"unset {name.upper()}")
        for key, value in values.items():
            parts = urlsplit(value if "://" in value else f"http://{value}")
            try:
                socket.create_connection((parts.hostname or "", parts.port or 80), ANSWER).close()
            except (OSError, ValueError) as error:
                yield Check(key, "failure", f"names a proxy that does not answer ({error})", f"unset {key}")
            else:
                yield Check(key, "pass", "names a proxy that answers")


def _clock(root: Path) -> Check:
    """A clock that runs behind makes builds compile everything again, and certificates invalid."""
    if time.time() < (root / "recipes" / "targets.toml").stat().st_mtime - 60:
        return Check("clock", "failure", "is behind the files of the checkout", "sudo timedatectl set-ntp true")
    return Check("clock", "pass", "is not behind the checkout")


# --- asking


def _asked(*command: str) -> subprocess.CompletedProcess[str]:
    """The output of a program; a program that does not answer in time has failed."""
    try:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=ANSWER,
            check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, "", str(error))


def _first_line(text: str) -> str:
    """The first line of a program's output that is not empty, shortened."""
    return next((line.strip()[:120] for line in text.splitlines() if line.strip()), "no output")
