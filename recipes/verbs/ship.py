"""Verbs that build images and publish them."""

from __future__ import annotations

import argparse
import re

from rich.markup import escape
from rich.table import Table

from recipes.catalogue.load import Catalogue
from recipes.catalogue.plan import plan as planned
from recipes.errors import Refusal
from recipes.progress import console, say
from recipes.prove import evidence
from recipes.ship import carry as carrying
from recipes.ship import image as images
from recipes.ship import publish as publishing
from recipes.ship import registry
from recipes.ship import verify as verifying
from recipes.ship.verify import Signer, workflow
from recipes.verbs.arguments import Verbs, chosen, folder, place


def register(verbs: Verbs) -> None:
    """Add these verbs with their arguments."""
    built = verbs.add("image", image, mirror=True, sm=True)
    built.add_argument(
        "--compiled-elsewhere",
        action="store_true",
        help="also take exported wheels that another compiler or base made from the same inputs; the image says so",
    )
    published = verbs.add("publish", publish, mirror=True, sm=True)
    published.add_argument("--registry", required=True, help="the registry to push to: HOST[:PORT][/PATH]")
    published.add_argument("--key", type=place, help="cosign's private key; in GitHub's workflow none is needed")
    carried = verbs.add("carry", carry, target=False)
    carried.add_argument("image", help="the image, by digest: NAME@DIGEST")
    carried.add_argument("--into", type=place, required=True, help="an empty or new folder for the parts")
    carried.add_argument("--mib", type=int, default=1024, help="the size of a part in MiB (default: %(default)s)")
    verified = verbs.add("verify", verify, target=False)
    verified.add_argument("image", help="the image, by digest: NAME@DIGEST or NAME:TAG@DIGEST")
    back = verbs.add("rollback", rollback, target=False)
    back.add_argument("image", help="an image that was published before, NAME@DIGEST: its target's tag moves to it")
    for added in (verified, back):
        trusted = added.add_mutually_exclusive_group(required=True)
        trusted.add_argument("--key", type=place, help="the public key of who signed it")
        trusted.add_argument(
            "--identity", help="a pattern of the workflow that signed it, such as ^https://github.com/OWNER/"
        )
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
    signer = Signer(options.key) if options.key else workflow()
    against = evidence.against_moving(plan)
    folder = publishing.publish(plan, _options(options), options.registry, against, signer)
    say(f"contents: {folder}/image.md")
    return 0


def carry(options: argparse.Namespace) -> int:
    """Write a pushed image as parts, with a script that proves it on a machine without a registry or Docker."""
    if options.mib < 1:
        raise Refusal(f"--mib {options.mib} is no size of a part: give a positive number of MiB.")
    about = carrying.carry(options.image, options.into, options.mib)
    parts = about["parts"]
    say(f"{options.into}: {len(parts)} parts, {sum(part['bytes'] for part in parts) / 2**30:.2f} GiB")
    say(f"there: python3 {carrying.SCRIPT.name} FOLDER --out OUT; here: nox -s promote -- --from OUT")
    return 0


def verify(options: argparse.Namespace) -> int:
    """Verify an image: its signature, its layers, its SBOM, its provenance against this checkout, and its claims."""
    return _verified(options, publishing.Commit.of(Catalogue().root).sha)


def rollback(options: argparse.Namespace) -> int:
    """Move a target's floating tag back to an image that was published before, once that is verified."""
    if _verified(options, None):
        return 1
    name, _, digest = options.image.partition("@")
    target = registry.label(options.image, "fusebox.target")
    registry.set_tags(name, digest, [target])
    say(f"{name}:{target} is {digest}")
    return 0


def _verified(options: argparse.Namespace, commit: str | None) -> int:
    """Print what was checked; 1 if anything is wrong."""
    of_image = planned(Catalogue(), registry.label(options.image, "fusebox.target"))
    checks = verifying.verify(of_image, options.image, Signer(options.key, options.identity), commit)
    table = Table(title=options.image, box=None, pad_edge=False)
    for column in ("check", "", "what was found"):
        table.add_column(column, overflow="fold")
    for check in checks:
        word = "[red]refused[/red]" if check.fault else "[green]good[/green]"
        table.add_row(check.name, word, escape(check.fault or check.finding))
    console.print(table)
    return 1 if verifying.faults(checks) else 0


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
        elsewhere=getattr(options, "compiled_elsewhere", False),  # what is published was compiled on its base
    )
