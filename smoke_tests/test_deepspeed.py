"""DeepSpeed's optimizers, compiled ahead of time for the CPU."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any, Dict

import deepspeed
import pytest
from deepspeed.ops.op_builder import CPUAdamBuilder, FusedAdamBuilder

import bounds
from claims import needs, proves
from fused_ops import operator

SIZE = 4099  # vector code, its unrolled loop and its tail
BUILDERS = {"cpu_adam": CPUAdamBuilder, "fused_adam": FusedAdamBuilder}
every_column = pytest.mark.parametrize("column", ["deepspeed.cpu", "deepspeed.fused"])


@pytest.mark.parametrize("name", list(BUILDERS))
@proves("the compiled optimizer is the one built ahead of time: loaded from the wheel's files, nothing compiled now")
def test_compiled_ahead_of_time(name: str, measured: Dict[str, Any]) -> None:
    assert deepspeed.git_version_info.installed_ops[name]
    loaded = Path(BUILDERS[name]().load().__file__)
    root = Path(str(importlib.metadata.distribution("deepspeed").locate_file("")))
    files = importlib.metadata.files("deepspeed") or []
    assert loaded in {root / file for file in files}, f"{loaded} is no file of the installed wheel"
    assert loaded.suffix == ".so"
    measured["file"] = loaded.name


@every_column
@needs(isa="avx2")
@proves("compiled AdamW follows the float64 algorithm over eight steps, decay decoupled")
def test_adamw(column: str, measured: Dict[str, Any]) -> None:
    measured["error"] = bounds.assert_adamw_as_in_float64(operator("adamw", column), SIZE)


@every_column
@needs(isa="avx2")
@proves("compiled AdamW with zero gradients only decays: p * (1 - lr * weight_decay)")
def test_adamw_decays_without_gradient(column: str) -> None:
    bounds.assert_adamw_decays(operator("adamw", column), SIZE)
