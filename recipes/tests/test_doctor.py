"""`doctor` says what is in the way on this machine, each thing seen to be found, and what an error text means."""

from __future__ import annotations

import os
import platform
import shutil
import site
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from recipes.catalogue.load import Catalogue
from recipes.catalogue.plan import plan
from recipes.files import ROOT
from recipes.make import costs, machine
from recipes.make.fetch import PipSettings
from recipes.make.machine import Check
from recipes.tests.conftest import Checkout, script

CATALOGUE = Catalogue(ROOT)
SMI = "#!/bin/sh\necho '{driver}, {capability}, NVIDIA H200'\n"


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is first on the PATH, beside the system's and without a driver, an engine or a toolkit."""
    folder, system = tmp_path / "tools", tmp_path / "system"
    folder.mkdir()
    system.mkdir()
    hidden = ("nvidia-smi", "nvidia-ctk", "docker", "podman", "apptainer", "singularity", "enroot", "nvcc")
    for path in (*Path("/bin").iterdir(), *Path("/usr/bin").iterdir()):
        if path.name not in hidden and not (system / path.name).is_symlink():
            (system / path.name).symlink_to(path)
    monkeypatch.setenv("PATH", f"{folder}:{system}")
    monkeypatch.setenv("PYTHONUSERBASE", str(tmp_path / "user"))
    for name in ("CUDA_HOME", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "PYTHONNOUSERSITE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    return folder


def of_target(name: str) -> dict[str, Check]:
    return {check.about: check for check in machine.of_target(plan(CATALOGUE, name), CATALOGUE.limits)}


def of_machine() -> dict[str, Check]:
    return {check.about: check for check in machine.of_machine(ROOT)}


def test_a_machine_that_lacks_nothing_passes(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PipSettings, "read", lambda: PipSettings((), ("/links",)))
    script(tools / "docker", "#!/bin/sh\necho '{\"nvidia\": {}}'\n")
    states = {about: check.state for about, check in {**of_target("cpu"), **of_machine()}.items()}
    assert {about for about, state in states.items() if state != "pass"} <= {"disk"}


@pytest.mark.parametrize(
    ("driver", "capability", "state", "named"),
    [
        ("580.65.06", "9.0", "pass", "580.65.06, NVIDIA H200"),
        ("535.104.05", "9.0", "failure", "535.104.05 is too old for CUDA 13.0: driver 580 or newer"),
        ("580.65.06", "7.0", "warning", "is sm 7.0, and the target is for sm 9.0"),
    ],
)
def test_the_driver_is_compared_with_the_targets_cuda(
    tools: Path, driver: str, capability: str, state: str, named: str
) -> None:
    script(tools / "nvidia-smi", SMI.format(driver=driver, capability=capability))
    check = of_target("cu13.0-torch2.11")["driver"]
    assert (check.state, named in check.finding) == (state, True), check
    assert of_target("cpu")["driver"].state == "pass"


def test_no_driver_is_a_warning_where_cuda_is_compiled(tools: Path) -> None:
    check = of_target("cu12.1-torch2.1")["driver"]
    assert check.state == "warning" and "can only compile" in check.finding


def test_what_nvidia_smi_says_is_explained(tools: Path) -> None:
    output = "Failed to initialize NVML: Driver/library version mismatch"
    script(tools / "nvidia-smi", f"#!/bin/sh\necho '{output}'\nexit 18\n")
    check = of_target("cu12.1-torch2.1")["driver"]
    assert (check.state, check.remedy) == ("failure", "sudo reboot")
    script(tools / "nvidia-smi", "#!/bin/sh\necho nonsense\n")
    assert "nvidia-smi fails (nonsense)" in of_target("cu12.1-torch2.1")["driver"].finding


GCC = "#!/bin/sh\ncase $1 in --version) echo 'Free Software Foundation' ;; *) echo {version} ;; esac\n"


@pytest.mark.parametrize(
    ("target", "version", "state", "remedy"),
    [
        ("cpu", "14.2.0", "pass", ""),
        ("cu12.1-torch2.1", "12.3.0", "pass", ""),
        ("cu12.1-torch2.1", "14.2.0", "warning", "apt-get install g++-12"),
        ("cu11.4-torch2.0", "10.2.1", "pass", ""),
        ("cu11.4-torch2.0", "11.4.0", "warning", "apt-get install g++-10"),
        ("cu11.4-torch2.0", "12.3.0", "warning", "apt-get install g++-10"),
    ],
)
def test_the_compiler_is_compared_with_nvccs_limit(
    tools: Path, target: str, version: str, state: str, remedy: str
) -> None:
    script(tools / "c++", GCC.format(version=version))
    check = of_target(target)["C++ compiler"]
    assert check.state == state and check.remedy.startswith(remedy), check


def test_no_compiler_and_no_toolkit_are_failures_with_what_to_install(tools: Path) -> None:
    (tools.parent / "system" / "c++").unlink()
    checks = of_target("cu12.1-torch2.1")
    assert (checks["C++ compiler"].state, checks["C++ compiler"].remedy) == ("failure", "apt-get install g++")
    assert checks["CUDA toolkit"].state == "failure" and "no nvcc" in checks["CUDA toolkit"].finding
    assert "install the CUDA toolkit" in checks["CUDA toolkit"].remedy


def test_little_memory_an_old_c_library_and_a_small_disk_are_found(
    tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(costs, "memory_limit", lambda: 2**30)
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.17"))
    usage = shutil.disk_usage("/")._replace(free=2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    checks = of_target("cu12.1-torch2.1")
    assert (checks["memory"].state, checks["C library"].state, checks["disk"].state) == (
        "failure", "warning", "warning",
    )  # fmt: skip
    assert "FUSEBOX_CACHE" in checks["disk"].remedy and "cache -- export" in checks["memory"].remedy
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    assert of_target("cpu")["C library"].state == "failure"


def test_containers_are_named_with_what_they_lack(tools: Path) -> None:
    assert of_machine()["containers"].remedy == "apt-get install docker.io"
    script(tools / "docker", "#!/bin/sh\necho 'Cannot connect to the Docker daemon' >&2; exit 1\n")
    assert "Cannot connect" in of_machine()["containers"].finding
    script(tools / "docker", "#!/bin/sh\necho '{\"runc\": {}}'\n")
    assert of_machine()["containers"].state == "pass"
    script(tools / "nvidia-smi", SMI.format(driver="580.1", capability="9.0"))
    assert "nvidia-ctk" in of_machine()["containers"].remedy


def test_what_leaks_in_is_named_with_its_remedy(tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    libraries, user = tmp_path / "cuda" / "lib64", tmp_path / "user" / "lib" / "python3.10" / "site-packages"
    libraries.mkdir(parents=True)
    (libraries / "libcudart.so.11.0").touch()
    (user / "torch-2.1.2.dist-info").mkdir(parents=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/usr/nowhere:{libraries}")
    monkeypatch.setenv("PYTHONPATH", "/opt/other")
    monkeypatch.setattr(site, "getuserbase", lambda: str(tmp_path / "user"))
    checks = of_machine()
    assert checks["LD_LIBRARY_PATH"].remedy == "unset LD_LIBRARY_PATH"
    assert "libcudart.so.11.0" in checks["LD_LIBRARY_PATH"].finding
    assert (checks["PYTHONPATH"].remedy, checks["~/.local"].remedy) == ("unset PYTHONPATH", "export PYTHONNOUSERSITE=1")
    assert "torch" in checks["~/.local"].finding


def test_what_is_right_is_said_too(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thing that is looked at has its row, also where nothing is wrong."""
    monkeypatch.setattr(PipSettings, "read", lambda: PipSettings((), ("/links",)))
    checks = {**of_target("cpu"), **of_machine()}
    expected = {
        "driver", "C++ compiler", "CUDA toolkit", "C library", "memory", "disk", "cores", "containers", "PYTHONPATH",
        "LD_LIBRARY_PATH", "~/.local", "temporary files", "pip", "proxies", "clock",
    }  # fmt: skip
    assert expected <= set(checks)


def test_temporary_files_that_may_not_be_run_are_found(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_NOEXEC))
    assert "noexec" in of_machine()["temporary files"].finding


def test_pips_configuration_and_proxies_are_looked_at(
    tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of an index is printed, since its address may hold a password."""
    config = tmp_path / "pip.conf"
    config.write_text("[global]\nindex-url = http://me:secret@127.0.0.1:9/simple\n[install]\nuser = true\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    checks = of_machine()
    assert checks["pip's index 1"].state == "warning" and "--mirror DIR" in checks["pip's index 1"].remedy
    assert not any("secret" in check.finding + check.remedy for check in checks.values())
    assert checks["pip"].remedy == "python -m pip config unset install.user"
    assert (checks["https_proxy"].state, checks["https_proxy"].remedy) == ("failure", "unset https_proxy")
    config.write_text("[global]\nno-index = true\n")
    assert "neither an index" in of_machine()["pip"].finding
    config.write_text("nonsense")
    assert of_machine()["pip"].state == "failure"


def test_a_clock_that_runs_behind_is_found(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert of_machine()["clock"].state == "failure"


# --- the command


def test_the_table_names_what_mends(checkout: Checkout) -> None:
    checkout.variables |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(checkout.root)}
    shown = checkout.run("doctor", "cpu")
    assert shown.returncode == 0, shown.stderr
    assert "C++ compiler" in shown.stdout and "C library" in shown.stdout
    broken = checkout.run("doctor", "cpu", http_proxy="http://127.0.0.1:9")
    assert broken.returncode == 1 and "-> unset http_proxy" in broken.stdout
    checkout.refuse("doctor", "cpuu", naming=("cpuu", "cpu"))


def test_an_error_text_is_explained_or_said_to_be_unknown(checkout: Checkout, tmp_path: Path) -> None:
    log = tmp_path / "build.log"
    log.write_bytes(b"\xff\nCUDAContextLight.h:7:10: fatal error: cusparse.h: No such file or directory\n")
    shown = checkout.succeed("doctor", "--error", log)
    assert "cause: the CUDA toolkit lacks cusparse.h" in shown and "fix:" in shown and "seen:  https://" in shown
    log.write_text("all went well until\nerror: the flux capacitor is empty\n")
    unknown = checkout.run("doctor", "cpu", "--error", log)
    assert unknown.returncode == 3
    assert "unknown: no row" in unknown.stdout and "flux capacitor" in unknown.stdout and "Report it" in unknown.stdout
    log.write_text("[1/2] c++ -Wno-error -c src/error.cpp -o error.o\nSuccessfully built tiny\n")
    assert "no line of this text looks like an error" in checkout.succeed("doctor", "--error", log)
    checkout.refuse("doctor", "--error", tmp_path / "none", naming=("none cannot be read", "name a file"))
    log.write_text("CUDAContextLight.h:7:10: fatal error: cusparse.h: No such file or directory\n", encoding="utf-16")
    assert "lacks cusparse.h" in checkout.succeed("doctor", "--error", log)
    log.write_text("\n")
    checkout.refuse("doctor", "--error", log, naming=("build.log has no text", "the whole output"))


@pytest.mark.parametrize("words", [["-"], ["--error", "-"], ["cpu", "--error", "-"]])
def test_an_error_text_is_read_from_standard_input(checkout: Checkout, words: list[str]) -> None:
    command = [sys.executable, "-m", "recipes", "doctor", *words]
    text = "Failed to initialize NVML: Driver/library version mismatch"
    done = subprocess.run(
        command, cwd=checkout.root, env={**os.environ, **checkout.variables}, input=text, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "sudo reboot" in done.stdout
