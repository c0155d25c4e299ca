"""Recipes: what each environment is made of (the TOML files), and the verbs that make it (the modules).

Data flows one way: model reads the TOML; fetch, patch, build and audit turn pins into wheels; environment installs
them; evidence keeps what the smoke tests proved; render writes the tables. `python -m recipes VERB` runs one verb.
"""

import sys

if sys.version_info < (3, 11):
    sys.exit(
        "fusebox: the tool needs Python 3.11 or newer, and this is %d.%d: run nox with a newer one."
        % sys.version_info[:2]
    )
