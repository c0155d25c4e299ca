"""What test_environment.py claims about CUDA libraries, for an environment that Fusebox did not build."""

from __future__ import annotations

import contextlib
import importlib
from typing import Any, Dict

from smoke_tests.claims import needs, proves
from smoke_tests.test_environment import loaded


@needs(cuda=True)
@proves("no two copies of cuDNN, cuBLAS, NCCL or the CUDA runtime are loaded when all packages are", package="torch")
def test_no_library_is_loaded_twice(device: str, manifest: Dict[str, Any], measured: Dict[str, Any]) -> None:
    import torch

    for entry in manifest["packages"].values():
        with contextlib.suppress(Exception):  # other claims say what cannot be imported
            importlib.import_module(entry["module"])
    torch.nn.functional.conv2d(torch.ones(1, 8, 8, 8, device=device), torch.ones(8, 8, 3, 3, device=device))
    for stem, folders in loaded("libcudnn", "libcublas", "libnccl", "libcudart").items():
        assert len(folders) <= 1, f"{stem} is loaded from {sorted(map(str, folders))}"
        measured[stem] = str(next(iter(folders), "not loaded"))
