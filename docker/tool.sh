#!/usr/bin/env bash
# The steps of the stages `sources` and `audit`, in the tool's own environment /tool.
#
#   tool.sh install          make that environment from recipes/lock/tool.txt, each file by its hash
#   tool.sh VERB ...         run a verb of the tool
#
# The secret `ca`, if there is one, holds the certificates of a machine behind a proxy.
set -euo pipefail
if [ -s /run/secrets/ca ]; then
  export PIP_CERT=/run/secrets/ca SSL_CERT_FILE=/run/secrets/ca GIT_SSL_CAINFO=/run/secrets/ca
fi
export FUSEBOX_CACHE=/cache PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONDONTWRITEBYTECODE=1

if [ "$1" = install ]; then
  python3 -m venv /tool
  /tool/bin/pip install --quiet --no-cache-dir --only-binary=:all: --require-hashes -r recipes/lock/tool.txt
else
  exec /tool/bin/python -m recipes "$@"
fi
