"""The wheel's packages hold flash_attn.cute without the patch only, and all others on both."""

from patches.proof import Proof

RUNS_IN = "cpu"
EMULATED = "nothing is compiled"

PACKAGES = """
import setuptools, sys

setuptools.setup = lambda packages, **_: print(*sorted(packages))
sys.argv = ["setup.py"]
with open("setup.py") as script:
    exec(compile(script.read(), "setup.py", "exec"), {"__name__": "__main__", "__file__": "setup.py"})
"""


def test_cute_is_packaged_without_the_patch_only(proof: Proof) -> None:
    pristine, patched = proof.run(PACKAGES, FLASH_ATTENTION_SKIP_CUDA_BUILD="TRUE")
    before, after = (set(done.stdout.splitlines()[-1].split()) for done in (pristine, patched))
    assert before - after == {"flash_attn.cute"}, pristine.stderr
    assert after < before
    assert {"flash_attn", "flash_attn.ops"} <= after, patched.stderr
