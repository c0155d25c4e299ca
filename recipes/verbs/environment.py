"""The environment of the target that a verb names."""

from __future__ import annotations

import argparse
from pathlib import Path

from recipes.catalogue.plan import Plan
from recipes.make import environment
from recipes.make.build import Builder
from recipes.make.cache import Cache
from recipes.progress import Steps
from recipes.verbs.arguments import chosen


def installed(options: argparse.Namespace) -> tuple[Plan, Path]:
    """The target's plan and its environment, made if it is not there yet."""
    plan, cache = chosen(options), Cache()
    with Steps() as steps, cache.held(steps.wait):
        locked, wheels = Builder(plan, cache, steps, options.mirror).wheels()
        return plan, environment.install(plan, locked, wheels, cache, steps)
