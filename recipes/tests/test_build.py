"""A build patches, compiles and keeps; the key of a wheel is everything that decides its bytes and nothing else."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recipes.catalogue import patch
from recipes.catalogue.load import Catalogue
from recipes.catalogue.plan import plan
from recipes.catalogue.schema import Pin
from recipes.files import ROOT
from recipes.make.build import Builder, Tree, longest_step, write_settings
from recipes.make.cache import Cache
from recipes.make.costs import jobs, memory_limit
from recipes.progress import Steps
from recipes.tests.conftest import Tiny, script

TREE = Tree(Path("nowhere"), "0" * 64, ())


def records(tiny: Tiny) -> dict[str, dict[str, Any]]:
    """The records of all built wheels, by package."""
    written = [json.loads(path.read_text()) for path in tiny.cache.glob("wheels/*/wheel.json")]
    return {record["inputs"]["package"]: record for record in written}


def test_what_is_installed_is_patched_and_says_so(undisturbed: Tiny) -> None:
    value = undisturbed.succeed("shell", "tiny", "--", "python", "-B", "-c", "import tinypkg; print(tinypkg.value)")
    assert value.strip().endswith("2")
    (patch,) = records(undisturbed)["tinypkg 1.0"]["patches"]
    assert patch["file"] == "patches/tinypkg/0001-say-two.patch"
    assert list(patch["installed"]) == ["tinypkg.py"]


@pytest.mark.parametrize(
    ("path", "old", "new", "again"),
    [
        ("recipes/packages/tinypkg.toml", 'TINY_SECONDS = "0"', 'TINY_SECONDS = "0.0"', True),
        ("patches/tinypkg/0001-say-two.patch", "+value = 2", "+value = 3", True),
        ("docker/build-wheel.sh", "# One patched source", "# A patched source", True),
        ("patches/tinypkg/0001-say-two.patch", "Description: Say two", "Description: Say 2", False),
        ("recipes/packages/tinypkg.toml", "core_seconds = 6", "core_seconds = 9", False),
        ("recipes/targets.toml", "a test: everything", "a test: all", False),
    ],
    ids=["a variable", "a patch's change", "the script", "a patch's words", "an estimate", "a reason"],
)
def test_only_what_decides_the_bytes_builds_again(tiny: Tiny, path: str, old: str, new: str, again: bool) -> None:
    before = key(tiny)
    tiny.edit(tiny.root / path, old, new)
    assert (key(tiny) != before) is again


def key(tiny: Tiny) -> str:
    """The inputs of tinypkg's wheel as this checkout has them, from a cache filled by hand."""
    chosen, cache = plan(Catalogue(tiny.root), "tiny"), Cache(tiny.cache)
    pin = next(pin for pin in chosen.pins if pin.name == "tinypkg")
    with Steps() as steps, cache.held(steps.wait):
        builder = Builder(chosen, cache, steps)
        trees = builder.trees({tiny.pinned: tiny.shelf / "tinypkg-1.0.tar.gz"})
        return json.dumps(builder.inputs(pin, trees["tinypkg"], "none", "bare"), sort_keys=True)


def test_a_wheel_is_the_same_wherever_it_was_built(tiny: Tiny, undisturbed: Tiny) -> None:
    tiny.succeed("build", "tiny")
    assert tiny.cache != undisturbed.cache
    assert records(tiny)["tinypkg 1.0"]["sha256"] == records(undisturbed)["tinypkg 1.0"]["sha256"]


def run_script(tiny: Tiny, environment: Path) -> tuple[Pin, Path, int]:
    """Run the build script where there is nothing to build; tinypkg's pin, the script's folder, and its exit code."""
    (pin,) = (pin for pin in plan(Catalogue(tiny.root), "tiny").pins if pin.name == "tinypkg")
    settings, source = tiny.root / "settings", tiny.root / "work" / "source"
    write_settings(pin, tiny.declared, settings)
    source.mkdir(parents=True, exist_ok=True)
    command = [str(ROOT / "docker" / "build-wheel.sh"), str(settings), str(source), str(tiny.root / "made")]
    variables = os.environ | {"VIRTUAL_ENV": str(environment)}
    done = subprocess.run(command, env=variables, capture_output=True, check=False)
    return pin, source.parent, done.returncode


