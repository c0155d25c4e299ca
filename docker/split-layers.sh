#!/usr/bin/env bash
# Split an environment into a folder for each layer of the image, by how rarely its files change:
#
#   split-layers.sh PREFIX OUT
#
# OUT/cuda gets NVIDIA's libraries, OUT/torch torch alone, OUT/packages the target's other packages, and OUT/dependencies
# the rest: the locked dependencies and Python's own files.
set -euo pipefail
prefix=$(realpath "${1:?the environment}") out=$(realpath "${2:?the folder for the layers}")
site=$(echo "$prefix"/lib/python*/site-packages)
cd /      # cp makes the folders above a relative path
mkdir -p "$out"/{cuda,torch,packages,dependencies}
for record in "$site"/*.dist-info/RECORD; do
  name=$(basename "$(dirname "$record")")
  name=$(echo "${name%%-*}" | tr '[:upper:]_.' '[:lower:]--')
  case $name in
    nvidia-*) layer=cuda ;;
    torch) layer=torch ;;
    *) if [ -e "$prefix/fusebox/$name.RECORD" ]; then layer=packages; else continue; fi ;;
  esac
  # RECORD quotes a path that contains a comma.
  sed -E 's/,[^,]*,[^,]*$//; s/^"(.*)"$/\1/' "$record" |
    (cd "$site" && xargs --delimiter='\n' realpath --no-symlinks --relative-to=/) >> "$out/$layer.files"
done
find "${prefix#/}/fusebox" -type f >> "$out/packages.files"
for layer in cuda torch packages; do
  if [ -e "$out/$layer.files" ]; then      # two wheels may hold one file
    sort --unique "$out/$layer.files" |
      xargs --delimiter='\n' cp --archive --link --parents --target-directory="$out/$layer"
  fi
done
cat "$out"/*.files | xargs --delimiter='\n' rm --force
rm "$out"/*.files
find "$prefix" -mindepth 1 -type d -empty -delete
mkdir -p "$out/dependencies$(dirname "$prefix")"
mv "$prefix" "$out/dependencies$prefix"
