"""Faults of an environment that is not what was pinned; the column is a package."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import sys
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ContextManager, Dict
from unittest import mock

from smoke_tests.faults.planting import Call, patched

EVERY = "*"  # stands for each package that came as a wheel
PINNED = "test_environment.py::test_"


@lru_cache(maxsize=None)
def packages() -> Dict[str, Any]:
    """The packages of this environment, as its manifest has them."""
    manifest = json.loads(Path(sys.prefix, "fusebox", "manifest.json").read_text(encoding="utf-8"))
    listed: Dict[str, Any] = manifest["packages"]
    return listed


def file_of(package: str, ending: str) -> Path:
    """The first installed file of a package whose path ends like that and that is not empty."""
    files = importlib.metadata.files(package) or []
    return next(Path(str(file.locate())) for file in files if str(file).endswith(ending) and file.size)


def path_says(method: str, place: Path, answer: Call) -> ContextManager[Any]:
    """Path.METHOD() gives answer(what it gave) for one place."""
    own, place = getattr(Path, method), place.resolve()
    return mock.patch.object(Path, method, lambda self: answer(own(self)) if self == place else own(self))


@patched("not what was pinned", PINNED + "files_are_the_pinned_bytes", EVERY)
def one_bit_of_a_file_is_flipped(package: str) -> ContextManager[Any]:
    flip = lambda content: bytes([content[0] ^ 1]) + content[1:]  # noqa: E731
    return path_says("read_bytes", file_of(package, ".py"), flip)


@patched("extension missing", PINNED + "files_are_the_pinned_bytes", EVERY)
def a_compiled_extension_is_missing(package: str) -> ContextManager[Any]:
    return path_says("is_file", file_of(package, ".so"), lambda _: False)


@patched("patch not applied", PINNED + "patch_is_installed", EVERY)
def a_patched_file_is_another(package: str) -> ContextManager[Any]:
    path = next(path for patch in packages()[package]["patches"] for path in patch["installed"])
    return path_says("read_bytes", file_of(package, path), lambda content: content.replace(b" ", b"  ", 1))


@patched("not what was pinned", PINNED + "version_is_pinned", EVERY)
def another_version_is_installed(_: str) -> ContextManager[Any]:
    return mock.patch.object(importlib.metadata, "version", lambda package: "0.0.0")


@patched("not what was pinned", PINNED + "version_is_pinned", EVERY)
def the_module_calls_itself_another_version(package: str) -> ContextManager[Any]:
    module = importlib.import_module(packages()[package]["module"])
    return mock.patch.object(module, "__version__", "0.0.0", create=True)


@patched("not what was pinned", PINNED + "module_is_inside_the_environment", EVERY)
def the_module_comes_from_elsewhere(package: str) -> ContextManager[Any]:
    module = importlib.import_module(packages()[package]["module"])
    return mock.patch.object(module, "__file__", "/usr/lib/python3/dist-packages/module.py")


@patched("extension missing", "test_deepspeed.py::test_compiled_ahead_of_time", "deepspeed")
def the_optimizer_is_compiled_when_it_is_used(_: str) -> ContextManager[Any]:
    builder = importlib.import_module("deepspeed.ops.op_builder.builder").OpBuilder
    loaded = SimpleNamespace(__file__="/root/.cache/torch_extensions/cpu_adam/cpu_adam.so")
    return mock.patch.object(builder, "load", lambda self, verbose=True: loaded)
