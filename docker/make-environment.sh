#!/usr/bin/env bash
# Make an environment of checked wheels, offline: a virtual environment at PREFIX, or a layer on the base's Python.
#
#   make-environment.sh PREFIX IN WHEELHOUSE...
#
# IN holds requirements.txt (one hash each), python (its command), options (of `uv venv`), what to copy into the
# environment (fusebox/, optional: the environment is then for running, not building, and the tests of dependencies are
# left out), and `replaced` (optional: the base image then provides packages; those named are uninstalled first, the
# others stay, and `pip check` must not get worse). If IN holds toolkit.txt and its wheels (toolkit/), the environment is
# also the CUDA toolkit to build with. If IN holds `provided` (a name and a version per line), the base must have exactly that.
set -euo pipefail
prefix=${1:?the environment} in=${2:?what it is made of}
shift 2
houses=("${@/#/--find-links=}")
scratch=$(mktemp -d)
export UV_NO_CONFIG=1 UV_CACHE_DIR=${UV_CACHE_DIR:-$scratch/uv} UV_LINK_MODE=hardlink UV_NO_PROGRESS=1 UV_NO_INSTALLER_METADATA=1
python=$(command -v "$(cat "$in/python")")      # a bare name would let uv take VIRTUAL_ENV's
wanted=$in/requirements.txt
install=(uv pip install --quiet --offline --no-index --no-deps --require-hashes "${houses[@]}")

if [ -e "$in/provided" ]; then      # another release would only be noticed when a package does not import
  while read -r name version; do
    has=$("$python" -c 'import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))' "$name" 2> /dev/null) || has=none
    if [ "$has" != "$version" ]; then
      echo "fusebox: $name $version comes with the base of this target, and this base has $has: build on the image that the Dockerfile names." >&2
      exit 3
    fi
  done < "$in/provided"
fi

if [ -e "$in/replaced" ]; then
  prefix=$("$python" -c 'import sys; print(sys.prefix)')
  "$python" -m pip --version > /dev/null
  "$python" -m pip --disable-pip-version-check check > "$scratch/before" || [ $? -eq 1 ]      # 1: something is unmet
  xargs --no-run-if-empty uv pip uninstall --break-system-packages --quiet --python "$python" < "$in/replaced"
  uv pip freeze --python "$python" | sed 's/^/^/; s/[=@ ].*/==/' | tr '[:upper:]_.' '[:lower:]--' > "$scratch/kept"
  wanted=$scratch/wanted
  grep --invert-match --file "$scratch/kept" "$in/requirements.txt" > "$wanted" || [ $? -eq 1 ]
  "${install[@]}" --break-system-packages --python "$python" -r "$wanted"
  "$python" -m pip --disable-pip-version-check check > "$scratch/after" || [ $? -eq 1 ]
  worse=$(grep --invert-match --line-regexp --fixed-strings --file "$scratch/before" "$scratch/after") || [ $? -eq 1 ]
  if [ -n "$worse" ]; then
    echo "fusebox: The installation breaks a requirement of the base (${worse%%$'\n'*}): choose versions that fit the base, and start again from its image." >&2
    exit 3
  fi
else
  xargs uv venv --quiet --relocatable --python "$python" "$prefix" < "$in/options"
  "${install[@]}" --python "$prefix/bin/python" -r "$wanted"
  if [ -e "$in/toolkit.txt" ]; then
    "${install[@]}" --find-links="$in/toolkit" --python "$prefix/bin/python" -r "$in/toolkit.txt"
    nvcc=$(echo "$prefix"/lib/python*/site-packages/nvidia/*/bin/nvcc)
    "$(dirname "$0")/assemble-toolkit.sh" "${nvcc%/bin/nvcc}"
  fi
  if [ -e "$in/fusebox" ]; then
    uv pip check --quiet --python "$prefix/bin/python"
    cd "$prefix"/lib/python*/site-packages
    for record in *.dist-info/RECORD; do
      name=${record%%-*}
      if [ -e "$in/fusebox/${name//_/-}.RECORD" ]; then continue; fi      # a pinned package stays whole
      sed -n 's|^\([^,"]*/tests/[^,"]*\),.*|\1|p' "$record" | xargs --delimiter='\n' rm -f
      sed -i '\|^[^,"]*/tests/[^,"]*,|d' "$record"
    done
    find . -type d -empty -delete
  fi
fi
if [ -e "$in/fusebox" ]; then cp -r "$in/fusebox" "$prefix/fusebox"; fi
rm -rf "$scratch"
