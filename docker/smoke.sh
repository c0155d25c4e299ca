#!/usr/bin/env bash
# Prove this image on the machine that runs it: every claim about its packages, with its outcome. Arguments are
# pytest's: smoke -k fused, smoke --evidence /out/outcomes.json.
set -euo pipefail
if ! probe=$(mktemp "${TMPDIR:-/tmp}/smoke.XXXXXX" 2> /dev/null); then
  echo "fusebox: ${TMPDIR:-/tmp} cannot be written, and the claims need it: run the container with --tmpfs /tmp:exec." >&2
  exit 2
fi
rm "$probe"
# List what others have installed on top of the image, since the claims are about the image's own packages.
python - /opt/fusebox/constraints.txt << 'END'
import importlib.metadata, re, sys

ours = dict(line.strip().split("==") for line in open(sys.argv[1]))
found = {re.sub("[-_.]+", "-", one.metadata["Name"]).lower(): one.version for one in importlib.metadata.distributions()}
changed = ["%s %s in place of %s" % (name, found.get(name, "nothing"), ours[name])
           for name in sorted(ours) if found.get(name) != ours[name]]
added = ["%s %s" % (name, found[name]) for name in sorted(set(found) - set(ours))]
for word, names in (("changed", changed), ("added", added)):
    if names:
        print("%s on top of the image: %s" % (word, ", ".join(names)), flush=True)
END
cd /opt/fusebox/smoke_tests
exec python -m pytest -p no:cacheprovider --no-header "$@"
