"""Verbs that run inside `docker build`, which contains these rooms only: catalogue, make, ship, verbs."""

from __future__ import annotations

import argparse

from recipes.make.build import Builder
from recipes.make.cache import Cache
from recipes.make.export import Exported
from recipes.progress import Steps
from recipes.ship import stages
from recipes.verbs.arguments import Verbs, add_sm, add_wheelcache, chosen, place


def register(verbs: Verbs) -> None:
    """Add these verbs with their arguments."""
    patched = verbs.add("patch", patch, mirror=True)
    add_sm(patched, may_be_empty=True)
    patched.add_argument("--into", type=place, help="write here what the stages of an image build from")
    add_wheelcache(patched)
    patched.add_argument("--standin", help="the image that stands for the base on which the wheels are compiled")
    patched.add_argument(
        "--elsewhere", help="if not empty: also take exported wheels that another compiler or base made from the same"
    )
    audited = verbs.add("audit", audit)
    add_sm(audited, may_be_empty=True)
    for name, holds in (
        ("out", "the folder that `patch --into` wrote"),
        ("wheels", "the folder of compiled wheels, NAME/*.whl"),
        ("built-in", "the environment in which they were compiled"),
        ("into", "the folder for what is to be installed"),
    ):
        audited.add_argument(f"--{name}", type=place, required=True, help=holds)


def patch(options: argparse.Namespace) -> int:
    """Fetch every source of a target and apply its patches."""
    plan, cache = chosen(options), Cache()
    exported = Exported(options.wheelcache, bool(options.elsewhere)) if options.wheelcache else None
    with Steps() as steps, cache.held(steps.wait):
        builder = Builder(plan, cache, steps, options.mirror, exported=exported)
        if options.into:
            stages.lay_out(plan, builder, options.into, options.standin)
            return 0
        for name, tree in builder.trees(builder.fetch()).items():
            steps.say("patch", f"{name}: tree {tree.sha256[:12]}", str(tree.path))
    return 0


def audit(options: argparse.Namespace) -> int:
    """Check the wheels that the stages of an image compiled, and write what its environment contains."""
    stages.gather(chosen(options), options.out, options.wheels, options.built_in, options.into)
    return 0
