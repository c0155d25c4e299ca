"""Of a library that the environment and the system have, the environment's is loaded with the patch only."""

from patches.cuda_wheels import test_the_environment_comes_first_with_the_patch_only  # noqa: F401

RUNS_IN = "cpu"
EMULATED = "what is loaded is noted, not loaded: the libraries are empty files"
