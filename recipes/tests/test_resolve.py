"""A lock holds what the packages' requirements resolve to, and knows what it was resolved from."""

from __future__ import annotations

from recipes.catalogue.load import Catalogue
from recipes.catalogue.plan import plan
from recipes.make import resolve


def test_requirements_leave_out_the_target_s_own_packages() -> None:
    chosen = plan(Catalogue(), "cpu")
    names = resolve.requirements(chosen)
    assert not any(name.startswith(("torch", "transformers", "deepspeed")) for name in names)
    assert {"pip", "pytest", "numpy>=1.17", "wheel", "py-cpuinfo"} <= set(names)  # to build, to test, to run


def test_the_inputs_follow_python_and_the_c_library() -> None:
    chosen = plan(Catalogue(), "cpu")
    older = chosen.target.model_copy(update={"glibc": "2.17"})
    assert resolve.inputs(chosen) != resolve.inputs(
        type(chosen)(chosen.root, older, chosen.pins, chosen.patches, chosen.lock)
    )
