#!/usr/bin/env bash
# One patched source tree becomes one wheel, offline, with the Python on PATH: the same on a bare machine and in an image.
#
#   build-wheel.sh TREE OUT [OPTION...]
#
# Everything else comes from the environment: the recipe's variables, MAX_JOBS, SOURCE_DATE_EPOCH.
set -euo pipefail
tree=${1:?the patched source tree} out=${2:?the folder for the wheel}
shift 2
# Arguments of setup.py, for packages that read their switches from nowhere else.
options=("${@/#/--config-settings=--build-option=}")

above=$(dirname "$(realpath "$tree")")
# gcc writes its options into each object (section .GCC.command.line), where the audit reads them; where it was built
# does not get into the wheel.
export CFLAGS="${CFLAGS:-} -frecord-gcc-switches -ffile-prefix-map=$above=/build"
# Debug information is large, and gcc does not make the same twice.
export LDFLAGS="${LDFLAGS:-} -Wl,--strip-debug"
# Versions come from the source, never from a git repository that happens to lie around it.
export GIT_CEILING_DIRECTORIES=$above
# deepspeed's setup.py makes its list of requirements from a set.
export PYTHONHASHSEED=0
export PIP_NO_INDEX=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PYTHONNOUSERSITE=1

exec python -m pip wheel --verbose --no-deps --no-build-isolation --no-cache-dir "${options[@]}" --wheel-dir "$out" "$tree"
