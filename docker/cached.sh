#!/usr/bin/env bash
# Run a compiler through ccache, which FUSEBOX_CCACHE names: it compiles nothing twice from the same inputs.
#
#   cached.sh COMPILER ARGUMENT...     as CMake calls a launcher
#   c++ ARGUMENT...                    through a link to this script that is named as a compiler; nvcc is CUDA_HOME's
set -euo pipefail
name=$(basename "$0")
# Take the folder of the links off PATH, because nvcc runs its host compiler itself.
export PATH=:$PATH:
PATH=${PATH//":$(dirname "$0"):"/:} PATH=${PATH#:} PATH=${PATH%:}
case $name in
  cached.sh) ;;
  nvcc) set -- "${CUDA_HOME:?the CUDA toolkit}/bin/nvcc" "$@" ;;
  *) set -- "$(type -P "$name")" "$@" ;;
esac
if [ "$(basename "$1")" = nvcc ]; then
  arguments=()
  for argument; do
    # ccache 4 knows only the short names of these, and otherwise runs nvcc each time.
    case $argument in
      --generate-dependencies-with-compile) argument=-MD ;;
      --dependency-output) argument=-MF ;;
    esac
    arguments+=("$argument")
  done
  set -- "${arguments[@]}"
  home=$(dirname "$(dirname "$1")")
  # nvcc is only a driver: these programs determine the machine code.
  for program in "$home/bin/ptxas" "$home/bin/cudafe++" "$home/bin/fatbinary" "$home/nvvm/bin/cicc"; do
    if [ -f "$program" ]; then export CCACHE_EXTRAFILES=${CCACHE_EXTRAFILES:+$CCACHE_EXTRAFILES:}$program; fi
  done
fi
exec "${FUSEBOX_CCACHE:?the program ccache}" "$@"
