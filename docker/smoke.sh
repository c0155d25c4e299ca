#!/usr/bin/env bash
# Prove this image on the machine that runs it: every claim about its packages, and what came of it. Arguments are
# pytest's: smoke -k fused, smoke --evidence /out/outcomes.json.
set -euo pipefail
cd "$(python -c 'import sys; print(sys.prefix)')/smoke_tests"
exec python -m pytest -p no:cacheprovider --no-header "$@"
