"""The CUDA toolkit that wheels are compiled with: wheels of the lock, or the one of this machine, probed before use.

Where the package index has nvcc, a target pins its toolkit (recipes/lock/TARGET.toolkit.txt). It is then installed into
each build environment beside torch, whose wheels hold the rest of it, and docker/assemble-toolkit.sh makes one folder
of both. Elsewhere nvcc on the PATH names the toolkit, or the base image does.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from packaging.version import Version

from recipes.catalogue import limits
from recipes.catalogue.load import Catalogue
from recipes.catalogue.plan import NVCC, Plan
from recipes.catalogue.schema import Pin, Target
from recipes.errors import Refusal
from recipes.files import ROOT

SCRIPT = "assemble-toolkit.sh"  # of docker/
_SHOWN = 20  # seconds that nvcc may take to say where it lies


def needed_by(plan: Plan, pin: Pin) -> bool:
    """Whether a package is compiled with the target's CUDA toolkit."""
    return plan.target.cuda != "none" and pin.release.kind == "source" and pin.build.compiler != "none"


def pinned_nvcc(plan: Plan) -> str | None:
    """What the target's pinned nvcc says of itself with --version; None where no toolkit is pinned."""
    if plan.toolkit is None:
        return None
    version = next(artifact.version for artifact in plan.toolkit.artifacts if artifact.name == NVCC)
    return f"Cuda compilation tools, release {'.'.join(version.split('.')[:2])}, V{version}"


def state(plan: Plan) -> str:
    """One line about the toolkit that a build on this machine would use; "" if it would use none."""
    try:
        usable = inspect(plan)
    except Refusal as refusal:
        return f"toolkit: a build on this machine would be refused. {refusal}"
    return f"toolkit: {usable}" if usable else ""


def inspect(plan: Plan) -> str:
    """What toolkit a build on this machine would use, "" where it would use none; refused where it would not do."""
    compiled = [pin for pin in plan.pins if needed_by(plan, pin)]
    if not compiled or plan.lock is None:
        return ""
    if plan.toolkit:
        check_compiler(plan)
        wheels = ", ".join(artifact.label for artifact in plan.toolkit.artifacts)
        return f"CUDA {plan.target.toolkit} from {plan.toolkit.path.name}: {wheels}"
    home = of_machine(plan.target)
    with tempfile.TemporaryDirectory() as scratch:
        probe(plan, compiled, home, Path(scratch))
    return f"{home} has what {len(compiled)} packages need"


# --- find it


def folder_in(site: Path, target: Target) -> Path:
    """The folder of a toolkit of wheels in an environment's site-packages."""
    return site / "nvidia" / f"cu{target.cuda.partition('.')[0]}"


def assemble(site: Path, target: Target) -> Path:
    """Make one folder of the toolkit's wheels in an environment (docker/assemble-toolkit.sh), and return it."""
    home = folder_in(site, target)
    subprocess.run([str(ROOT / "docker" / SCRIPT), str(home)], check=True)
    return home


def of_machine(target: Target, variables: Mapping[str, str] = os.environ) -> Path:
    """The folder of the toolkit whose nvcc is on the PATH; refused if there is none or it is of another CUDA.

    nvcc itself says where it lies, since what the PATH names may be a link or a script that runs another one.
    """
    program = shutil.which("nvcc", path=variables.get("PATH"))
    if program is None:
        raise Refusal(
            f"Target {target.name} is compiled with CUDA {target.cuda}, and there is no nvcc on the PATH: install the "
            "CUDA toolkit, or put the folder that contains its nvcc on the PATH."
        )
    nvcc = os.path.realpath(program)
    shown = _output([nvcc, "--dryrun", "probe.cu"], variables)
    top = re.search(r"^#\$ TOP=(.+)$", shown, re.MULTILINE)
    home = Path(os.path.realpath(top[1].strip())) if top else None
    if home is None or not (home / "bin" / "nvcc").exists():
        raise Refusal(
            f"{program} does not say which CUDA toolkit it belongs to (`nvcc --dryrun` names no folder with bin/nvcc): "
            "put the toolkit's own bin folder first on the PATH."
        )
    named = variables.get("CUDA_HOME")
    if named and os.path.realpath(named) != str(home):
        raise Refusal(
            f"CUDA_HOME is {named}, but the first nvcc on the PATH, {program}, belongs to {home}: put {named}/bin "
            f"first on the PATH, or unset CUDA_HOME (env -u CUDA_HOME) to build with {home}."
        )
    release = re.search(r"release (\d+\.\d+)", _output([str(home / "bin" / "nvcc"), "--version"], variables))
    if release is None or Version(release[1]).major != Version(target.cuda).major:
        has = f"CUDA {release[1]}" if release else "of an unknown CUDA version"
        raise Refusal(
            f"The toolkit {home} is {has}, and target {target.name} is compiled with CUDA {target.cuda}: put the bin "
            f"folder of a CUDA {target.cuda.partition('.')[0]} toolkit first on the PATH."
        )
    return home


def _output(command: list[str], variables: Mapping[str, str]) -> str:
    try:
        done = subprocess.run(
            command, env=dict(variables), capture_output=True, text=True, errors="replace", timeout=_SHOWN, check=False
        )
    except subprocess.TimeoutExpired:
        raise Refusal(f"{' '.join(command)} did not finish within {_SHOWN} s: check that it is CUDA's nvcc.") from None
    except OSError as error:
        raise Refusal(f"{command[0]} cannot be run ({error.strerror}): replace it with CUDA's nvcc.") from None
    return done.stdout + done.stderr


