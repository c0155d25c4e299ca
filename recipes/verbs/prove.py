"""Verbs that prove: run the claims, keep the outcomes, list what has changed since."""

from __future__ import annotations

import argparse
from functools import partial

from recipes.catalogue import patch
from recipes.catalogue.load import Catalogue
from recipes.errors import Refusal
from recipes.make import environment
from recipes.make.build import Builder
from recipes.make.cache import Cache
from recipes.pages import render
from recipes.pages.tables import Facts
from recipes.process import held
from recipes.progress import Steps, say
from recipes.prove import evidence, promotion, proofs, records
from recipes.prove import mutants as planting
from recipes.prove import smoke as claims
from recipes.verbs.arguments import Verbs, chosen, number, place
from recipes.verbs.environment import installed


def register(verbs: Verbs) -> None:
    """Add these verbs with their arguments."""
    verbs.add("patches", patches, target=False)
    verbs.add("smoke", smoke, mirror=True, sm=True)
    promoted = verbs.add("promote", promote)
    promoted.add_argument(
        "--from",
        dest="folder",
        type=place,
        help="a folder with outcomes.json, smoke.log and manifest.json of a run elsewhere",
    )
    promoted.add_argument(
        "--built", action="store_true", help="keep only the description of the built environment, without claims"
    )
    promoted.add_argument(
        "--record",
        type=place,
        help="note that the program of this commit wrote this file of smoke_tests/evidence/",
    )
    verbs.add("changes", changes, target=False)
    planted = verbs.add("mutants", mutants, mirror=True, sm=True)
    planted.add_argument(
        "--seeds",
        type=partial(number, least=0),
        help="the number of runs on correct code (100; with --changed none)",
    )
    planted.add_argument(
        "--changed",
        action="store_true",
        help="plant only new mutants, those that something has changed since, and survivors without a known reason",
    )
    planted.add_argument("--compile", action="store_true", help="only compile the faults of compiled code; plant none")
    planted.add_argument(
        "--from", dest="outcomes", type=place, help="keep the outcomes that a run elsewhere wrote to its --out"
    )


def patches(_: argparse.Namespace) -> int:
    """Show every patch: its versions and targets, whether upstream has it, and what it was proved on."""
    proofs.show(Catalogue())
    return 0


def smoke(options: argparse.Namespace) -> int:
    """Build a target's environment and prove it on this machine; the evidence is in build/TARGET/evidence/."""
    plan, path = installed(options)
    with held(environment.folder(plan.root, plan.target), Steps().wait):
        return claims.smoke(plan, path)


def promote(options: argparse.Namespace) -> int:
    """Copy the evidence of the last smoke run into smoke_tests/evidence/, for you to commit, and render the tables."""
    plan = chosen(options)
    if options.record:
        say(f"recorded {records.note(plan, options.record)}")
        return render.write(Catalogue())
    if options.built:
        say(f"promoted {promotion.keep_built(plan, options.folder)}")
        return render.write(Catalogue())
    if options.folder:
        claims.bring(plan, options.folder)
    for path in promotion.promote(plan):
        say(f"promoted {path}")
    return render.write(Catalogue())


def changes(_: argparse.Namespace) -> int:
    """List what has changed since each committed run, record and proof, and what that affects."""
    facts = Facts.of(Catalogue())
    for plan, run in facts.runs:
        changed = evidence.changes(evidence.built_for(plan, run), facts.room, run)
        say(f"{run['name']}, since {run['commit']}: {'nothing changed' if not changed else ''}")
        for name, rows in sorted(changed.items()):
            concerned = sorted({row.split("[")[0] for row in rows})
            say(f"    {name}: {len(rows)} rows of {len(concerned)} claims, such as {concerned[0]}")
    _changed_proofs(facts.proofs)
    _changed_mutants(facts)
    _changed_records(facts)
    return 0


def _changed_proofs(now: proofs.Inputs) -> None:
    """Say which patches, proofs or harness have changed since the proofs ran."""
    every = patch.every(now.catalogue.root)
    changed: dict[str, list[str]] = {}
    for each in every:
        for part in proofs.changes(each, now):
            changed.setdefault(part, []).append(each.name)
    say(f"patches/, since each proof ran: {'nothing changed' if not changed else ''}")
    for part, names in changed.items():
        say(f"    {part}: {len(names)} of {len(every)} patches, such as {names[0]}")


def _changed_mutants(facts: Facts) -> None:
    """Count the mutants for which code that decided the outcome, or a pinned input of the target, has changed since."""
    keys = planting.Keys(facts.root)
    for outcomes in planting.committed(facts.root):
        name = f"mutants/{outcomes['target']}--{outcomes['hardware']['name']}"
        changed = [str(row["name"]) for row in planting.changed(keys, outcomes, facts.plan_of.get(outcomes["target"]))]
        concerned = f"{len(changed)} of {len(outcomes['mutants'])} mutants, such as {changed[0]}" if changed else ""
        say(f"{name}, since {outcomes.get('commit') or 'no commit'}: {concerned or 'nothing changed'}")


def _changed_records(facts: Facts) -> None:
    """Say which numbers and training records have changed since they were recorded, or their program or stack has."""
    for record, share in records.counted(records.every(facts.root, facts.plan_of)):
        part = f"program {record.program}" if record.changed == "program" else record.changed
        state = f"the {part} has changed" if part else "nothing changed"
        say(f"{record.file}{f', {share}' if share else ''}, since {record.commit or 'no commit'}: {state}")


def mutants(options: argparse.Namespace) -> int:
    """Plant faults in a target's environment to see whether the claims catch them, and keep the outcomes."""
    if options.outcomes:
        if not options.outcomes.is_file():
            raise Refusal(
                f"--from {options.outcomes} is not a file: pass the one that `python -m smoke_tests.mutants` wrote."
            )
        planting.keep(chosen(options), options.outcomes)
        return render.write(Catalogue())
    plan, path = installed(options)
    cache = Cache()
    with Steps() as steps, cache.held(steps.wait):
        libraries = planting.compiled(Builder(plan, cache, steps, options.mirror))
    if options.compile:
        say(f"The compiled faults are in {libraries}: bring them along.")
        return 0
    with held(environment.folder(plan.root, plan.target), Steps().wait):
        seeds = (0 if options.changed else 100) if options.seeds is None else options.seeds
        code = planting.run(plan, path, libraries, seeds, only_changed=options.changed)
    render.write(Catalogue())
    return code
