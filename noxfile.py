"""The commands of this checkout. A session is an environment plus one verb of `python -m recipes`.

nox -s "smoke(cpu)"      build the target `cpu` and prove it on this machine
nox -s tests             test Fusebox itself
nox -l                   everything else
"""

import functools
import os
import re
import sys
from pathlib import Path

if sys.version_info < (3, 11):
    sys.exit(
        "fusebox: the tool needs Python 3.11 or newer, and nox runs on %d.%d: install nox for a newer one."
        % sys.version_info[:2]
    )

import nox


def loaded(path):
    """Read a TOML file; if it cannot be read, nox ends with one sentence."""
    try:
        return nox.project.load_toml(path)
    except (OSError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        sys.exit(f"fusebox: {path} cannot be read ({reason}): correct it, or run from a complete checkout of Fusebox.")


PROJECT = loaded("pyproject.toml")
# A value that is not a table, or a table that lacks a key, is refused by the verb that reads it.
TARGETS = {name: table for name, table in loaded("recipes/targets.toml").items() if isinstance(table, dict)}

nox.options.sessions = []  # bare `nox` runs nothing costly
nox.options.reuse_venv = "yes"
nox.options.default_venv_backend = "virtualenv"  # its pip reads the user's pip configuration

for_each_target = nox.parametrize("target", list(TARGETS), ids=list(TARGETS))
# `nox -l --json -s publish` is CI's matrix: every image that is published, with its runner as the tag.
for_each_published = nox.parametrize(
    "target",
    [
        nox.param(name, id=name, tags=[str(table.get("runner", ""))])
        for name, table in TARGETS.items()
        if table.get("publish")
    ],
)


def install(session, group):
    """Install a dependency group, unless this environment already has exactly that."""
    requirements = nox.project.dependency_groups(PROJECT, group)
    stamp = Path(session.virtualenv.location, f"{group}.txt")
    if not stamp.exists() or stamp.read_text() != "\n".join(requirements):
        session.install("--quiet", *requirements)
        stamp.write_text("\n".join(requirements))


@nox.session
def tool(session):
    """The environment in which all verbs run."""
    install(session, "tool")


# The verbs have no environment of their own: they share the one of the session `tool`, which runs first.
verb = functools.partial(nox.session, venv_backend="none", requires=["tool"])


def recipes(session, *arguments):
    """Run one verb. After Ctrl-C it gives its processes 5 seconds (recipes/process.py), so it needs more itself."""
    python = session.cache_dir.parent / "tool" / "bin" / "python"
    session.run(python, "-m", "recipes", *arguments, external=True, interrupt_timeout=10, terminate_timeout=2)


@verb()
def plan(session):
    """Show what a target contains and costs: nox -s plan -- cpu [--sm 9.0] [--python 3.12] [--with torchao==0.16]."""
    recipes(session, "plan", *session.posargs)


@verb()
def doctor(session):
    """Say what this machine lacks, or what an error text means: nox -s doctor -- [TARGET] [--error FILE]."""
    recipes(session, "doctor", *session.posargs)


@verb()
@for_each_target
def fetch(session, target):
    """Fetch and verify every source; -- --into DIR fills a mirror folder with them."""
    recipes(session, "fetch", target, *session.posargs)


@verb()
@for_each_target
def patch(session, target):
    """Fetch every source and apply its patches."""
    recipes(session, "patch", target, *session.posargs)


@verb()
def patches(session):
    """Show all patches: their versions and targets, whether upstream has them, and what they were proved on."""
    recipes(session, "patches", *session.posargs)


@verb()
@for_each_target
def build(session, target):
    """Fetch, patch, compile and install the environment: build/TARGET/env."""
    recipes(session, "build", target, *session.posargs)


@verb()
@for_each_target
def smoke(session, target):
    """Build the environment and prove it on this machine; -- --mirror DIR looks in a folder before the network."""
    recipes(session, "smoke", target, *session.posargs)


@verb()
@for_each_target
def image(session, target):
    """Build the image with docker and run its claims in it; -- [--standin NAME=REF] [--mirror DIR] [--ca FILE]."""
    recipes(session, "image", target, *session.posargs)


@verb()
@for_each_published
def publish(session, target):
    """Push the image by digest, prove what was pushed, then tag it: -- --registry HOST[:PORT][/PATH] [as for image]."""
    recipes(session, "publish", target, *session.posargs)


# `nox -s wheels -- --for torch==2.11.0` asks once for all targets, and so does `--missing INDEX`.
@verb()
@(nox.parametrize("target", ["cpu"], ids=["all"]) if {"--for", "--missing"} & {*sys.argv} else for_each_target)
def wheels(session, target):
    """Collect the wheels that the target builds or patches; or: nox -s wheels -- --for torch==2.11.0 --python 3.12."""
    recipes(session, "wheels", target, *session.posargs)


@verb()
def claims(session):
    """Make the wheel fusebox-claims, which proves an environment that Fusebox did not build: -- [--key KEY]."""
    recipes(session, "claims", *session.posargs)


@verb()
def index(session):
    """Make a static package index of all collected wheels in build/index; -- [--from DIR] [--key cosign.pub]."""
    recipes(session, "index", *session.posargs)


@verb()
def carry(session):
    """Write a pushed image as parts, to prove it on a machine without a registry: -- NAME@DIGEST --into DIR."""
    recipes(session, "carry", *session.posargs)


@verb()
def verify(session):
    """Verify an image or a wheel, what is in it and its claims: -- NAME@DIGEST or FILE.whl --key cosign.pub."""
    recipes(session, "verify", *session.posargs)


@verb()
def rollback(session):
    """Move a target's floating tag back to an image published before: -- NAME@DIGEST --key cosign.pub."""
    recipes(session, "rollback", *session.posargs)


@verb()
@for_each_target
def promote(session, target):
    """Keep the evidence of a run of the claims, and render the tables; -- [--from DIR] [--built] [--record FILE]."""
    recipes(session, "promote", target, *session.posargs)


@verb()
def changes(session):
    """List what has changed since each committed run, record and proof, and what that affects."""
    recipes(session, "changes", *session.posargs)


@verb()
@for_each_target
def mutants(session, target):
    """Plant faults to see if the claims catch them, and try 100 seeds on correct code; -- [--changed] [--seeds N]."""
    recipes(session, "mutants", target, *session.posargs)


@verb()
@for_each_target
def bench(session, target):
    """Measure what FP8 and fused operators gain here: -- [--list] [--quick] [--only KEY] [--seconds N] [--promote]."""
    recipes(session, "bench", target, *session.posargs)


@verb()
def recommend(session):
    """Say which layers of a model gain from FP8: nox -s recommend -- config.json [--tokens N] [--launch graph]."""
    recipes(session, "recommend", *session.posargs)


@verb()
@for_each_target
def shell(session, target):
    """Open a shell in the environment, or run one command: -- python -c 'import torch'."""
    recipes(session, "shell", target, *session.posargs)


@verb()
def launch(session):
    """Print the script or manifest of a run: -- NAME [--as slurm] [--float8 rowwise] [--hosts N] [--gpus N]."""
    recipes(session, "launch", *session.posargs)


@verb()
def lock(session):
    """Resolve a target's dependencies: nox -s lock -- cpu [--upgrade]; also of the tool (tool) and the bases (apt)."""
    recipes(session, "lock", *session.posargs)


@nox.session
def bump(session):
    """Pin another release and run its patches' proofs: nox -s bump -- cpu torchao==0.19.0; or base images: --bases."""
    install(session, "tests")
    session.run("python", "-m", "recipes", "bump", *session.posargs)
    pin = next((word for word in session.posargs if "==" in word), "")  # there is no pin with --help
    package = re.sub(r"[-_.]+", "-", pin.partition("==")[0].strip()).lower()  # as folders are named (PEP 503)
    if package and Path("patches", package).is_dir():
        session.run("python", "-m", "pytest", f"patches/{package}")


@verb()
def outdated(session):
    """Ask upstream for newer releases than the pins; show what limits and patches say; -- [TARGET] [--json FILE]."""
    recipes(session, "outdated", *session.posargs)


@verb(name="new-package")
def new_package(session):
    """Write the recipe of a release on the package index: -- NAME==VERSION [--target TARGET] [--source]."""
    recipes(session, "new-package", *session.posargs)


@verb(name="new-target")
def new_target(session):
    """Copy a target under another name: -- NAME --like TARGET [--without PACKAGE] [--reason TEXT]."""
    recipes(session, "new-target", *session.posargs)


@verb()
def compat(session):
    """Print which releases each target allows, which it refuses and why, and which are unknown."""
    recipes(session, "compat", *session.posargs)


@verb()
def render(session):
    """Write the tables of README and docs/, and all other rendered files; -- --check fails if they are not current."""
    recipes(session, "render", *session.posargs)


@verb()
def cache(session):
    """Copy built wheels to another machine: nox -s cache -- export DIR here, nox -s cache -- import DIR there."""
    recipes(session, "cache", *session.posargs)


@verb()
def clean(session):
    """Remove build/; -- --cache removes downloads and wheels too."""
    recipes(session, "clean", *session.posargs)


@nox.session
def tests(session):
    """Test Fusebox itself: -- [FILE]; with slow tests and the proofs of patches: -- --all [--newest]."""
    install(session, "tests")
    chosen = [word for word in session.posargs if word != "--all"]
    # Each free process takes the next test in order; the slow ones come first. A third of a test is waiting.
    processes = max(2, len(os.sched_getaffinity(0)) * 3 // 2)
    spread = ["-n", str(processes), "--dist", "loadgroup", "--durations", "15"]
    if "--all" in session.posargs:
        chosen = [*spread, *chosen, "recipes/tests", "patches"]
    elif not chosen:
        chosen = [*spread, "-m", "not slow", "recipes/tests"]
    # The tests start the tool hundreds of times; Python should not compile it each time.
    bytecode = {"PYTHONDONTWRITEBYTECODE": None}
    session.run("python", "-m", "compileall", "-q", "recipes", "smoke_tests", env=bytecode, silent=True)
    plugins = ["-p", "recipes.tests.timing", "-p", "recipes.tests.selection", "-p", "recipes.tests.groups"]
    session.run("python", "-m", "pytest", *plugins, *chosen, env=bytecode)


@nox.session
def docs(session):
    """Build the documentation as a site in build/site; a broken link or anchor fails the build."""
    install(session, "docs")
    session.run("python", "-m", "recipes.pages.site", "build/docs")
    session.run("zensical", "build", "--clean", "--strict", *session.posargs)


@nox.session
def lint(session):
    """Run every linter and type checker (pre-commit)."""
    install(session, "lint")
    session.run("pre-commit", "run", "--all-files", *session.posargs, external=False)