# --- check that it has what the packages need


def gcc_of_machine() -> str | None:
    """The version of the g++ that `c++` on the PATH is; None where there is none, or it is another compiler."""
    compiler = shutil.which("c++")
    if compiler is None or "Free Software Foundation" not in _output([compiler, "--version"], os.environ):
        return None
    return _output([compiler, "-dumpfullversion"], os.environ).strip()


def check_compiler(plan: Plan) -> None:
    """Refuse a g++ of this machine that the target's nvcc does not take, as far as limits.toml has a row on it.

    A toolkit of the machine may be a newer one than the target's: the probe asks that one.
    """
    version = gcc_of_machine() if plan.toolkit else None
    if version is None:
        return
    if rule := limits.barred(Catalogue(plan.root).limits, plan.target.cuda, "gcc", version):
        raise Refusal(
            f"This machine's C++ compiler is g++ {version}, and target {plan.target.name} is compiled with CUDA "
            f"{plan.target.cuda} ({rule}): install another g++ and put it first on the PATH as c++."
        )


def probe(plan: Plan, pins: Iterable[Pin], home: Path, scratch: Path) -> None:
    """Compile and link one small file with every header and library that these pins need, for each GPU architecture.

    `home` is the toolkit's folder, `scratch` an empty one. What is missing is refused by name, with the packages that
    need it; so is a host compiler that nvcc does not accept.
    """
    chosen = [*pins, *([plan.torch] if plan.torch else [])]
    headers, libraries = _needs(chosen, "headers"), _needs(chosen, "libraries")
    includes = (
        "".join(
            f"#if __has_include(<{name}>)\n#include <{name}>\n#else\n#error lacks {name}\n#endif\n" for name in headers
        )
        + "__global__ void probe() {}\n"
    )
    errors = _compiled(includes, libraries, plan.target, home, scratch)
    if "#error lacks" in errors:  # then nothing was linked: link now, to name the missing libraries as well
        errors += _compiled("__global__ void probe() {}\n", libraries, plan.target, home, scratch)
    if errors:
        raise _fault(plan, home, errors, headers, libraries)


def _compiled(text: str, libraries: Iterable[str], target: Target, home: Path, scratch: Path) -> str:
    """nvcc's errors if it could not compile and link that text with a main function; otherwise ""."""
    source = scratch / "probe.cu"
    source.write_text(f"{text}int main() {{ probe<<<1, 1>>>(); return 0; }}\n")
    codes = [f"-gencode=arch=compute_{sm},code=sm_{sm}" for sm in (sm.replace(".", "") for sm in target.sm)]
    # Otherwise the linker silently leaves out libraries that nothing in the file calls.
    links = ["-Xlinker", "--no-as-needed", *(f"-l{name}" for name in libraries)]
    command = [str(home / "bin" / "nvcc"), "-std=c++17", *codes, str(source), "-o", str(scratch / "probe"), *links]
    path = f"{home / 'bin'}:{os.environ.get('PATH') or os.defpath}"
    done = subprocess.run(
        command, env={"PATH": path, "TMPDIR": str(scratch), "LC_ALL": "C.UTF-8"}, capture_output=True, text=True,
        errors="replace", check=False,
    )  # fmt: skip
    return (done.stdout + done.stderr).strip() or f"nvcc failed with {done.returncode}" if done.returncode else ""


def _needs(pins: Iterable[Pin], kind: str) -> dict[str, list[str]]:
    """The headers or libraries of packages, each with the packages that need it."""
    needs: dict[str, list[str]] = {}
    for pin in pins:
        for name in getattr(pin.package, kind):
            needs.setdefault(name, []).append(pin.label)
    return needs


def _fault(
    plan: Plan, home: Path, errors: str, headers: Mapping[str, list[str]], libraries: Mapping[str, list[str]]
) -> Refusal:
    """The sentence for nvcc's errors."""
    target = plan.target
    cure = "install the complete toolkit, or put the bin folder of a complete one first on the PATH"
    if plan.toolkit:
        cure = f"add the wheels that contain them to {plan.toolkit.path} (EXTRAS in recipes/make/resolve.py)"
    missing = {name: headers[name] for name in dict.fromkeys(re.findall(r"#error lacks (\S+)", errors))}
    missing |= {f"lib{name}.so": libraries[name] for name in re.findall(r"cannot find -l([\w.-]+)", errors)}
    if missing:
        listed = "; ".join(f"{name} (for {', '.join(labels)})" for name, labels in missing.items())
        return Refusal(f"The CUDA toolkit {home} lacks {listed}: {cure}.")
    if match := re.search(r"unsupported GNU version! (gcc versions later than \d+ are not supported)", errors):
        return Refusal(
            f"The nvcc of {home} does not accept this machine's C++ compiler ({match[1]}): install an older g++ and "
            "put it first on the PATH."
        )
    if match := re.search(r"Unsupported gpu architecture '(compute_\d+)'", errors):
        return Refusal(
            f"The nvcc of {home} cannot compile for {match[1]}, and target {target.name} is for sm "
            f"{', '.join(target.sm)}: pass --sm with architectures that it supports, or choose another toolkit."
        )
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    why = next((line for line in lines if re.search(r"error|fatal|not found", line)), (lines or ["no output"])[-1])
    return Refusal(
        f"The CUDA toolkit {home} cannot compile a file that includes the headers of {target.name}'s packages "
        f"({why[:200].rstrip('.')}): check the toolkit and the C++ compiler."
    )
