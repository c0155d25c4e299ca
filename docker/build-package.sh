#!/usr/bin/env bash
# One package of an image: IN (its patched source and how to build it) becomes the wheel in OUT, offline.
#
#   build-package.sh IN OUT
#
# IN holds source/NAME (the tree), build.env, options (arguments of setup.py, a line each), subfolder, mib_per_job; or
# wheel/, when it was built before from the same inputs. /needs/NAME holds the wheels of packages that it is built
# beside. OUT gets the wheel, build.log and compiler.txt.
set -euo pipefail
in=${1:?what to build} out=${2:?the folder for the wheel}
mkdir -p "$out"
if [ -d "$in/wheel" ]; then
  cp "$in"/wheel/* "$out/"
  exit
fi
export PATH=/opt/build/bin:$PATH VIRTUAL_ENV=/opt/build
# The CUDA toolkit of the environment's own wheels, if it has one, comes before any other nvcc.
nvcc=$(echo /opt/build/lib/python*/site-packages/nvidia/*/bin/nvcc)
toolkit=${nvcc%/bin/nvcc}
if [ -x "$nvcc" ]; then export PATH=$toolkit/bin:$PATH; fi
for need in /needs/*/*.whl; do
  [ -e "$need" ] && uv pip install --quiet --offline --no-deps --python /opt/build/bin/python "$need"
done

work=/tmp/build      # always the same, since gcc writes the folders that it was told into the objects
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/home" "$work/tmp"
cp -r "$in/source" "$work/source"
tree=$(echo "$work"/source/*)

# As many jobs as there are cores, or as memory allows.
memory=$(awk '/MemTotal/ { print int($2 / 1024) }' /proc/meminfo)
for limit in /sys/fs/cgroup/memory.max /sys/fs/cgroup/memory/memory.limit_in_bytes; do
  [ -r "$limit" ] && memory=$(awk -v have="$memory" '$1 ~ /^[0-9]+$/ && $1 / 1048576 < have { have = int($1 / 1048576) } END { print have }' "$limit")
done
jobs=$((memory / $(cat "$in/mib_per_job")))
jobs=$((jobs < 1 ? 1 : jobs > $(nproc) ? $(nproc) : jobs))

mapfile -t options < "$in/options"
site=$(python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
# Nothing but this decides the wheel.
clean=(env -i "PATH=$PATH" "VIRTUAL_ENV=$VIRTUAL_ENV" "HOME=$work/home" "TMPDIR=$work/tmp" "MAX_JOBS=$jobs"
  "CMAKE_BUILD_PARALLEL_LEVEL=$jobs" SOURCE_DATE_EPOCH=315532800 LC_ALL=C.UTF-8 PYTHONNOUSERSITE=1 PYTHONDONTWRITEBYTECODE=1)
if [ -x "$nvcc" ]; then clean+=("CUDA_HOME=$toolkit"); fi
while IFS= read -r line; do
  [ -n "$line" ] && clean+=("${line//\{site\}/$site}")
done < "$in/build.env"

for compiler in c++ nvcc; do
  if command -v "$compiler" > /dev/null; then "$compiler" --version | grep -E '[0-9]+\.[0-9]+'; fi
done > "$out/compiler.txt"
if ! "${clean[@]}" "$(dirname "$0")/build-wheel.sh" "$tree/$(cat "$in/subfolder")" "$out" "${options[@]}" > "$out/build.log" 2>&1; then
  # Of a compiler, or of setup.py, whose traceback pip buries; 1: no such line.
  grep -E -m 20 '(fatal )?error:|(Error|Exception): ' "$out/build.log" >&2 || [ $? -eq 1 ]
  tail -n 40 "$out/build.log" >&2
  exit 1
fi
if grep -E '[[:space:]]-m(arch|cpu|tune)=native([[:space:]]|$)' "$out/build.log" >&2; then
  echo "fusebox: it compiles with -march=native, which ties the wheel to this machine's CPU: turn it off." >&2
  exit 2
fi
