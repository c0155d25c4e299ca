"""Verbs that plan a target and make its environment, and those that keep its pins and the cache."""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess

from recipes.catalogue import limits
from recipes.catalogue.compatibility import consider
from recipes.catalogue.load import Catalogue
from recipes.catalogue.plan import changed
from recipes.catalogue.plan import plan as plan_of
from recipes.catalogue.solve import instead
from recipes.errors import Refusal
from recipes.files import disk_named, remove
from recipes.make import costs, environment, export, resolve, toolkit
from recipes.make.build import Builder
from recipes.make.bump import Bump
from recipes.make.cache import Cache
from recipes.process import held
from recipes.progress import Steps, say
from recipes.ship import apt, bases, image
from recipes.verbs.arguments import Verbs, add_mirror, add_sm, add_standin, chosen, place, standins, text
from recipes.verbs.environment import installed


def register(verbs: Verbs) -> None:
    """Add these verbs with their arguments."""
    planned = verbs.add("plan", plan, sm=True)
    planned.add_argument("--python", type=text, help="plan with another Python, such as 3.12")
    planned.add_argument(
        "--with",
        dest="replaced",
        action="append",
        metavar="PACKAGE==VERSION",
        help="ask whether this release would fit; repeat for several",
    )
    verbs.add("fetch", fetch, mirror=True).add_argument(
        "--into", type=place, help="also fill this folder, which then serves as a mirror"
    )
    verbs.add("build", build, mirror=True, sm=True)
    opened = verbs.add("shell", shell, mirror=True, sm=True)
    opened.add_argument("command", nargs=argparse.REMAINDER, help="a command to run instead of a shell")
    locked = verbs.add("lock", lock)
    locked.add_argument("--upgrade", action="store_true", help="take the newest versions that fit")
    add_standin(locked)
    locked.add_argument("--network", help='the network in which base images are queried, such as "host"')
    bumped = verbs.add("bump", bump, mirror=True)
    raised = bumped.add_mutually_exclusive_group()
    raised.add_argument("pin", nargs="?", metavar="PACKAGE==VERSION", help="the release to pin")
    raised.add_argument("--bases", action="store_true", help="pin the current digests of the base images' tags")
    wheels = verbs.add("cache", cache, target=False)
    wheels.add_argument("action", choices=("export", "import"), help="copy the wheels to the folder, or from it")
    wheels.add_argument("folder", type=place, help="the folder of wheels")
    cleaned = verbs.add("clean", clean, target=False)
    cleaned.add_argument(
        "--cache", action="store_true", help="also remove downloads and compiled wheels from the cache"
    )


def plan(options: argparse.Namespace) -> int:
    """Show what a target contains and what building it costs, or why it cannot be built."""
    catalogue = Catalogue()
    if not options.replaced:
        shown = plan_of(catalogue, options.target, options.sm, options.python)
        resolve.check(shown)
        costs.show(shown, Cache())
        if line := toolkit.state(shown):
            say(line)
        return 0
    target = changed(catalogue.target(options.target), options.sm, options.python)
    replaced = limits.what_ifs(options.replaced)
    verdict = consider(catalogue, target, replaced)
    limits.refuse(verdict, lambda: instead(catalogue, target, replaced))
    if unasked := limits.extras(options.replaced):
        known = verdict.reasons if verdict.word == "unknown" else ()
        verdict = limits.Verdict("unknown", (*unasked, *known))
    for reason in verdict.reasons:
        say(f"{verdict.word}: {reason}")
    return 0 if verdict.word == "allowed" else 3


def fetch(options: argparse.Namespace) -> int:
    """Fetch and verify every source of a target."""
    plan, cache = chosen(options), Cache()
    if options.into and options.into.exists() and not options.into.is_dir():
        raise Refusal(f"--into {options.into} is not a folder: choose another place.")
    with Steps() as steps, cache.held(steps.wait):
        files = Builder(plan, cache, steps, options.mirror, copies=bool(options.into)).fetch()
        if options.into and options.into.resolve() != cache.root:
            mirror = Cache(options.into.resolve())  # the layouts are the same
            with mirror.held(steps.wait):
                Builder(plan, mirror, steps, cache.root, copies=True).fetch()
        steps.say("fetch", f"{plan.target.name}: {len(files)} files verified", str(options.into or cache.root))
    return 0


def build(options: argparse.Namespace) -> int:
    """Fetch, patch, compile and install a target's environment."""
    _, path = installed(options)
    say(f"The environment is in {path}: source {path}/bin/activate")
    return 0


