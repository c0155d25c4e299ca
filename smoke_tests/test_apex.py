"""apex was built with its extensions, without which it silently falls back to slow Python; and apex's own behaviour."""

from __future__ import annotations

import importlib
import importlib.metadata
from pathlib import Path
from typing import Any, Dict

import apex
import pytest
import torch

from smoke_tests.claims import needs, proves
from smoke_tests.operators import bounds, references
from smoke_tests.operators.samples import sample
from smoke_tests.operators.table import operator

EXTENSIONS = ["amp_C", "apex_C", "fused_layer_norm_cuda", "mlp_cuda", "syncbn"]


def assert_is_compiled(name: str, measured: Dict[str, Any]) -> None:
    """Assert that an extension loads from a shared library which the installed wheel lists."""
    assert apex.__file__
    file = Path(str(importlib.import_module(name).__file__))
    files = importlib.metadata.files("apex") or []
    assert file.name in {path.name for path in files}, f"{file} is no file of the installed wheel"
    assert file.suffix == ".so"
    measured["file"] = file.name


@needs(cuda=True)
@pytest.mark.parametrize("name", EXTENSIONS)
@proves("an extension of apex is a compiled file of the installed wheel, and loads", seed="B52")
def test_extension_is_there(name: str, device: str, measured: Dict[str, Any]) -> None:
    assert_is_compiled(name, measured)


@needs(cuda=True)
@proves("the fused rotary embedding is a compiled file of the installed wheel, and loads", since="25.09")
def test_rotary_embedding_is_there(device: str, measured: Dict[str, Any]) -> None:
    assert_is_compiled("fused_rotary_positional_embedding", measured)


@needs(cuda=True)
@proves("the fast multi-head attention is a compiled file of the wheel, and loads", seed=("B50", "B52"), until="25.09")
def test_fast_attention_is_there(device: str, measured: Dict[str, Any]) -> None:
    assert_is_compiled("fast_multihead_attn", measured)


@needs(cuda=True)
@proves("MixedFusedRMSNorm of float32 rows with bfloat16 weights gives bfloat16, as in float64", seed=("B09", "B48"))
def test_mixed_rms_norm(device: str, measured: Dict[str, Any]) -> None:
    given = sample("rms_norm", torch.bfloat16)
    inputs = [torch.randn(given.inputs[0].shape), given.inputs[1]]
    call = given.bind(operator("rms_norm", "apex.mixed"), device)
    results = bounds.forward_and_backward(call, inputs, given.gradient, device)
    output, of_x, of_weight = zip(results, bounds.in_float64(given.bind(references.rms_norm), inputs, given.gradient))
    assert [pair[0].dtype for pair in (output, of_x, of_weight)] == [torch.bfloat16, torch.float32, torch.bfloat16]
    for name, pair in {"output": output, "of_x": of_x, "of_weight": of_weight}.items():
        most = bounds.ceiling(pair[0].dtype, given.roundings)
        measured[name] = bounds.assert_rounded_like(*pair, 0.0, most)


@needs(cuda=True)
@proves("FusedAdam's zero_grad takes no argument and leaves no gradient, without being told to", seed="B58")
def test_zero_grad(device: str) -> None:
    parameter = torch.nn.Parameter(torch.ones(3, device=device))
    parameter.grad = torch.ones(3, device=device)
    optimizer = operator("adamw", "apex")([parameter], **bounds.ADAMW)
    optimizer.zero_grad()
    assert parameter.grad is None
    with pytest.raises(TypeError):
        optimizer.zero_grad(set_to_none=True)
