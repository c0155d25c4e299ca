"""The folder of cuda_runtime.h is named with the patch only in wheels of CUDA 13, and always in those of CUDA 12."""

import pytest

from patches.proof import Proof
from patches.scripts import HEADERS

RUNS_IN = "cpu"
EMULATED = "the header is an empty file, and importlib.metadata names a wheel that is not there"


@pytest.mark.parametrize(
    ("core", "before", "after"),
    [
        ("transformer-engine-cu13", "none", "/site/nvidia/cu13"),
        ("transformer-engine-cu12", "/site/nvidia/cuda_runtime", "/site/nvidia/cuda_runtime"),
    ],
)
def test_the_headers_of_cuda_13_are_found_with_the_patch_only(proof: Proof, core: str, before: str, after: str) -> None:
    pristine, patched = proof.run(HEADERS, CORE=core)
    assert pristine.stdout.strip() == before, pristine.stderr
    assert patched.stdout.strip() == after, patched.stderr
