#!/usr/bin/env bash
# A compiler behind ccache, which FUSEBOX_CCACHE names: what was compiled before from the same is not compiled again.
#
#   cached.sh COMPILER ARGUMENT...     as CMake calls a launcher
#   c++ ARGUMENT...                    through a link to this script that is named as a compiler; nvcc is CUDA_HOME's
set -euo pipefail
name=$(basename "$0")
# Without the folder of the links: nvcc runs its host compiler itself.
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
    # ccache 4 knows these under their short names alone, and otherwise runs nvcc each time.
    case $argument in
      --generate-dependencies-with-compile) argument=-MD ;;
      --dependency-output) argument=-MF ;;
    esac
    arguments+=("$argument")
  done
  set -- "${arguments[@]}"
  home=$(dirname "$(dirname "$1")")
  # nvcc is a driver: these are the programs that decide the machine code.
  for program in "$home/bin/ptxas" "$home/bin/cudafe++" "$home/bin/fatbinary" "$home/nvvm/bin/cicc"; do
    if [ -f "$program" ]; then export CCACHE_EXTRAFILES=${CCACHE_EXTRAFILES:+$CCACHE_EXTRAFILES:}$program; fi
  done
fi
exec "${FUSEBOX_CCACHE:?the program ccache}" "$@"
