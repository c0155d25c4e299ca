"""Verbs about wheels: collect a target's wheels, make the wheel of the claims, and make an index of all wheels."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from recipes.catalogue.load import Catalogue
from recipes.catalogue.plan import Plan
from recipes.errors import Refusal
from recipes.files import write_json
from recipes.make import environment, resolve
from recipes.make.build import Builder
from recipes.make.cache import Cache
from recipes.make.export import Exported
from recipes.process import held
from recipes.progress import Steps, say
from recipes.ship import attest, claims_wheel, fitting, locks, statements
from recipes.ship import index as indexing
from recipes.ship import wheels as collecting
from recipes.ship.cosign import Signer, signer_of
from recipes.ship.publish import Commit
from recipes.verbs.arguments import (
    Verbs,
    add_compiled_elsewhere,
    add_key,
    add_trust,
    add_wheelcache,
    chosen,
    compiled_elsewhere,
    folder,
    number,
    place,
)


def register(verbs: Verbs) -> None:
    """Add these verbs with their arguments."""
    collected = verbs.add("wheels", wheels, mirror=True, sm=True)
    add_wheelcache(collected)
    add_compiled_elsewhere(collected)
    collected.add_argument(
        "--build", type=number, metavar="N", help="the wheels' build number, for a wheel that replaces a published one"
    )
    collected.add_argument(
        "--lock", action="store_true", help="also write pylock.toml; pip's index says where each dependency is"
    )
    add_key(collected)
    collected.add_argument("--for", dest="torch", metavar="torch==VERSION", help="only list the wheels for this torch")
    collected.add_argument(
        "--missing",
        type=place,
        metavar="INDEX",
        help="only list the targets whose wheels an index lacks, and the runner of each",
    )
    collected.add_argument("--json", type=place, metavar="FILE", help="with --missing: also write it to this file")
    collected.add_argument("--python", help="with --for: for this Python, such as 3.12")
    collected.add_argument("--cuda", help="with --for: for this CUDA, such as 13.0, or none")
    add_key(verbs.add("claims", claims, target=False))
    made = verbs.add("index", index, target=False)
    made.add_argument("--into", type=place, help="the folder of the index (default: build/index)")
    made.add_argument(
        "--from", dest="folders", type=folder, action="append", default=[], metavar="DIR",
        help="a folder of collected wheels from elsewhere; repeat for several",
    )  # fmt: skip
    made.add_argument("--files-url", help="where the wheels will be, if not beside the index")
    add_trust(made, required=False)


def wheels(options: argparse.Namespace) -> int:
    """Collect and sign the wheels that a target builds or patches, or list what exists or what an index lacks."""
    if options.json and not options.missing:
        raise Refusal("--json writes what an index lacks: add --missing INDEX.")
    if options.missing:
        return _missing(options.missing, options.json)
    if options.torch:
        return _answer(fitting.Wanted.read(options.torch, options.python, options.cuda))
    if options.python or options.cuda:
        raise Refusal("--python and --cuda choose among wheels for a torch: add --for torch==VERSION.")
    from_elsewhere = compiled_elsewhere(options)
    plan, cache = chosen(options), Cache()
    signer = signer_of(options.key, "wheels.yml")
    commit = Commit.of(plan.root).sha if signer else None
    exported = Exported(options.wheelcache, from_elsewhere) if options.wheelcache else None
    resolve.check(plan)
    place_of_target = environment.folder(plan.root, plan.target)
    with Steps() as steps, held(place_of_target, steps.wait), cache.held(steps.wait):
        builder = Builder(plan, cache, steps, options.mirror, exported=exported)
        locked, built = builder.wheels()
        names = {pin.name for pin in collecting.own(plan)}
        beside = locks.dependencies(locked, built, names, builder.downloads, places=options.lock)
        into = collecting.collect(plan, locked, built, beside, steps, options.build)
        if signer and commit:
            _sign(plan, into, signer, commit, steps)
    say(f"The wheels are in {into}")
    return 0


def _missing(site: Path, file: Path | None) -> int:
    rows = list(fitting.missing(Catalogue(), site))
    for row in rows:
        say(str(row))
    if file:
        write_json(file, [dataclasses.asdict(row) for row in rows])
    return 0


def _sign(plan: Plan, into: Path, signer: Signer, commit: str, steps: Steps) -> None:
    """Sign what is stated about each collected wheel of a target."""
    proofs = indexing.Proofs(Catalogue(plan.root))
    for entry in indexing.read(into):
        with steps.step("sign", entry.file) as step:
            runs = proofs.runs(entry)
            attest.sign(into / entry.file, attest.stated(plan, entry.model_dump(), commit, runs), signer)
            step.note = f"proved in {len(runs)} run{'s' * (len(runs) > 1)}" if runs else "built"


def _answer(wanted: fitting.Wanted) -> int:
    catalogue = Catalogue()
    for line in fitting.answer(catalogue, wanted):
        say(line)
    return 0 if fitting.fits(catalogue, wanted) else 3


def claims(options: argparse.Namespace) -> int:
    """Make and sign the wheel fusebox-claims, which proves an environment that Fusebox did not build."""
    root, cache, signer = Catalogue().root, Cache(), signer_of(options.key, "wheels.yml")
    commit = Commit.of(root).sha if signer else None
    place_of_claims = root / "build" / "claims"
    with Steps() as steps, held(place_of_claims, steps.wait), cache.held(steps.wait):
        wheel = claims_wheel.make(root, cache, place_of_claims / "wheels")
        if signer and commit:
            provenance = statements.claims_provenance(root, commit, statements.builder(), claims_wheel.NAME)
            with steps.step("sign", wheel.name):
                attest.sign(wheel, [(statements.PROVENANCE, provenance)], signer)
    say(f"The wheel is {wheel}")
    return 0


def index(options: argparse.Namespace) -> int:
    """Make a static package index of all collected wheels; wheels already in it stay."""
    catalogue, trusted = Catalogue(), Signer(options.key, options.identity)
    into = options.into or catalogue.root / "build" / "index"
    with Steps() as steps, Cache().held(steps.wait):  # wait while `wheels` writes what is read here
        sources = [*indexing.collected_in(catalogue.root), *options.folders]
        entries = indexing.write(catalogue, into, sources, options.files_url, trusted if trusted.named else None)
    for entry in entries:
        say(f"{entry.file}: {entry.proof}; {entry.signed}")
    say(f"The index of {len(entries)} wheels is in {into}")
    return 0
