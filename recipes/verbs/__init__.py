"""The verbs of `python -m recipes`: their arguments, what they do, and what they print.

A module of this folder has a function for each of its verbs, whose docstring is the verb's help, and `register`, which
adds the verbs with their arguments.
"""

from __future__ import annotations

import argparse
import importlib

from recipes.verbs.arguments import Verbs

# Module -> its verbs. Only the module of the given verb is imported; all of them are, to list the verbs.
MODULES = {
    "make": ("plan", "fetch", "build", "shell", "lock", "bump", "cache", "clean"),
    "stages": ("patch", "audit"),
    "ship": ("image", "publish", "carry", "verify", "rollback"),
    "wheels": ("wheels", "claims", "index"),
    "prove": ("patches", "smoke", "promote", "changes", "mutants"),
    "measure": ("bench", "recommend", "launch"),
    "pages": ("compat", "render"),
    "doctor": ("doctor",),
    "upstream": ("outdated", "new-package", "new-target"),
}


def parser(verb: str) -> argparse.ArgumentParser:
    """The parser of one verb, or of all of them if the word is not a verb."""
    whole = argparse.ArgumentParser(
        prog="python -m recipes",
        description="Build, prove, measure and publish Fusebox's targets. nox calls these verbs.",
    )
    verbs = Verbs(whole.add_subparsers(required=True, metavar="VERB"))
    chosen = [module for module, names in MODULES.items() if verb in names]
    for module in chosen or MODULES:
        importlib.import_module(f"recipes.verbs.{module}").register(verbs)
    return whole
