"""`python -m recipes VERB`: the verbs, each a few lines; nox calls them. Bad input ends in one sentence and code 2."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

try:
    from rich.table import Table
    from rich.text import Text

    from recipes import bench, build, environment, evidence, image, limits, lock, mutants, proof, publish, render, runs
    from recipes.build import Builder
    from recipes.bump import Bump
    from recipes.cache import Cache, disk_named, remove, write_text
    from recipes.model import Catalogue, Refusal
    from recipes.plan import Plan, changed, consider, grid, plan, show
    from recipes.progress import Steps, console, errors, say
except ModuleNotFoundError as missing:
    sys.exit(
        f"fusebox: the Python package {missing.name} is not installed: run the verb through nox, which "
        "installs what it needs."
    )
except KeyboardInterrupt:
    sys.exit(130)


def main(arguments: list[str] | None = None) -> int:
    """Run one verb and return the exit code: 0 done, 1 a claim was refuted, 2 refused, 3 a what-if is unknown."""
    options = _parser().parse_args(_ours_first(sys.argv[1:] if arguments is None else arguments))
    for sent in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(sent) is not signal.SIG_IGN:  # as `nohup` has it
            signal.signal(sent, signal.default_int_handler)  # as Ctrl-C: what we started ends with us
    try:
        return int(options.verb(options))
    except Refusal as refusal:
        said = "".join(char if char.isprintable() else " " for char in str(refusal))  # what it quotes may hold anything
        errors.print(Text.assemble(("fusebox:", "red"), " ", said), soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        errors.print("fusebox: stopped; what was complete is kept, run again to go on.")
        return 130


def _ours_first(words: list[str]) -> list[str]:
    """The words with `shell`'s own options before the target: nox puts them behind it, where a command begins."""
    end = 2
    while words[:1] == ["shell"] and end < len(words) and words[end].partition("=")[0] in ("--mirror", "--sm"):
        end += 1 if "=" in words[end] else 2
    return [*words[:1], *words[2:end], *words[1:2], *words[end:]]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m recipes", description=__doc__)
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    mirror_help = "a folder to fetch from before the network (default: FUSEBOX_MIRROR)"

    def verb(  # type: ignore[no-untyped-def]
        name: str, function, *, target: bool = True, mirror: bool = False, sm: bool = False
    ) -> argparse.ArgumentParser:
        added = verbs.add_parser(name, help=function.__doc__, description=function.__doc__)
        added.set_defaults(verb=function)
        if target:
            added.add_argument(
                "target", nargs="?", default="cpu", help="a table of recipes/targets.toml (default: %(default)s)"
            )
        if mirror:
            added.add_argument(
                "--mirror", type=_place, default=os.environ.get("FUSEBOX_MIRROR") or None, help=mirror_help
            )
        if sm:
            added.add_argument("--sm", type=_listed, help='other GPU architectures, as "8.0,9.0"')
        return added

    what_if = verb("plan", _plan, sm=True)
    what_if.add_argument("--python", type=_text, help="another Python, as 3.12")
    what_if.add_argument("--with", dest="replaced", action="append", metavar="PACKAGE==VERSION", help="would it fit?")
    verb("fetch", _fetch, mirror=True).add_argument("--into", type=_place, help="also fill this folder, as a mirror")
    patched = verb("patch", _patch, mirror=True, sm=True)
    patched.add_argument("--into", type=_place, help="lay out what the stages of an image build from")
    patched.add_argument("--wheelcache", type=_folder, help="a folder of exported wheels: none of them is built again")
    audited = verb("audit", _audit, sm=True)
    for name, holds in (
        ("out", "what `patch --into` wrote"),
        ("wheels", "NAME/*.whl"),
        ("built-in", "the environment that they were compiled in"),
        ("into", "to be installed"),
    ):
        audited.add_argument(f"--{name}", type=_place, required=True, help=holds)
    published = verb("publish", _publish, mirror=True, sm=True)
    published.add_argument("--registry", required=True, help="where to push to: HOST[:PORT][/PATH]")
    for built in (verb("image", _image, mirror=True, sm=True), published):
        built.add_argument("--standin", action="append", default=[], metavar="NAME=REF", help="stands for a base image")
        built.add_argument("--wheelcache", type=_folder, help="a folder of exported wheels")
        built.add_argument("--ca", type=_place, help="certificates for a machine behind a proxy")
        built.add_argument("--network", help='of the steps that fetch, if it is not the builder\'s own: "host"')
    verb("patches", _patches, target=False)
    verb("build", _build, mirror=True, sm=True)
    verb("smoke", _smoke, mirror=True, sm=True)
    kept = verb("promote", _promote)
    kept.add_argument(
        "--from",
        dest="folder",
        type=_place,
        help="outcomes.json, smoke.log, manifest.json of a run elsewhere",
    )
    kept.add_argument("--built", action="store_true", help="only that it was built: manifest.json, without any claim")
    kept.add_argument("--record", type=_place, help="a file in smoke_tests/evidence/ that this commit's programs wrote")
    verb("changes", _changes, target=False)
    planted = verb("mutants", _mutants, mirror=True, sm=True)
    planted.add_argument("--seeds", type=int, default=100, help="of the runs on correct code (%(default)s)")
    planted.add_argument("--compile", action="store_true", help="compile the faults that are compiled, and stop")
    planted.add_argument("--from", dest="outcomes", type=_place, help="what a run elsewhere wrote to its --out")
    numbers = verb("bench", _bench, mirror=True, sm=True)
    numbers.add_argument("--only", action="append", default=[], metavar="KEY", help="cells whose key starts so")
    numbers.add_argument("--seconds", type=float, help="start nothing that would not end within this time")
    numbers.add_argument("--quick", action="store_true", help="few cells and pairs")
    numbers.add_argument("--list", action="store_true", help="the cells and what is known of them; measure nothing")
    numbers.add_argument("--from", dest="rows", type=_place, help="rows measured elsewhere: show them, measure nothing")
    numbers.add_argument("--promote", action="store_true", help="keep the rows and their pictures as evidence")
    fp8 = verb("recommend", _recommend, target=False)
    fp8.add_argument("config", metavar="CONFIG.json", help="as transformers writes it, or a name such as hare-1.1b")
    fp8.add_argument("--rows", type=_place, help="of `bench` (default: the committed ones of the newest torch)")
    fp8.add_argument("--tokens", type=int, default=16384, help="that a layer sees at once (%(default)s)")
    fp8.add_argument("--package", default="transformer-engine.delayed", help="FP8 by whom (%(default)s)")
    fp8.add_argument("--launch", default="graph", choices=bench.LAUNCHES, help="%(default)s")
    fp8.add_argument("--head", action="store_true", help="consider the head too")
    fp8.add_argument("--out", type=_place, help="write the JSON there instead of printing it")
    verb("shell", _shell, mirror=True, sm=True).add_argument(
        "command", nargs=argparse.REMAINDER, help="run this instead of a shell"
    )
    launched = verb("launch", _launch, target=False)
    launched.add_argument("run", help="a table of recipes/runs.toml")
    launched.add_argument("--as", dest="launcher", choices=runs.LAUNCHERS, default="torchrun", help="(%(default)s)")
    launched.add_argument("--float8", choices=tuple(runs.FLOAT8), help="the recipe of the linear layers")
    for name, meaning in (("hosts", "how many"), ("gpus", "of each host"), ("microbatch", "sequences"), ("steps", "")):
        launched.add_argument(f"--{name}", type=int, help=meaning or "of the optimizer")
    launched.add_argument("--checkpointing", choices=("none", "selective", "full"), help="of activations")
    launched.add_argument("--asynchronous", action="store_true", default=None, help="overlap tensor parallelism")
    launched.add_argument("--image", type=_text, default=f"ghcr.io/OWNER/fusebox:{runs.TARGET}", help="(%(default)s)")
    launched.add_argument(
        "--out", type=_text, default="out", help="a folder, or a volume claim, that all hosts share (%(default)s)"
    )
    verb("lock", _lock)
    verb("compat", _compat, target=False)
    raised = verb("bump", _bump, mirror=True)
    raised.add_argument("pin", metavar="PACKAGE==VERSION")
    verb("render", _render, target=False).add_argument("--check", action="store_true", help="fail instead of writing")
    verb("clean", _clean, target=False).add_argument(
        "--cache", action="store_true", help="the cache of downloads and wheels too"
    )
    wheels = verb("cache", _cache, target=False)
    wheels.add_argument("action", choices=("export", "import"))
    wheels.add_argument("folder", type=_place)
    return parser


