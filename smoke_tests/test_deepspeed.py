"""DeepSpeed's optimizers, compiled ahead of time."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any, Dict

import deepspeed
from deepspeed.ops.op_builder import CPUAdamBuilder, FusedAdamBuilder

from smoke_tests.claims import every, proves

BUILDERS = {"deepspeed.cpu": CPUAdamBuilder, "deepspeed.fused": FusedAdamBuilder}


@every("adamw", only="deepspeed")
@proves(
    "the compiled optimizer is the one built ahead of time: it is loaded from the wheel's files, and nothing is "
    "compiled now"
)
def test_compiled_ahead_of_time(column: str, measured: Dict[str, Any]) -> None:
    builder = BUILDERS[column]()
    assert deepspeed.git_version_info.installed_ops[builder.name]
    loaded = Path(builder.load().__file__)
    root = Path(str(importlib.metadata.distribution("deepspeed").locate_file("")))
    files = importlib.metadata.files("deepspeed") or []
    assert loaded in {root / file for file in files}, f"{loaded} is no file of the installed wheel"
    assert loaded.suffix == ".so"
    measured["file"] = loaded.name
