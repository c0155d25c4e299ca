"""A target whose wheels are collected and indexed: a compiled package beside a torch and a CUDA library made here."""

from __future__ import annotations

import json
from pathlib import Path

from recipes.catalogue.load import Catalogue
from recipes.catalogue.plan import plan
from recipes.files import sha256_of, write_json
from recipes.prove.claims import Room
from recipes.tests.conftest import PATCH, Tiny, wheel
from recipes.tests.objects import library

SHOPPED = ("tinypkg", "tinywheel")  # what is collected
SETUP = """
import sysconfig
from setuptools import Extension, setup
site = sysconfig.get_path("purelib")
links = [f"-L{site}/torch/lib", f"-L{site}/nvidia/lib", "-l:libtorch.so", "-l:libtinyrt.so.13"]
setup(name="tinypkg", version="1.0", install_requires=["torch", "tinydep", "tinywheel"],
      ext_modules=[Extension("tinypkg", ["tinypkg.c"], extra_compile_args=["-march=x86-64-v3"], extra_link_args=links)])
"""
MODULE = """
#include <Python.h>
int torch_answer(void);
int tinyrt_answer(void);
static PyObject *answer(PyObject *self, PyObject *none) { return PyLong_FromLong(torch_answer() + tinyrt_answer()); }
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, "42"}, {NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "tinypkg", 0, -1, methods};
PyMODINIT_FUNC PyInit_tinypkg(void) { return PyModule_Create(&definition); }
"""
# Like the real torch, it loads its libraries before anything that needs them.
TORCH = b"""import ctypes, pathlib
site = pathlib.Path(__file__).parents[1]
for name in ("torch/lib/libtorch.so", "nvidia/lib/libtinyrt.so.13"):
    ctypes.CDLL(str(site / name), ctypes.RTLD_GLOBAL)
"""


def torch(folder: Path, version: str, scratch: Path) -> Path:
    """A wheel that calls itself torch, with a library."""
    made = library(scratch, "libtorch", 'extern "C" int torch_answer() { return 40; }', "-Wl,-soname,libtorch.so")
    files = {"torch/__init__.py": TORCH, "torch/lib/libtorch.so": made.read_bytes()}
    return wheel(folder, "torch", requires=("nvidia-tiny==13.0.5",), version=version, more=files)


def shop_in(folder: Path, wheels: Path) -> Tiny:
    """A checkout with the target `tiny`, whose wheels are collected and indexed."""
    tiny = Tiny(folder, wheels)
    made = library(folder, "rt", 'extern "C" int tinyrt_answer() { return 2; }', "-Wl,-soname,libtinyrt.so.13")
    wheel(tiny.shelf, "nvidia_tiny", version="13.0.5", more={"nvidia/lib/libtinyrt.so.13": made.read_bytes()})
    own = torch(tiny.shelf, "1.0", folder)
    tiny.plant("torch", identity=f'file = "{own.name}"\nsha256 = "{sha256_of(own)}"', requires=("nvidia-tiny==13.0.5",))
    project = '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
    source = {"setup.py": SETUP, "tinypkg.c": MODULE, "pyproject.toml": project}
    (tiny.root / "patches" / "tinypkg" / "0001-say-two.patch").unlink()
    requires = ("torch", "tinydep", "tinywheel")
    tiny.plant("tinypkg", source, requires=requires, compiler="c++", build_requires=("setuptools",))
    tiny.edit(tiny.recipe("tinypkg"), "[build]\n", '[build]\nneeds = ["torch"]\n')
    (tiny.root / "patches" / "tinywheel").mkdir()
    diff = PATCH.replace("tinypkg.py", "tinywheel.py").replace("@@ -2,2 +2,2 @@\n\n", "@@ -1 +1 @@\n")
    (tiny.root / "patches" / "tinywheel" / "0001-say-two.patch").write_text(diff)
    tiny.edit(tiny.targets, 'tinypkg = "1.0"', 'torch = "1.0"\ntinypkg = "1.0"')
    tiny.lock("setuptools", "nvidia_tiny")
    tiny.succeed("wheels", "tiny")
    tiny.succeed("index")
    return tiny


def folder(tiny: Tiny) -> Path:
    """The folder of its collected wheels."""
    return tiny.root / "build" / "tiny" / "wheels"


def wheel_of(tiny: Tiny, name: str) -> Path:
    """The collected wheel of a package."""
    return next(folder(tiny).glob(f"{name}-*.whl"))


def run_of(shop: Tiny, outcome: str) -> None:
    """Evidence of a run in which one claim about tinywheel had that outcome, with the wheel that was collected."""
    planned = plan(Catalogue(shop.root), "tiny")
    log = shop.root / "smoke_tests" / "evidence" / "tiny--x86-64.log"
    log.write_text("a log\n")
    (row,) = [
        row for row in json.loads((folder(shop) / "wheels.json").read_text())["wheels"] if row["package"] == "tinywheel"
    ]
    identity = "test_environment.py::test_files_are_the_pinned_bytes"
    claim = {
        "id": f"{identity}[tinywheel]", "claim": "two is two", "package": "tinywheel", "outcome": outcome, "seed": [],
        "seconds": 1.0, "reason": "", "measured": {}, "key": Room(shop.root).key(identity),
    }  # fmt: skip
    write_json(
        log.with_suffix(".json"),
        {
            "target": "tiny", "stack": planned.stack, "name": "tiny--x86-64", "started": "2026", "commit": "0" * 12,
            "hardware": {"name": "x86-64", "arch": "x86-64", "cpu": "a", "gpus": []}, "claims": [claim], "files": {},
            "definitions": {}, "log_sha256": sha256_of(log),
            "packages": {"tinywheel": {"built_with": {}, "sha256": row["made_from"]}},
        },
    )  # fmt: skip
