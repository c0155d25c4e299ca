"""The folder of cuda_runtime.h is named with the patch only in wheels of CUDA 13, and always in those of CUDA 12."""

from patches.cuda_wheels import test_the_headers_of_cuda_13_are_found_with_the_patch_only  # noqa: F401

RUNS_IN = "cpu"
EMULATED = "the header is an empty file, and importlib.metadata names a wheel that is not there"
