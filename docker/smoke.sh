#!/usr/bin/env bash
# Prove this image on the machine that runs it: every claim about its packages, and what came of it. Arguments are
# pytest's: smoke -k fused, smoke --evidence /out/outcomes.json.
set -euo pipefail
cd /opt/fusebox/smoke_tests
exec python -m pytest -p no:cacheprovider --no-header "$@"
