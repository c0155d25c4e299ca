"""What CPU this is, asked once per process: DeepSpeed asks twice for each optimizer, and an answer takes a second."""

from __future__ import annotations

import functools
import importlib.util
from typing import Iterator
from unittest import mock

import pytest


@pytest.fixture(scope="session")
def known_cpu() -> Iterator[None]:
    """Answer DeepSpeed, from now on and in later claims of this process, with what py-cpuinfo told the first time."""
    if importlib.util.find_spec("cpuinfo") is None:
        yield
        return
    import cpuinfo

    with mock.patch.object(cpuinfo, "get_cpu_info", functools.lru_cache(maxsize=None)(cpuinfo.get_cpu_info)):
        yield