def test_a_plan_forecasts_the_jobs_that_the_script_starts(tiny: Tiny) -> None:
    """Both count cores, and memory by mib_per_job."""
    memory = memory_limit() // 2**20
    for mib_per_job in (100, memory // 2 + 1):
        tiny.edit(tiny.recipe("tinypkg"), "mib_per_job = 100", f"mib_per_job = {mib_per_job}")
        pin, work, _ = run_script(tiny, Path(sys.prefix))
        assert int((work / "jobs").read_text()) == jobs(pin)


@pytest.mark.parametrize(("cores", "chosen"), [(16, "8 2"), (5, "2 2"), (3, "none 3"), (1, "none 1")])
def test_extensions_are_built_at_a_time_where_setup_py_can(tiny: Tiny, cores: int, chosen: str) -> None:
    """As many as keep the cores busy with two files each."""
    tiny.edit(tiny.recipe("tinypkg"), "mib_per_job = 100", "mib_per_job = 1")
    tiny.edit(tiny.recipe("tinypkg"), 'kind = "source"', 'kind = "source"\nparallel_extensions = "AT_A_TIME"')
    programs = {"nproc": f"echo {cores}", "python": 'echo "${AT_A_TIME:-none} $MAX_JOBS" > "$TMPDIR/../seen"'}
    for name, text in programs.items():
        script(tiny.root / "env" / "bin" / name, f"#!/bin/sh\n{text}\n")
    _, work, code = run_script(tiny, tiny.root / "env")
    assert code == 0
    assert (work / "seen").read_text().strip() == chosen


def test_a_linker_finds_the_cudnn_of_the_environment(tiny: Tiny) -> None:
    """Not the system's, whose headers may be of another version; names that are there stay."""
    environment = tiny.root / "env"
    script(environment / "bin" / "python", f"#!/bin/sh\ncase $1 in -c) echo {environment}/site ;; esac\n")
    libraries = environment / "site" / "nvidia" / "cudnn" / "lib"
    libraries.mkdir(parents=True)
    for name in ("libcudnn.so.8", "libcudnn_ops_infer.so.8", "libcudnn_graph.so.9", "libcudnn_graph.so"):
        (libraries / name).write_text(name)
    _, _, code = run_script(tiny, environment)
    assert code == 0
    named = {path.name: path.read_text() for path in libraries.iterdir() if path.suffix == ".so"}
    assert named == {
        "libcudnn.so": "libcudnn.so.8",
        "libcudnn_ops_infer.so": "libcudnn_ops_infer.so.8",
        "libcudnn_graph.so": "libcudnn_graph.so",
    }


@pytest.mark.parametrize("part", ["", "csrc"])
def test_nvcc_is_not_told_where_it_compiles(tiny: Tiny, part: str) -> None:
    """Neither the folder of the source nor that of the environment gets into what it writes."""
    environment, source = tiny.root / "env", tiny.root / "work" / "source"
    (source / "csrc").mkdir(parents=True)
    subfolder = f'subfolder = "{part}"\n' if part else ""
    tiny.edit(tiny.recipe("tinypkg"), 'kind = "source"\n', f'kind = "source"\n{subfolder}')
    compiled = f'"$PYTORCH_NVCC" -O3 -lineinfo -c {source}/csrc/a.cu -o a.o'
    python = f"#!/bin/sh\ncase $1 in -c) echo {environment}/site ;; *) {compiled} ;; esac\n"
    script(environment / "bin" / "python", python)
    nvcc = '#!/bin/sh\n{ echo "$@"; echo $NVCC_APPEND_FLAGS; } > "$TMPDIR/../seen"\n'
    script(environment / "site" / "nvidia" / "cu13" / "bin" / "nvcc", nvcc)
    _, work, code = run_script(tiny, environment)
    assert code == 0
    symbol = f"fusebox_{hashlib.md5(b'source/csrc/a.cu' + bytes([10])).hexdigest()}"
    own = f"-include {work}/symbol.h -DFUSEBOX_SYMBOL={symbol}"
    named = f"-Xcudafe --orig_src_path_name=/build/source/csrc/a.cu {own}"
    places = [f"-Xcompiler=-ffile-prefix-map={work}=/build", f"-Xcompiler=-ffile-prefix-map={environment}=/build/env"]
    assert (work / "seen").read_text().splitlines() == [f"-O3 -c {named} {source}/csrc/a.cu -o a.o", " ".join(places)]


TEMPLATES = """
namespace { __device__ int hidden = 3; }
template <typename T> __global__ void add(T *x) { *x += hidden; }
template <typename T> void launch(T *x) { add<T><<<1, 1>>>(x); }
template void launch<int>(int *);
"""


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="unproven here: no nvcc")
@pytest.mark.parametrize("through", ["$PYTORCH_NVCC", "$FUSEBOX_NVCC"], ids=["through the script's nvcc", "as it is"])
def test_a_file_of_templates_alone_is_compiled_to_the_same_bytes_twice(tiny: Tiny, through: str) -> None:
    """Without a symbol of its own, nvcc names what is internal to it by its own process."""
    environment, source = tiny.root / "env", tiny.root / "work" / "source"
    source.mkdir(parents=True)
    (source / "a.cu").write_text(TEMPLATES)
    once = f'"{through}" -arch=sm_90 -c {source}/a.cu -o {source}/$try.o && strip --strip-all {source}/$try.o'
    python = (
        f"#!/bin/sh\ncase $1 in -c) echo {environment}/site ;; *) for try in 1 2; do {once} || exit; done ;; esac\n"
    )
    script(environment / "bin" / "python", python)
    script(environment / "site" / "nvidia" / "cu13" / "bin" / "nvcc", f'#!/bin/sh\nexec {shutil.which("nvcc")} "$@"\n')
    _, _, code = run_script(tiny, environment)
    assert code == 0
    first, second = ((source / f"{number}.o").read_bytes() for number in (1, 2))
    assert (first == second) == (through == "$PYTORCH_NVCC")


