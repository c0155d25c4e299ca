"""Of a library that the environment and the system have, the environment's is loaded with the patch only."""

import pytest

from patches.proof import Proof
from patches.scripts import LOADED

RUNS_IN = "cpu"
EMULATED = "what is loaded is noted, not loaded: the libraries are empty files"

ENVIRONMENT, SYSTEM = "/site/nvidia/cudnn/lib/libcudnn.so.9", "/cuda/lib64/libcudnn.so"


@pytest.mark.parametrize(
    ("has", "before", "after"),
    [
        ("environment system", SYSTEM, ENVIRONMENT),
        ("system", SYSTEM, SYSTEM),
        ("environment", ENVIRONMENT, ENVIRONMENT),
    ],
)
def test_the_environment_comes_first_with_the_patch_only(proof: Proof, has: str, before: str, after: str) -> None:
    pristine, patched = proof.run(LOADED, HAS=has)
    assert pristine.stdout.strip() == before, pristine.stderr
    assert patched.stdout.strip() == after, patched.stderr