def _listed(text: str) -> list[str]:
    parts = [part for part in text.split(",") if part]
    if text and not parts:  # an image's build argument that is not given is empty: those of the target
        raise argparse.ArgumentTypeError("names none")
    return parts


def _text(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("is empty")
    return text


def _place(text: str) -> Path:
    return Path(_text(text))


def _folder(text: str) -> Path:
    if not (path := _place(text)).is_dir():
        raise argparse.ArgumentTypeError(f"{path} is no folder")
    return path


def _chosen(options: argparse.Namespace) -> Plan:
    return plan(Catalogue(), options.target, getattr(options, "sm", None))


def _plan(options: argparse.Namespace) -> int:
    """Show what a target is made of and what it costs, or why it cannot be; --with asks whether something would fit."""
    catalogue = Catalogue()
    if not options.replaced:
        show(plan(catalogue, options.target, options.sm, options.python), Cache())
        return 0
    target = changed(catalogue.target(options.target), options.sm, options.python)
    verdict = consider(catalogue, target, dict(map(limits.what_if, options.replaced)))
    limits.refuse(verdict)
    told = verdict.reasons or ("nobody declared whether these fit; try, and add what you learn to limits.toml",)
    for reason in told:
        say(f"{verdict.word}: {reason}")
    return 0 if verdict.word == "allowed" else 3


def _compat(options: argparse.Namespace) -> int:
    """Print the compatibility matrix: every target against every release of every package, and why not."""
    matrix = grid(Catalogue())
    rows, reasons = render.grid_rows(matrix)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("package", *matrix.targets):
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(cell.replace("*", "") for cell in row))
    console.print(table)
    for number, reason in enumerate(reasons, 1):
        say(f"{number:3}  {reason}")
    return 0