def test_what_is_compiled_for_a_patched_torch_is_compiled_for_no_other(tmp_path: Path) -> None:
    chosen, cache = plan(Catalogue(), "cpu"), Cache(tmp_path)
    pin = next(pin for pin in chosen.pins if pin.name == "deepspeed")
    tree = Tree(tmp_path, "0" * 64, ())
    with Steps() as steps:
        builder = Builder(chosen, cache, steps)
        before = builder.inputs(pin, tree, "c++", "bare")
        chosen.patches["torch"] = patch.of_package(ROOT, "torch")
        after = builder.inputs(pin, tree, "c++", "bare")
    assert after == before | {"torch_patches": [each.sha256 for each in chosen.patches["torch"]]} != before


def test_the_longest_step_is_read_in_the_log_of_ninja(tmp_path: Path) -> None:
    assert longest_step(tmp_path) == {}
    for name, end in (("a", 61250), ("b", 7000)):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".ninja_log").write_text(f"# ninja log v5\n3\t40\t0\tx.o\tff\n250\t{end}\t0\ty.o\tfe\n")
    assert longest_step(tmp_path) == {"longest_seconds": 61.0}


@pytest.mark.parametrize(
    ("locked", "changed"),
    [
        ("nvidia-cudnn-cu12", {"transformer-engine", "flash-attn", "apex"}),
        ("setuptools", {"transformer-engine", "flash-attn", "apex", "transformers"}),
        ("pytest", set()),
    ],
)
def test_a_key_changes_with_what_a_build_is_beside(tmp_path: Path, locked: str, changed: set[str]) -> None:
    """The headers of another cuDNN are compiled against, another setuptools writes another wheel."""
    chosen = plan(Catalogue(), "cu12.1-torch2.1")
    assert chosen.lock
    locks = chosen.lock.artifacts
    artifacts = [replace(each, sha256="0" * 64) if each.name == locked else each for each in locks]
    assert tuple(artifacts) != chosen.lock.artifacts
    before, after = (
        {pin.name: Builder(variant, Cache(tmp_path), Steps()).inputs(pin, TREE, "nvcc", "a base") for pin in built}
        for variant in (chosen, replace(chosen, lock=replace(chosen.lock, artifacts=tuple(artifacts))))
        for built in [[pin for pin in variant.pins if pin.release.kind == "source"]]
    )
    differing = {name for name in before if before[name] != after[name]}
    assert changed <= differing if changed else not differing


def test_a_key_changes_with_a_package_that_a_build_needs(tmp_path: Path) -> None:
    chosen = plan(Catalogue(), "cu13.0-torch2.11")
    (pin,) = (pin for pin in chosen.pins if pin.name == "transformer-engine-torch")
    beside = Builder(chosen, Cache(tmp_path), Steps()).inputs(pin, TREE, "c++", "a base")["beside"]
    assert "transformer-engine-cu13" in beside
