"""Verbs that build images and publish them."""

from __future__ import annotations

import argparse
import re

from recipes.errors import Refusal
from recipes.progress import say
from recipes.prove import evidence
from recipes.ship import image as images
from recipes.ship import publish as publishing
from recipes.verbs.arguments import Verbs, chosen, folder, place


def register(verbs: Verbs) -> None:
    """Add these verbs with their arguments."""
    built = verbs.add("image", image, mirror=True, sm=True)
    published = verbs.add("publish", publish, mirror=True, sm=True)
    published.add_argument("--registry", required=True, help="the registry to push to: HOST[:PORT][/PATH]")
    for added in (built, published):
        added.add_argument(
            "--standin",
            action="append",
            default=[],
            metavar="NAME=REF",
            help="use the image REF instead of the base image NAME",
        )
        added.add_argument(
            "--wheelcache", type=folder, help="a folder of exported wheels to use instead of compiling them"
        )
        added.add_argument("--ca", type=place, help="a file of certificates, for a machine behind a proxy")
        added.add_argument(
            "--pip-conf", type=place, help="a configuration of pip for the steps that fetch; it stays out of the image"
        )
        added.add_argument(
            "--network", help='the network of the steps that fetch, such as "host" (default: that of the builder)'
        )


def image(options: argparse.Namespace) -> int:
    """Build a target's image with docker buildx, print the size of each layer, and run its claims in it."""
    plan = chosen(options)
    say(f"{images.tag(plan.target)}: {images.build(plan, _options(options))}")
    images.show(plan)
    # The strictest way to run it: an unknown user, and only /tmp writable, from which Triton loads what it compiles.
    strictly = ("--user=12345", "--read-only", "--tmpfs=/tmp:exec")
    return images.smoke(plan.target, images.tag(plan.target), *strictly)


def publish(options: argparse.Namespace) -> int:
    """Build a target's image from the commit, push it by digest, prove what was pushed, and then set its tags."""
    plan = chosen(options)
    folder = publishing.publish(plan, _options(options), options.registry, evidence.against_moving(plan))
    say(f"contents: {folder}/image.md")
    return 0


def _options(options: argparse.Namespace) -> images.Options:
    standins = {name: reference for name, _, reference in (text.partition("=") for text in options.standin)}
    if wrong := [text for text in options.standin if not all(text.partition("="))]:
        raise Refusal(f"--standin {wrong[0]} names no image to stand in: write NAME=REF.")
    if wrong := [name for name in standins.values() if not re.fullmatch(r"[\w.:/@-]+", name)]:
        raise Refusal(f"--standin {wrong[0]!r} is not the name of an image: correct it.")
    return images.Options(
        standins=standins,
        mirror=options.mirror,
        wheelcache=options.wheelcache,
        ca=options.ca,
        pip_conf=options.pip_conf,
        sm=tuple(options.sm or ()),
        network=options.network,
    )
