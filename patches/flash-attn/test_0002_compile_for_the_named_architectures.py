"""The variable decides with the patch only; without it, both compile for sm_80 and sm_90."""

from patches.architectures import (  # noqa: F401
    test_the_named_ones_are_compiled_with_the_patch_only,
    test_unnamed_they_are_the_same_on_both,
)

RUNS_IN = "cpu"
EMULATED = "nvcc is a script that prints a version, torch one for the CPU, and nothing is compiled"
