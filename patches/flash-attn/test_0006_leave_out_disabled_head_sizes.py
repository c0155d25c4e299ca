"""Kernels that the variables name are neither compiled nor called with the patch, and both without it."""

from patches.head_sizes import (  # noqa: F401
    test_named_sizes_are_left_out_with_the_patch_only,
    test_the_backward_goes_through_the_same_switch_with_the_patch_only,
    test_the_option_says_what_the_recipe_builds,
    test_with_every_size_each_runs_its_own_kernel_on_both,
    test_without_a_size_the_rest_links_and_it_is_refused_with_the_patch_only,
)

RUNS_IN = "cpu"
EMULATED = "nvcc is a script that prints a version, torch one for the CPU, and the kernels are compiled stand-ins"
