"""Verbs that measure, recommend from measured rows, and start runs on several GPUs."""

from __future__ import annotations

import argparse
import json

from recipes.catalogue.load import Catalogue
from recipes.errors import Refusal
from recipes.files import write_text
from recipes.make import environment
from recipes.measure import bench as measuring
from recipes.measure import recommend as recommending
from recipes.measure import results, runs
from recipes.pages import render
from recipes.process import held
from recipes.progress import Steps, say
from recipes.verbs.arguments import Verbs, chosen, number, place, text
from recipes.verbs.environment import existing, installed


def register(verbs: Verbs) -> None:
    """Add these verbs with their arguments."""
    _register_bench(verbs)
    _register_recommend(verbs)
    _register_launch(verbs)


def _register_bench(verbs: Verbs) -> None:
    added = verbs.add("bench", bench, mirror=True, sm=True)
    added.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="KEY",
        help="only the cells whose key starts with KEY; repeat for several",
    )
    added.add_argument("--seconds", type=float, help="start no cell that would not finish within this time")
    added.add_argument("--quick", action="store_true", help="measure few cells, a few times each")
    added.add_argument(
        "--list", action="store_true", help="list the cells and which of them are measured; build and measure nothing"
    )
    added.add_argument(
        "--from", dest="rows", type=place, help="show these rows, measured elsewhere, and measure nothing"
    )
    added.add_argument(
        "--promote", action="store_true", help="keep the rows and their pictures as evidence, and render the tables"
    )


def bench(options: argparse.Namespace) -> int:
    """Measure FP8 and fused operators in a target's environment, and write build/TARGET/bench/report.html."""
    if options.seconds is not None and not options.seconds > 0:
        raise Refusal(f"--seconds {options.seconds:g} leaves no time to measure: give more seconds, or omit it.")
    if options.list and not options.rows:
        return measuring.listed(*existing(options), options.only, options.quick)
    from recipes.measure import report  # matplotlib takes a second

    if options.rows:
        plan, rows = chosen(options), options.rows
    else:
        plan, path = installed(options)
        with held(environment.folder(plan.root, plan.target), Steps().wait):
            rows = measuring.measure(plan, path, options.only, options.seconds, options.quick)
    say(f"report: {report.report(plan, rows)}")
    if not options.promote:
        return 0
    for path in report.promote(plan, rows):
        say(f"promoted {path}")
    return render.write(Catalogue())


def _register_recommend(verbs: Verbs) -> None:
    added = verbs.add("recommend", recommend, target=False)
    added.add_argument(
        "config",
        metavar="CONFIG.json",
        help="a model's config.json as transformers writes it, or a name such as hare-1.1b",
    )
    added.add_argument(
        "--rows", type=place, help="a file of rows of `bench` (default: the committed one of the newest torch)"
    )
    added.add_argument(
        "--tokens", type=int, default=16384, help="how many tokens a layer processes at once (%(default)s)"
    )
    added.add_argument(
        "--package", default="transformer-engine.delayed", help="the package and recipe that compute FP8 (%(default)s)"
    )
    added.add_argument(
        "--launch", default="graph", choices=recommending.LAUNCHES, help="how kernels are launched (%(default)s)"
    )
    added.add_argument("--head", action="store_true", help="also consider the output layer (head)")
    added.add_argument("--out", type=place, help="write the JSON to this file instead of printing it")


def recommend(options: argparse.Namespace) -> int:
    """Print as JSON which linear layers of a model gain from FP8, according to measured rows."""
    root = Catalogue().root
    answer = recommending.recommend(
        root,
        options.config,
        rows=options.rows or results.newest_committed(root),
        tokens=options.tokens,
        package=options.package,
        launch=options.launch,
        head=options.head,
    )
    rendered = json.dumps(answer, indent=1)
    if options.out:
        write_text(options.out, rendered + "\n")
    else:
        print(rendered)
    return 0


def _register_launch(verbs: Verbs) -> None:
    added = verbs.add("launch", launch, target=False)
    added.add_argument("run", help="the run, a table of recipes/runs.toml")
    added.add_argument(
        "--as", dest="launcher", choices=runs.LAUNCHERS, default="torchrun", help="the launcher (%(default)s)"
    )
    added.add_argument("--float8", choices=tuple(runs.FLOAT8), help="the float8 recipe of the linear layers")
    for name, meaning in (
        ("hosts", "number of hosts"), ("gpus", "number of GPUs of each host"),
        ("microbatch", "sequences in a micro-batch"), ("steps", "number of optimizer steps")
    ):  # fmt: skip
        added.add_argument(f"--{name}", type=number, help=meaning)
    added.add_argument("--checkpointing", choices=("none", "selective", "full"), help="which activations to recompute")
    added.add_argument(
        "--asynchronous", action="store_true", default=None, help="overlap the communication of tensor parallelism"
    )
    added.add_argument(
        "--image",
        type=text,
        help="the image that the hosts run, by digest (default: the one last published from this checkout)",
    )
    added.add_argument(
        "--fabric",
        type=_fabric,
        metavar="RESOURCE=COUNT",
        help="the network adapters that a host gets from Kubernetes, such as rdma/ib=8",
    )
    added.add_argument(
        "--out",
        type=text,
        default="out",
        help="a folder or volume claim that all hosts share, for checkpoints and logs (%(default)s)",
    )


def launch(options: argparse.Namespace) -> int:
    """Print the script (torchrun, Slurm) or the manifest (Kubernetes) that starts a run on several GPUs."""
    changes = {name: getattr(options, name, None) for name in runs.Run.model_fields if name != "name"}
    run = runs.chosen(options.run, changes)
    image = options.image or runs.published()
    print(runs.rendered(run, options.launcher, image, options.out, options.fabric), end="")
    return 0


def _fabric(value: str) -> runs.Fabric:
    try:
        return runs.Fabric.parsed(value)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
