"""From a plan to an environment: fetch, patch, compile, audit, install."""
