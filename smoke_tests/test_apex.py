"""apex was built with its extensions: without them it falls back to slow Python in silence."""

from __future__ import annotations

import importlib
import importlib.metadata
from pathlib import Path
from typing import Any, Dict

import apex
import pytest
import torch  # noqa: F401  (the extensions need its libraries)

from claims import needs, proves

EXTENSIONS = ["amp_C", "apex_C", "fused_layer_norm_cuda", "fused_rotary_positional_embedding", "mlp_cuda", "syncbn"]


@needs(cuda=True)
@pytest.mark.parametrize("name", EXTENSIONS)
@proves("an extension of apex is a compiled file of the installed wheel, and loads")
def test_extension_is_there(name: str, device: str, measured: Dict[str, Any]) -> None:
    assert apex.__file__
    file = Path(str(importlib.import_module(name).__file__))
    files = importlib.metadata.files("apex") or []
    assert file.name in {path.name for path in files}, f"{file} is no file of the installed wheel"
    assert file.suffix == ".so"
    measured["file"] = file.name
