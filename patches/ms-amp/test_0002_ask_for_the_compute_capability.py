"""An H200 has FP8 with the patch only, an H100 with and without it, an A100 never."""

import pytest

from patches.proof import Proof

RUNS_IN = "cpu"
EMULATED = "the GPU: its name and its compute capability are claimed"

HAS_FP8 = """
import os, runpy
import torch

torch.cuda.get_device_name = lambda device=None: os.environ["NAME"]
torch.cuda.get_device_capability = lambda device=None: tuple(map(int, os.environ["CAPABILITY"].split(".")))
print(runpy.run_path("msamp/common/utils/device.py")["Device"].is_fp8_supported())
"""


@pytest.mark.parametrize(
    ("name", "capability", "before", "after"),
    [
        ("NVIDIA H200", "9.0", "False", "True"),
        ("NVIDIA L40S", "8.9", "False", "True"),
        ("NVIDIA H100 80GB HBM3", "9.0", "True", "True"),
        ("NVIDIA A100-SXM4-80GB", "8.0", "False", "False"),
    ],
)
def test_fp8_is_found_with_the_patch_only(proof: Proof, name: str, capability: str, before: str, after: str) -> None:
    pristine, patched = proof.run(HAS_FP8, NAME=name, CAPABILITY=capability)
    assert pristine.stdout.strip() == before, pristine.stderr
    assert patched.stdout.strip() == after, patched.stderr
