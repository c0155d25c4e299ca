"""The flags name the CPU of the building machine without the patch only; nothing else of them changes."""

import json

from patches.proof import Proof
from patches.scripts import SETUP

RUNS_IN = "cu11.4-torch2.0"
EMULATED = "nvcc is a script that prints a version, and nothing is compiled"

SCRIPT = SETUP + "import json; print(json.dumps({each.name: each.extra_compile_args for each in extensions}))"


def test_the_building_cpu_is_named_without_the_patch_only(proof: Proof) -> None:
    tried = proof.run(SCRIPT, FOLDER="csrc/rotary", NVCC="11.4", NVCC_THREADS="")
    before, after = (json.loads(done.stdout.splitlines()[-1]) for done in tried)
    assert before["rotary_emb"]["cxx"] == ["-g", "-march=native", "-funroll-loops"]
    assert "-gencode" in before["rotary_emb"]["nvcc"]
    assert after == {"rotary_emb": {**before["rotary_emb"], "cxx": ["-g", "-funroll-loops"]}}
