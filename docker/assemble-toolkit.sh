#!/usr/bin/env bash
# The CUDA toolkit that lies in an environment as wheels becomes one folder that compilers understand: CUDA_HOME.
#
#   assemble-toolkit.sh CUDA_HOME
#
# The wheels put bin, include, lib and nvvm into nvidia/cuNN of site-packages. They leave out the names that linkers
# look for (libX.so), the folder in which nvcc looks for them (lib64), and cuDNN and NCCL, which have folders of their own.
set -euo pipefail
shopt -s nullglob
cd "${1:?the folder nvidia/cuNN of an environment}"
for part in cudnn nccl; do
  for kind in include lib; do
    for file in ../"$part/$kind"/*; do ln -sfn "../$file" "$kind/"; done
  done
done
for library in lib/lib*.so.*; do
  name=${library%%.so.*}.so
  [ -e "$name" ] || ln -s "$(basename "$library")" "$name"
done
ln -sfn lib lib64
