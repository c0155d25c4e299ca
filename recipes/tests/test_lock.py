"""A lock holds what the packages' requirements resolve to, and knows what it was resolved from."""

from __future__ import annotations

from recipes import lock
from recipes.model import Catalogue
from recipes.plan import plan


def test_requirements_leave_out_the_target_s_own_packages() -> None:
    chosen = plan(Catalogue(), "cpu")
    names = lock.requirements(chosen)
    assert not any(name.startswith(("torch", "transformers", "deepspeed")) for name in names)
    assert {"pip", "pytest", "numpy>=1.17", "wheel", "py-cpuinfo"} <= set(names)  # to build, to test, to run


def test_the_inputs_follow_python_and_the_c_library() -> None:
    chosen = plan(Catalogue(), "cpu")
    older = chosen.target.model_copy(update={"glibc": "2.17"})
    assert lock.inputs(chosen) != lock.inputs(
        type(chosen)(chosen.root, older, chosen.pins, chosen.patches, chosen.lock)
    )