def _fetch(options: argparse.Namespace) -> int:
    """Fetch and verify every source of a target."""
    chosen, cache = _chosen(options), Cache()
    if options.into and options.into.exists() and not options.into.is_dir():
        raise Refusal(f"--into {options.into} is not a folder: choose another place.")
    with Steps() as steps, cache.held(steps.wait):
        files = Builder(chosen, cache, steps, options.mirror, copies=bool(options.into)).fetch()
        if options.into and options.into.resolve() != cache.root:
            mirror = Cache(options.into.resolve())  # the layouts are the same
            with mirror.held(steps.wait):
                Builder(chosen, mirror, steps, cache.root, copies=True).fetch()
        steps.say("fetch", f"{chosen.target.name}: {len(files)} files verified", str(options.into or cache.root))
    return 0


def _patch(options: argparse.Namespace) -> int:
    """Fetch and patch every source of a target; --into lays out what the stages of its image build from."""
    chosen, cache = _chosen(options), Cache()
    with Steps() as steps, cache.held(steps.wait):
        builder = Builder(chosen, cache, steps, options.mirror)
        if options.into:
            image.lay_out(chosen, builder, options.into, options.wheelcache)
            return 0
        for name, tree in builder.trees(builder.fetch()).items():
            steps.say("patch", f"{name}: tree {tree.sha256[:12]}", str(tree.path))
    return 0


def _audit(options: argparse.Namespace) -> int:
    """Check the wheels that the stages of an image built, and write what its environment is made of."""
    image.gather(_chosen(options), options.out, options.wheels, options.built_in, options.into)
    return 0


def _image(options: argparse.Namespace) -> int:
    """Build a target's image with docker buildx, print its size by layer, and let it prove itself here."""
    chosen = _chosen(options)
    say(f"{image.tag(chosen.target)}: {image.build(chosen, _of_image(options))}")
    image.show(chosen)
    # As strangely as anyone will run it: an unknown user, nothing writable but /tmp, where Triton loads what it makes.
    strictly = ("--user=12345", "--read-only", "--tmpfs=/tmp:exec")
    return image.smoke(chosen.target, image.tag(chosen.target), *strictly)


