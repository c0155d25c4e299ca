"""The same of 23.05, which writes the check otherwise (B49)."""

from patches.apex.test_0001_accept_another_cuda_minor_version import (  # noqa: F401
    test_another_major_version_stays_refused,
    test_another_minor_version_is_refused_without_the_patch_only,
    test_the_same_version_is_taken_without_a_warning,
)

RUNS_IN = "cu11.4-torch2.0"
EMULATED = "nvcc is a script that prints a version, and nothing is compiled"
