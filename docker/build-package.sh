#!/usr/bin/env bash
# Build one package of an image offline: IN (its patched source and how to build it) becomes the wheel in OUT.
#
#   build-package.sh IN OUT
#
# IN holds source/NAME (the tree) and what build-wheel.sh reads, or wheel/ if it was built from the same inputs before, or
# left_out.txt if the package has no kernels for the image's GPU architectures; OUT stays empty then.
# /needs/NAME holds the wheels of packages that its build needs. OUT gets the wheel, build.log and compiler.txt.
set -euo pipefail
in=${1:?what to build} out=${2:?the folder for the wheel}
mkdir -p "$out"
if [ -d "$in/wheel" ]; then
  cp "$in"/wheel/* "$out/"
  exit
fi
if [ -e "$in/left_out.txt" ]; then
  cat "$in/left_out.txt"
  exit
fi
export VIRTUAL_ENV=/opt/build
unset CUDA_HOME LD_LIBRARY_PATH      # a base may name its own
for need in /needs/*/*.whl; do
  [ -e "$need" ] && uv pip install --quiet --offline --no-deps --python "$VIRTUAL_ENV/bin/python" "$need"
done

work=/tmp/build      # always the same, since gcc writes the paths that it is given into the objects
mkdir -p "$work"
: > "$out/build.log"
cp -r "$in"/source/* "$work/"
source=$work/$(ls "$in/source")

nvcc=$(echo "$VIRTUAL_ENV"/lib/python*/site-packages/nvidia/*/bin/nvcc)      # which comes before the base's
if [ ! -x "$nvcc" ]; then nvcc=nvcc; fi
for compiler in c++ "$nvcc"; do
  if command -v "$compiler" > /dev/null; then "$compiler" --version | grep -E '[0-9]+\.[0-9]+'; fi
done > "$out/compiler.txt"
# The output of the compilers goes into the log; here, a line a minute shows their progress.
while sleep "${FUSEBOX_BEAT:-60}"; do
  echo "$((SECONDS / 60)) min, $(wc -l < "$out/build.log") lines: $(tail -n 1 "$out/build.log" | cut -c 1-100)"
done &
beat=$!
trap 'kill "$beat"; rm -rf "$work"' EXIT
if ! "$(dirname "$0")/build-wheel.sh" "$in" "$source" "$out" > "$out/build.log" 2>&1; then
  # Errors of a compiler, or of setup.py, whose traceback pip buries; status 1: no such line.
  grep -E -m 20 '(fatal )?error:|(Error|Exception): ' "$out/build.log" >&2 || [ $? -eq 1 ]
  tail -n 40 "$out/build.log" >&2
  exit 1
fi
if grep -E '[[:space:]]-m(arch|cpu|tune)=native([[:space:]]|$)' "$out/build.log" >&2; then
  echo "fusebox: it compiles with -march=native, which ties the wheel to this machine's CPU: turn it off." >&2
  exit 2
fi
