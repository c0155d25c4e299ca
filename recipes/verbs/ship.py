"""Verbs that build images and publish them."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from recipes.catalogue.load import Catalogue
from recipes.catalogue.plan import plan as planned
from recipes.errors import Refusal
from recipes.progress import console, say
from recipes.prove import evidence
from recipes.ship import attest, registry
from recipes.ship import carry as carrying
from recipes.ship import image as images
from recipes.ship import publish as publishing
from recipes.ship import verify as verifying
from recipes.ship.cosign import Signer, signer_of
from recipes.verbs.arguments import (
    Verbs,
    add_compiled_elsewhere,
    add_key,
    add_standin,
    add_trust,
    add_wheelcache,
    chosen,
    compiled_elsewhere,
    place,
    standins,
    text,
)


def register(verbs: Verbs) -> None:
    """Add these verbs with their arguments."""
    built = verbs.add("image", image, mirror=True, sm=True)
    add_compiled_elsewhere(built)
    published = verbs.add("publish", publish, mirror=True, sm=True)
    published.add_argument("--registry", required=True, help="the registry to push to: HOST[:PORT][/PATH]")
    published.add_argument(
        "--only",
        choices=("push", "prove", "release"),
        help="do one step: build and push, prove the pushed image, or sign and tag it; they share build/TARGET/image/",
    )
    add_key(published)
    carried = verbs.add("carry", carry, target=False)
    carried.add_argument("image", help="the image, by digest: NAME@DIGEST")
    carried.add_argument("--into", type=place, required=True, help="an empty or new folder for the parts")
    carried.add_argument("--mib", type=int, default=1024, help="the size of a part in MiB (default: %(default)s)")
    verified = verbs.add("verify", verify, target=False)
    verified.add_argument(
        "subjects", nargs="+", metavar="IMAGE|WHEEL", help="images by digest, NAME[:TAG]@DIGEST, or collected wheels"
    )
    back = verbs.add("rollback", rollback, target=False)
    back.add_argument("image", help="an image that was published before, NAME@DIGEST: its target's tag moves to it")
    for added in (verified, back):
        add_trust(added)
    for added in (built, published):
        _add_building(added)


def _add_building(added: argparse.ArgumentParser) -> None:
    """Add how an image is built: on which bases, with which wheels, and how its steps reach the network."""
    add_standin(added)
    add_wheelcache(added)
    added.add_argument("--ca", type=place, help="a file of certificates, for a machine behind a proxy")
    added.add_argument(
        "--pip-conf", type=place, help="a configuration of pip for the steps that fetch; it stays out of the image"
    )
    added.add_argument(
        "--apt",
        choices=("locked", "newest"),
        help="install the distribution's packages from recipes/lock/apt/, or its current ones (default: locked, "
        "and newest on a substitute base)",
    )
    added.add_argument(
        "--cache", type=text, metavar="REF", help="keep the stages between runs in a registry, under this name"
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
    if options.only in (None, "push"):
        folder = publishing.push(plan, _options(options), options.registry)
        say(f"contents: {folder}/image.md")
    if options.only in (None, "prove"):
        publishing.prove_pushed(plan)
    if options.only in (None, "release"):
        signer = signer_of(options.key, "image.yml")
        publishing.release(plan, evidence.against_moving(plan), signer)
    return 0


def carry(options: argparse.Namespace) -> int:
    """Write a pushed image as parts, with a script that proves it on a machine without a registry or Docker."""
    if options.mib < 1:
        raise Refusal(f"--mib {options.mib} is not a valid size of a part: give a positive number of MiB.")
    about = carrying.carry(options.image, options.into, options.mib)
    parts = about["parts"]
    say(f"{options.into}: {len(parts)} parts, {sum(part['bytes'] for part in parts) / 2**30:.2f} GiB")
    say(f"there: python3 {carrying.SCRIPT.name} FOLDER --out OUT; here: nox -s promote -- --from OUT")
    return 0


def verify(options: argparse.Namespace) -> int:
    """Verify images or wheels against this checkout: signature, provenance, claims, and the layers of images."""
    catalogue, signer = Catalogue(), Signer(options.key, options.identity)
    for subject in options.subjects:
        if not subject.endswith(".whl"):
            verifying.digest_of(subject)
    commit = publishing.Commit.of(catalogue.root).sha
    codes = []
    for subject in options.subjects:
        if subject.endswith(".whl"):
            codes.append(_print(subject, attest.verify(catalogue, Path(subject), signer, commit)))
        else:
            codes.append(_verified(catalogue, subject, signer, commit))
    return max(codes)


def rollback(options: argparse.Namespace) -> int:
    """Verify an image that was published before, and move its target's floating tag back to it."""
    match, signer = verifying.digest_of(options.image), Signer(options.key, options.identity)
    if _verified(Catalogue(), options.image, signer, None):
        return 1
    name, digest, target = match["name"], match["digest"], registry.label(options.image, "fusebox.target")
    image = f"{name}@{digest}"
    if reason := publishing.unpublishable(verifying.provenance(image, signer), name):
        raise Refusal(f"{name}:{target} was not moved to {image}: {reason}; choose another image.")
    registry.set_tags(name, digest, [target])
    say(f"{name}:{target} is {digest}")
    return 0


def _verified(catalogue: Catalogue, image: str, signer: Signer, commit: str | None) -> int:
    """Verify an image and print what was checked; 1 if anything is wrong."""
    of_image = planned(catalogue, registry.label(image, "fusebox.target"))
    return _print(image, verifying.verify(of_image, image, signer, commit))


def _print(title: str, checks: list[verifying.Check]) -> int:
    """Print what was checked; 1 if anything is wrong."""
    table = Table(title=title, box=None, pad_edge=False)
    for column in ("check", "", "what was found"):
        table.add_column(column, overflow="fold")
    for check in checks:
        word = "[red]refused[/red]" if check.fault else "[green]good[/green]"
        table.add_row(check.name, word, escape(check.fault or check.finding))
    console.print(table)
    return 1 if verifying.faults(checks) else 0


def _options(options: argparse.Namespace) -> images.Options:
    return images.Options(
        standins=standins(options.standin),
        mirror=options.mirror,
        wheelcache=options.wheelcache,
        ca=options.ca,
        pip_conf=options.pip_conf,
        sm=tuple(options.sm or ()),
        network=options.network,
        elsewhere=compiled_elsewhere(options),
        apt=options.apt,
        cache=options.cache,
    )
