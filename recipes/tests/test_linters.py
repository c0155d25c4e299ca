"""The linters find what they are there for: a fault planted in our own workflows and Dockerfiles."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.catalogue.load import Catalogue
from recipes.files import ROOT

CPU, CHECK, IMAGES = "docker/cpu.Dockerfile", ".github/workflows/check.yml", ".github/workflows/images.yml"
OUTDATED, WHEELS = ".github/workflows/outdated.yml", ".github/workflows/wheels.yml"
HADOLINT, ZIZMOR = ("hadolint", "--no-color"), ("zizmor", "--offline", "--no-progress", "--persona=auditor")
CHECKOUT = "actions/checkout@3d3c42e5aac5ba805825da76410c181273ba90b1"
APT_LISTS = "--mount=type=tmpfs,target=/var/lib/apt/lists "

# (the linter, the file, a text of it, what stands there instead, the rule that must say so)
FAULTS = {
    "action-by-tag": (ZIZMOR, CHECK, CHECKOUT, "actions/checkout@v7", "unpinned-uses"),
    "template-injection": (ZIZMOR, IMAGES, '"image($TARGET)"', '"image(${{ inputs.target }})"', "template-injection"),
    "credentials-stay": (ZIZMOR, IMAGES, "persist-credentials: false", "persist-credentials: true", "artipacked"),
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


def test_the_weekly_bumps_are_of_targets_that_exist() -> None:
    (named,) = re.findall(r"^  TARGETS: ([^#\n]+)", (ROOT / OUTDATED).read_text(), re.MULTILINE)
    assert set(named.split()) <= set(Catalogue().targets)
