"""Runs in one process what shares things that are slow to make: the plugin of pytest that `nox -s tests` loads.

pytest-xdist's own `--dist loadgroup` (3.8.0) writes a group into node ids, which pytest 9.2 does not read: its groups
do nothing.
"""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

# How their tests' names begin. Proofs of patches share environments of gigabytes, which one process at a time makes.
TOGETHER = (
    "patches/",
    "recipes/tests/test_attest.py",
    "recipes/tests/test_breakages.py",
    "recipes/tests/test_install.py",
    "recipes/tests/test_wheels.py",
)


class Groups(LoadScopeScheduling):  # type: ignore[misc]
    """Gives a group to one process, the groups first, and each other test to the next free one."""

    def _split_scope(self, nodeid: str) -> str:
        return next((group for group in TOGETHER if nodeid.startswith(group)), nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Groups:
    return Groups(config, log)