def shell(options: argparse.Namespace) -> int:
    """Open a shell in a target's environment, or run one command in it."""
    options = _with_options_behind_the_target(options)
    plan, path = installed(options)
    given = options.command[1:] if options.command[:1] == ["--"] else options.command
    command = given or [os.environ.get("SHELL", "/bin/sh")]
    try:
        return subprocess.run(command, env=environment.run_variables(plan.target, path), check=False).returncode
    except FileNotFoundError:
        raise Refusal(
            f"There is no command {command[0]!r} in the environment or on the PATH: check its name."
        ) from None
    except OSError as error:
        raise Refusal(f"{command[0]} cannot be run ({error.strerror}): name a program.") from None


def _with_options_behind_the_target(options: argparse.Namespace) -> argparse.Namespace:
    """nox puts the verb's own options behind the target, where argparse takes all words for the command."""
    behind = argparse.ArgumentParser(prog="python -m recipes shell", add_help=False, allow_abbrev=False)
    add_mirror(behind)
    add_sm(behind)
    behind.add_argument("command", nargs=argparse.REMAINDER)
    return behind.parse_args(options.command, options)


def lock(options: argparse.Namespace) -> int:
    """Resolve a target's dependencies again (recipes/lock/TARGET.txt), and the missing digests of its base images.

    Versions that the lock has stay as long as they fit, unless `--upgrade` asks for the newest ones.
    `tool` in place of a target is the tool's own environment in an image, and `apt` what apt installs on base images.
    """
    cache = Cache()
    if options.target == "tool":
        with Steps() as steps, cache.held(steps.wait):
            steps.say("lock", "tool", str(resolve.write_tool(Catalogue(), cache, steps, options.upgrade)))
        return 0
    if options.target == "apt":
        with Steps() as steps:
            for reason in apt.write(Catalogue(), standins(options.standin), options.network, steps):
                steps.say("lock", reason)
        return 0
    plan = chosen(options)
    with Steps() as steps, cache.held(steps.wait):
        steps.say("lock", plan.target.name, str(resolve.write(plan, cache, steps, options.upgrade)))
        digests, missing = image.resolve(Catalogue().targets_file, plan.target)
        for name, digest in digests.items():
            steps.say("lock", name, digest)
        for reason in missing:
            steps.say("lock", plan.target.name, reason)
    return 0


def bump(options: argparse.Namespace) -> int:
    """Pin another release of a package: add it, lock the target again, and report the state of its patches.

    With `--bases`, pin the base images of all targets by the digests that their tags have now.
    """
    from recipes.pages import render  # imports all that the pages show, which no other verb here needs

    if options.bases:
        for line in bases.raise_digests(Catalogue()):
            say(line)
        say("todo    lock what apt installs on them: nox -s lock -- apt; then build and prove the images")
        return render.write(Catalogue())
    if options.pin is None:  # a lone word is taken for the target
        asked = options.target if "==" in options.target else "PACKAGE==VERSION"
        raise Refusal(
            f"A release is pinned in a target: write `nox -s bump -- TARGET {asked}`, or `--bases` for images."
        )
    cache, (package, version) = Cache(), limits.what_if(options.pin)
    with Steps() as steps, cache.held(steps.wait):
        for line in Bump(Catalogue().root, options.target, package, version).run(cache, steps, options.mirror):
            steps.say("todo", line)
        try:
            return render.write(Catalogue())
        except Refusal as refusal:  # until a patch is renewed, the new pin cannot be planned
            steps.say("todo", str(refusal))
            return 0


def cache(options: argparse.Namespace) -> int:
    """Export compiled wheels to a folder, or import them from one; each is checked by its hash."""
    cache = Cache()
    act = export.export_wheels if options.action == "export" else export.import_wheels
    with Steps() as steps, cache.held(steps.wait):
        steps.say("cache", f"{act(cache, options.folder)} wheels {options.action}ed", str(options.folder))
    return 0


def clean(options: argparse.Namespace) -> int:
    """Remove build/ and, with --cache, all downloads and wheels."""
    path, cache = Catalogue().root / "build", Cache()
    if path.exists():
        with contextlib.ExitStack() as stack, Steps() as steps:
            for folder in sorted(path.iterdir() if path.is_dir() else ()):
                if folder.is_dir():
                    stack.enter_context(held(folder, steps.wait))
            with disk_named(path):
                remove(path)
        say(f"removed {path}")
    if options.cache and cache.root.exists():
        with Steps() as steps, cache.held(steps.wait):
            cache.clear()
            steps.say("clean", "all downloads and wheels", str(cache.root))
    return 0