def _publish(options: argparse.Namespace) -> int:
    """Build a target's image from the commit, push it by digest, prove what was pushed, and set its tags last."""
    chosen = _chosen(options)
    folder = publish.publish(chosen, _of_image(options), options.registry, evidence.against_moving(chosen))
    say(f"contents: {folder}/image.md")
    return 0


def _of_image(options: argparse.Namespace) -> image.Options:
    standins = {name: reference for name, _, reference in (text.partition("=") for text in options.standin)}
    if wrong := [text for text in options.standin if not all(text.partition("="))]:
        raise Refusal(f"--standin {wrong[0]} names no image to stand in: write NAME=REF.")
    sm = tuple(options.sm or ())
    return image.Options(standins, options.mirror, options.wheelcache, options.ca, sm, options.network)


def _patches(options: argparse.Namespace) -> int:
    """Show every patch: for which versions and targets, what became of it upstream, on what it is proved."""
    proof.show(Catalogue())
    return 0


def _installed(options: argparse.Namespace) -> tuple[Plan, Path]:
    """The target's environment, made if it is not there yet."""
    chosen, cache = _chosen(options), Cache()
    with Steps() as steps, cache.held(steps.wait):
        locked, wheels = Builder(chosen, cache, steps, options.mirror).wheels()
        return chosen, environment.install(chosen, locked, wheels, cache, steps)


def _build(options: argparse.Namespace) -> int:
    """Fetch, patch, compile and install a target's environment."""
    _, path = _installed(options)
    say(f"The environment is in {path}: source {path}/bin/activate")
    return 0


def _smoke(options: argparse.Namespace) -> int:
    """Build a target's environment and prove it on this machine; evidence goes to build/TARGET/evidence/."""
    chosen, path = _installed(options)
    return evidence.smoke(chosen, path)


def _promote(options: argparse.Namespace) -> int:
    """Copy the evidence of the last smoke run into smoke_tests/evidence/, to be committed, and render the tables."""
    chosen = _chosen(options)
    if options.record:
        say(f"recorded {evidence.record(chosen.root, options.record)}")
        return render.write(Catalogue())
    if options.built:
        say(f"promoted {evidence.keep_built(chosen, options.folder)}")
        return render.write(Catalogue())
    if options.folder:
        evidence.bring(chosen, options.folder)
    for path in evidence.promote(chosen):
        say(f"promoted {path}")
    return render.write(Catalogue())


def _changes(_: argparse.Namespace) -> int:
    """List what changed since each run of claims that is kept, and how many claims that concerns."""
    facts = render.Facts.of(Catalogue())
    for chosen, run in facts.runs:
        changed = evidence.changes(evidence.built_for(chosen, run), facts.room, run)
        say(f"{run['name']}, since {run['commit']}: {'nothing changed' if not changed else ''}")
        for name, rows in sorted(changed.items()):
            claims = sorted({row.split("[")[0] for row in rows})
            say(f"    {name}: {len(rows)} rows of {len(claims)} claims, such as {claims[0]}")
    return 0


def _mutants(options: argparse.Namespace) -> int:
    """Plant faults in a target's environment to see that claims catch them; keep the outcomes, render the tables."""
    if options.outcomes:
        mutants.keep(_chosen(options), options.outcomes)
        return render.write(Catalogue())
    chosen, path = _installed(options)
    cache = Cache()
    with Steps() as steps, cache.held(steps.wait):
        libraries = mutants.compiled(Builder(chosen, cache, steps, options.mirror))
    if options.compile:
        say(f"The compiled faults are in {libraries}: bring them along.")
        return 0
    code = mutants.run(chosen, path, libraries, options.seeds)
    render.write(Catalogue())
    return code


def _bench(options: argparse.Namespace) -> int:
    """Measure FP8 and fused operators in a target's environment; build/TARGET/bench/report.html shows the numbers."""
    if options.seconds is not None and not options.seconds > 0:
        raise Refusal(f"--seconds {options.seconds:g} leaves no time for anything: name more, or leave it out.")
    if options.rows:
        chosen, rows = _chosen(options), options.rows
    else:
        chosen, path = _installed(options)
        if options.list:
            return bench.listed(chosen, path, options.only, options.quick)
        rows = bench.measure(chosen, path, options.only, options.seconds, options.quick)
    say(f"report: {bench.report(chosen, rows)}")
    if not options.promote:
        return 0
    for kept in bench.promote(chosen, rows):
        say(f"promoted {kept}")
    return render.write(Catalogue())


