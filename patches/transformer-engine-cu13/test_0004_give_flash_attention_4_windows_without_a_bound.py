"""Causal attention through FlashAttention 4 sees every key that its mask allows, with the patch only."""

from patches.open_windows import test_causal_attention_is_zero_without_the_patch_only  # noqa: F401

RUNS_IN = "cpu"
EMULATED = "FlashAttention 4 is its window's rule, computed by torch; the other modules of the package are stand-ins"
