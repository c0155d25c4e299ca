"""The linters find what they are there for: a fault planted in our own workflows and Dockerfiles."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.catalogue.bases import bases
from recipes.catalogue.load import Catalogue
from recipes.files import ROOT

CPU, CHECK, IMAGE = "docker/cpu.Dockerfile", ".github/workflows/check.yml", ".github/workflows/image.yml"
IMAGES, OUTDATED, WHEELS = (f".github/workflows/{name}.yml" for name in ("images", "outdated", "wheels"))
HADOLINT, ZIZMOR = ("hadolint", "--no-color"), ("zizmor", "--offline", "--no-progress", "--persona=auditor")
CHECKOUT = "actions/checkout@3d3c42e5aac5ba805825da76410c181273ba90b1"
APT_LISTS = "--mount=type=tmpfs,target=/var/lib/apt/lists "

# (the linter, the file, a text in it, the text's replacement, the rule that must report it)
FAULTS = {
    "action-by-tag": (ZIZMOR, CHECK, CHECKOUT, "actions/checkout@v7", "unpinned-uses"),
    "template-injection": (
        ZIZMOR,
        IMAGE,
        '"promote($TARGET)"',
        '"promote(${{ inputs.target }})"',
        "template-injection",
    ),
    "credentials-stay": (ZIZMOR, IMAGE, "persist-credentials: false", "persist-credentials: true", "artipacked"),
    "token-may-all": (ZIZMOR, CHECK, "permissions: {}", "permissions: write-all", "excessive-permissions"),
    "token-of-all-jobs-may-write": (
        ZIZMOR,
        OUTDATED,
        "permissions: {}",
        "permissions: write-all",
        "excessive-permissions",
    ),
    "token-that-signs-in-every-job": (
        ZIZMOR,
        WHEELS,
        "permissions: {}",
        "permissions: { id-token: write }",
        "excessive-permissions",
    ),
    "name-from-the-matrix": (ZIZMOR, WHEELS, '"build($TARGET)"', '"build(${{ matrix.target }})"', "template-injection"),
    "name-from-upstream": (
        ZIZMOR,
        OUTDATED,
        'outdated -- "${targets[@]}"',
        "${{ matrix.version }}",
        "template-injection",
    ),
    "others-code-with-our-token": (ZIZMOR, CHECK, "pull_request:", "pull_request_target:", "dangerous-triggers"),
    "base-without-tag": (HADOLINT, CPU, "FROM python:3.12-slim-bookworm@sha256", "FROM python AS base #", "DL3006"),
    "apt-lists-stay": (HADOLINT, CPU, APT_LISTS, "", "DL3009"),
    "runs-as-root": (HADOLINT, CPU, "USER 10001:10001", "USER 0:0", "DL3002"),
    "secret-in-the-image": (HADOLINT, CPU, "WORKDIR /tmp", "ENV GITHUB_TOKEN=1", "DL3064"),
}


def lint(linter: tuple[str, ...], path: Path) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name(linter[0])
    return subprocess.run([str(program), *linter[1:], str(path)], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("linter", "file", "text", "fault", "rule"), FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_found(
    tmp_path: Path, linter: tuple[str, ...], file: str, text: str, fault: str, rule: str
) -> None:
    planted, declared = tmp_path / file, (ROOT / file).read_text()
    assert text in declared
    planted.parent.mkdir(parents=True)
    planted.write_text(declared)
    assert lint(linter, planted).returncode == 0
    planted.write_text(declared.replace(text, fault, 1))
    done = lint(linter, planted)
    assert done.returncode != 0 and rule in done.stdout, done.stdout + done.stderr


def test_ci_builds_with_the_buildkit_that_is_pinned() -> None:
    """And no Dockerfile asks for another frontend than BuildKit's own."""
    assert f"image={bases().buildkit.reference}\n" in (ROOT / IMAGE).read_text()
    for path in (ROOT / "docker").glob("*.Dockerfile"):
        assert not re.search(r"^#\s*syntax\s*=", path.read_text(), re.MULTILINE | re.IGNORECASE), path.name


@pytest.mark.parametrize(
    ("runners", "proves"), [("", ["cpu"]), ("gpu-sm90", ["cpu", "dist"]), ("arm, gpu-sm90", ["cpu", "dist"])]
)
def test_no_image_waits_for_a_runner_that_does_not_exist(tmp_path: Path, runners: str, proves: list[str]) -> None:
    """The job that proves it is left out, and a notice says so."""
    if shutil.which("jq") is None:
        pytest.skip("unproven here: jq, which GitHub's runners have, is not installed")
    step = (ROOT / IMAGES).read_text().partition("        run: |\n")[2].partition("\n\n")[0]
    script = "".join(f"{line.removeprefix(' ' * 10)}\n" for line in step.splitlines())
    rows = [
        {"name": "publish", "call_spec": {"target": name}, "tags": [runner]}
        for name, runner in (("cpu", "ubuntu-24.04"), ("dist", "gpu-sm90"))
    ]
    (tmp_path / "nox").write_text(f"#!/bin/sh\necho '{json.dumps(rows)}'\n")
    (tmp_path / "nox").chmod(0o755)
    inputs = {"ONLY": "", "RUNNERS": runners, "GITHUB_OUTPUT": str(tmp_path / "output")}
    variables = {**os.environ, **inputs, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", "-eo", "pipefail", "-c", script]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    matrix = json.loads((tmp_path / "output").read_text().removeprefix("matrix="))
    assert [row["target"] for row in matrix if row["proves"]] == proves
    assert ("::notice::dist gets no tag" in done.stdout) == ("dist" not in proves)


def test_the_weekly_bumps_are_of_targets_that_exist() -> None:
    (named,) = re.findall(r"^  TARGETS: ([^#\n]+)", (ROOT / OUTDATED).read_text(), re.MULTILINE)
    assert set(named.split()) <= set(Catalogue().targets)