def _recommend(options: argparse.Namespace) -> int:
    """Say which Linear layers of a model gain from FP8, by measured rows: JSON that bench/recommend.py filters by."""
    root = Catalogue().root
    rows = options.rows or bench.newest_committed(root)
    text = json.dumps(
        bench.recommend(root, options.config, rows, options.tokens, options.package, options.launch, options.head),
        indent=1,
    )
    if options.out:
        write_text(options.out, text + "\n")
    else:
        print(text)
    return 0


def _shell(options: argparse.Namespace) -> int:
    """Open a shell in a target's environment, or run one command in it."""
    chosen, path = _installed(options)
    given = options.command[1:] if options.command[:1] == ["--"] else options.command
    command = given or [os.environ.get("SHELL", "/bin/sh")]
    try:
        return subprocess.run(command, env=environment.run_variables(chosen.target, path), check=False).returncode
    except FileNotFoundError:
        raise Refusal(
            f"There is no command {command[0]!r} in the environment or on the PATH: check its name."
        ) from None
    except OSError as error:
        raise Refusal(f"{command[0]} cannot be run ({error.strerror}): name a program.") from None


def _launch(options: argparse.Namespace) -> int:
    """Print what starts a run on several GPUs: a script for torchrun or Slurm, or a manifest for Kubernetes."""
    changes = {name: getattr(options, name, None) for name in runs.Run.model_fields if name != "name"}
    run = runs.chosen(options.run, changes)
    print(runs.rendered(run, options.launcher, options.image, options.out), end="")
    return 0


def _lock(options: argparse.Namespace) -> int:
    """Resolve a target again: its dependencies (recipes/lock/TARGET.txt), and digests of its base that are missing."""
    chosen, cache = _chosen(options), Cache()
    with Steps() as steps, cache.held(steps.wait):
        steps.say("lock", chosen.target.name, str(lock.write(chosen, cache, steps)))
        found, missing = image.resolve(Catalogue().targets_file, chosen.target)
        for name, digest in found.items():
            steps.say("lock", name, digest)
        for reason in missing:
            steps.say("lock", chosen.target.name, reason)
    return 0


def _bump(options: argparse.Namespace) -> int:
    """Raise a pin of a target: release, pin, lock; says what becomes of its patches, whose proofs nox then runs."""
    cache, (package, version) = Cache(), limits.what_if(options.pin)
    with Steps() as steps, cache.held(steps.wait):
        for line in Bump(Catalogue().root, options.target, package, version).run(cache, steps, options.mirror):
            steps.say("todo", line)
        try:
            return render.write(Catalogue())
        except Refusal as refusal:  # until a patch is renewed, the new pin cannot be planned
            steps.say("todo", str(refusal))
            return 0


def _render(options: argparse.Namespace) -> int:
    """Write the tables of README and docs/ from data and promoted evidence, or check that they are current."""
    return render.check(Catalogue()) if options.check else render.write(Catalogue())


def _clean(options: argparse.Namespace) -> int:
    """Remove build/, and with --cache all downloads and wheels."""
    path, cache = Catalogue().root / "build", Cache()
    if path.exists():
        with disk_named(path):
            remove(path)
        say(f"removed {path}")
    if options.cache and cache.root.exists():
        with Steps() as steps, cache.held(steps.wait):
            cache.clear()
            steps.say("clean", "all downloads and wheels", str(cache.root))
    return 0


def _cache(options: argparse.Namespace) -> int:
    """Export built wheels to a folder, or import them from one, each checked by hash."""
    cache = Cache()
    with Steps() as steps, cache.held(steps.wait):
        exporting = options.action == "export"
        count = build.export_wheels(cache, options.folder) if exporting else build.import_wheels(cache, options.folder)
        steps.say("cache", f"{count} wheels {options.action}ed", str(options.folder))
    return 0


if __name__ == "__main__":
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:  # who read it, as `head` does, has enough
        code = 128 + signal.SIGPIPE
    os._exit(code)  # at once, also when a download still waits for a stalled server
