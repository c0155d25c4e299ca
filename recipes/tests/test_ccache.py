"""Compiling through ccache: every object goes through it, and wheel and key are those of a build without it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from recipes.errors import Refusal
from recipes.files import ROOT
from recipes.make import ccache
from recipes.tests.conftest import Tiny, script

# Says where it keeps objects, logs each compilation beside itself, and compiles.
STANDIN = """#!/bin/sh
if [ "$1" = --get-config ]; then echo /objects; exit; fi
echo "$CCACHE_DIR $CCACHE_MAXSIZE $*" >> "$(dirname "$0")/calls"
exec "$@"
"""


@pytest.fixture
def standin(tmp_path: Path) -> Path:
    """A program in the place of ccache."""
    return script(tmp_path / "ccache" / "ccache", STANDIN)


def wheels(tiny: Tiny) -> dict[str, bytes]:
    """The compiled wheels by their keys; they are removed, so that the next build compiles."""
    made = {path.parent.name: path.read_bytes() for path in tiny.cache.glob("wheels/*/*.whl")}
    shutil.rmtree(tiny.cache / "wheels")
    shutil.rmtree(tiny.root / "build")
    return made


def test_wheel_and_key_are_those_of_a_build_without_it(compiled: Tiny, standin: Path) -> None:
    compiled.succeed("build", "tiny")
    without = wheels(compiled)
    compiled.succeed("build", "tiny", FUSEBOX_CCACHE=str(standin), CCACHE_MAXSIZE="1G")
    assert wheels(compiled) == without
    calls = (standin.parent / "calls").read_text()
    assert calls.startswith("/objects 1G ") and "tinypkg.c" in calls


@pytest.mark.skipif(shutil.which("ccache") is None, reason="unproven here: ccache is not installed")
def test_a_warm_build_takes_its_objects_from_ccache(compiled: Tiny, tmp_path: Path) -> None:
    variables = {"FUSEBOX_CCACHE": "ccache", "CCACHE_DIR": str(tmp_path / "objects")}
    compiled.succeed("build", "tiny", **variables)
    cold = wheels(compiled)
    compiled.succeed("build", "tiny", **variables)
    assert wheels(compiled) == cold
    asked = ["ccache", "--dir", str(tmp_path / "objects"), "--print-stats"]
    stats = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    assert "direct_cache_hit\t1" in stats or "preprocessed_cache_hit\t1" in stats


def test_a_program_that_is_not_there_is_refused_before_compiling(compiled: Tiny) -> None:
    compiled.refuse("build", "tiny", FUSEBOX_CCACHE="no-such-ccache", naming=("FUSEBOX_CCACHE", "no-such-ccache"))


def test_a_program_that_is_no_ccache_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="does not say where it keeps objects"):
        ccache.settings(Path("/bin/false"), ROOT, tmp_path / "links")


def test_nvcc_gets_options_that_ccache_knows_and_its_own_programs_count(tmp_path: Path, standin: Path) -> None:
    toolkit = tmp_path / "cuda"
    for name in ("nvcc", "ptxas"):
        script(toolkit / "bin" / name, '#!/bin/sh\necho "$CCACHE_EXTRAFILES"\necho "$PATH"\n')
    links = tmp_path / "links"
    variables = ccache.settings(standin, ROOT, links, {"PATH": "/usr/bin:/bin"})
    words = ["--generate-dependencies-with-compile", "--dependency-output", "x.o.d", "-c", "x.cu", "-o", "x.o"]
    variables |= {"CUDA_HOME": str(toolkit), "PATH": f"{links}:/usr/bin:/bin"}
    command = [variables["PYTORCH_NVCC"], *words]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"{toolkit}/bin/ptxas", "/usr/bin:/bin"]
    assert (standin.parent / "calls").read_text().endswith(f"{toolkit}/bin/nvcc -MD -MF x.o.d -c x.cu -o x.o\n")
