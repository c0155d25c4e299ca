"""The environment of the target that a verb names, existing or made on demand."""

from __future__ import annotations

import argparse
from pathlib import Path

from recipes.catalogue.plan import Plan
from recipes.errors import Refusal
from recipes.make import environment, resolve
from recipes.make.build import Builder
from recipes.make.cache import Cache
from recipes.progress import Steps
from recipes.verbs.arguments import chosen


def installed(options: argparse.Namespace) -> tuple[Plan, Path]:
    """The target's plan and its environment, made if it is not there yet."""
    plan, cache = chosen(options), Cache()
    resolve.check(plan)
    with Steps() as steps, cache.held(steps.wait):
        locked, wheels = Builder(plan, cache, steps, options.mirror).wheels()
        return plan, environment.install(plan, locked, wheels, cache, steps)


def existing(options: argparse.Namespace) -> tuple[Plan, Path]:
    """The target's plan and its environment as it is; refused where none was built."""
    plan = chosen(options)
    if plan.on_base:  # its environment is the Python of the base image, which `installed` finds
        return installed(options)
    path = environment.folder(plan.root, plan.target) / "env"
    if not (path / "fusebox" / "manifest.json").is_file():
        raise Refusal(f'{path} does not exist: build it with `nox -s "build({plan.target.name})"`.')
    return plan, path
