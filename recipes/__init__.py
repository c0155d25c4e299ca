"""Recipes: what each environment is made of (the TOML files), and the tool that makes it (the packages).

catalogue/ reads the TOML; make/ turns pins into wheels and an environment; prove/ runs the claims and keeps their
outcomes; ship/ builds images; measure/ turns measured rows into numbers; pages/ renders all of it; verbs/ is the
command line, `python -m recipes VERB`. Each imports those before it: docs/maintain/architecture.md has the picture.
"""

import sys

if sys.version_info < (3, 11):
    sys.exit(
        "fusebox: the tool needs Python 3.11 or newer, and this is %d.%d: run nox with a newer one."
        % sys.version_info[:2]
    )
