"""Without the library of the FP8 all-reduce the module is imported with the patch only; reducing names what lacks."""

from patches.proof import Proof

RUNS_IN = "cpu"
EMULATED = "only the module itself is run: what MS-AMP imports before it needs Transformer Engine and a GPU"

IMPORT = """
import runpy, sys
from types import ModuleType

class Dtypes:
    kfloat8_e4m3, kfloat8_e5m2 = "e4m3", "e5m2"
    is_fp8_qtype = staticmethod(lambda qtype: qtype in ("e4m3", "e5m2"))

dtype = ModuleType("msamp.common.dtype")
dtype.Dtypes = Dtypes
sys.modules.update({name: ModuleType(name) for name in ("msamp", "msamp.common")}, **{"msamp.common.dtype": dtype})
try:
    op = runpy.run_path("msamp/operators/dist_op/dist_op.py")["DistOp"]
    print("imported")
    op.all_reduce(None, "e4m3")
except RuntimeError as error:
    print(str(error).replace("/usr/local/lib/", ""))
"""
MISSING = "Cannot find libmsamp_dist.so, please build msamp dist lib first."


def test_it_is_imported_without_the_library_with_the_patch_only(proof: Proof) -> None:
    pristine, patched = proof.run(IMPORT)
    assert pristine.stdout.splitlines() == [MISSING], pristine.stderr
    assert patched.stdout.splitlines() == ["imported", MISSING], patched.stderr
