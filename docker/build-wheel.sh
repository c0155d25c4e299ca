#!/usr/bin/env bash
# One patched source becomes one wheel, offline: the same on a bare machine and in an image.
#
#   build-wheel.sh IN SOURCE OUT
#
# IN says how: build.env (its variables, a line each), options (arguments of setup.py, a line each), subfolder (the part of
# SOURCE that is built), mib_per_job and parallel_extensions (a variable, or nothing). VIRTUAL_ENV is the environment to
# build in. The CUDA toolkit is the one among its wheels, else the one that CUDA_HOME names, else the one of nvcc on the
# PATH. Beside SOURCE, home/ and tmp/ are made, and jobs, which says how many compile at a time.
set -euo pipefail
in=${1:?how to build} source=$(realpath "${2:?the patched source}") out=${3:?the folder for the wheel}
work=$(dirname "$source")
mkdir -p "$work/home" "$work/tmp"

# Nothing else of the caller's decides the wheel.
for name in $(compgen -e); do
  case $name in
    PATH | LD_LIBRARY_PATH | VIRTUAL_ENV | CUDA_HOME | SHELLOPTS | BASHOPTS) ;;
    *) unset "$name" ;;
  esac
done
export PATH=${VIRTUAL_ENV:?the environment to build in}/bin:$PATH
export HOME=$work/home TMPDIR=$work/tmp LC_ALL=C.UTF-8 PYTHONNOUSERSITE=1 PYTHONDONTWRITEBYTECODE=1
export SOURCE_DATE_EPOCH=315532800      # 1980-01-01, the oldest date that a zip file can hold
site=$(python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
while IFS= read -r line; do
  if [ -n "$line" ]; then export "${line//\{site\}/$site}"; fi
done < "$in/build.env"

# cuDNN's wheel leaves out the name that linkers look for (libX.so): they would take the system's cuDNN, or none.
for library in "$site"/nvidia/cudnn/lib/lib*.so.*; do
  if [ -e "$library" ] && [ ! -e "${library%%.so.*}.so" ]; then ln -s "${library##*/}" "${library%%.so.*}.so"; fi
done

nvcc=$(echo "$site"/nvidia/*/bin/nvcc)
if [ -x "$nvcc" ]; then export CUDA_HOME=${nvcc%/bin/nvcc}; fi
if [ -n "${CUDA_HOME:-}" ]; then export PATH=$CUDA_HOME/bin:$PATH; fi      # before any other nvcc

# As many jobs as there are cores, or as memory allows.
memory=$(awk '/MemTotal/ { print int($2 / 1024) }' /proc/meminfo)
for limit in /sys/fs/cgroup/memory.max /sys/fs/cgroup/memory/memory.limit_in_bytes; do
  if [ -r "$limit" ]; then
    memory=$(awk -v have="$memory" '$1 ~ /^[0-9]+$/ && $1 / 1048576 < have { have = int($1 / 1048576) } END { print have }' "$limit")
  fi
done
jobs=$((memory / $(cat "$in/mib_per_job")))
jobs=$((jobs < 1 ? 1 : jobs > $(nproc) ? $(nproc) : jobs))
echo "$jobs" > "$work/jobs"
export MAX_JOBS=$jobs CMAKE_BUILD_PARALLEL_LEVEL=$jobs      # else ninja takes all cores and two
at_a_time=$(cat "$in/parallel_extensions")
if [ -n "$at_a_time" ] && [ "$jobs" -ge 4 ]; then      # most extensions have two files to compile
  export MAX_JOBS=2 "$at_a_time=$((jobs / 2))"
fi

tree=$(realpath "$source/$(cat "$in/subfolder")")
# Neither where it was built gets into the wheel, nor where the environment is: headers of torch name their own file in
# messages. Of two options that fit, gcc takes the last. nvcc does not read CFLAGS, but starts gcc.
places=("-ffile-prefix-map=$work=/build" "-ffile-prefix-map=$VIRTUAL_ENV=/build/env")
# gcc writes its options into each object (section .GCC.command.line), where the audit reads them.
export CFLAGS="${CFLAGS:-} -frecord-gcc-switches ${places[*]}"
export NVCC_APPEND_FLAGS="${NVCC_APPEND_FLAGS:-} ${places[*]/#/-Xcompiler=}"
# nvcc writes the whole path of a file in two more places: the names of what is internal to it, and the table of lines. A
# file that defines nothing but templates for others has its process id in these names, too, so each defines a symbol.
if [ -x "$nvcc" ]; then
  echo 'extern "C" __attribute__((visibility("hidden"))) void FUSEBOX_SYMBOL() {}' > "$work/symbol.h"
  export FUSEBOX_WORK=$work FUSEBOX_NVCC=${PYTORCH_NVCC:-$nvcc}
  export PYTORCH_NVCC=$work/nvcc      # which torch.utils.cpp_extension compiles with
  cat > "$PYTORCH_NVCC" << 'END'
#!/usr/bin/env bash
options=()
for option; do
  case $option in
    -lineinfo) continue ;;
    "$FUSEBOX_WORK"/*.cu)
      path=${option#"$FUSEBOX_WORK"/}
      options+=(-Xcudafe "--orig_src_path_name=/build/$path")
      options+=(-include "$FUSEBOX_WORK/symbol.h" "-DFUSEBOX_SYMBOL=fusebox_$(md5sum <<< "$path" | cut -c1-32)")
      ;;
  esac
  options+=("$option")
done
exec "$FUSEBOX_NVCC" "${options[@]}"
END
  chmod +x "$PYTORCH_NVCC"
fi
# Debug information is large, and gcc does not make the same twice. Symbols that nobody links against name nvcc's temporary
# files, and these the process that made them.
export LDFLAGS="${LDFLAGS:-} -Wl,--strip-all"
# Versions come from the source, never from a git repository that happens to lie around it.
export GIT_CEILING_DIRECTORIES=$work
# deepspeed's setup.py makes its list of requirements from a set.
export PYTHONHASHSEED=0
export PIP_NO_INDEX=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

# Arguments of setup.py, for packages that read their switches from nowhere else.
mapfile -t options < "$in/options"
options=("${options[@]/#/--config-settings=--build-option=}")
exec python -m pip wheel --verbose --no-deps --no-build-isolation --no-cache-dir "${options[@]}" --wheel-dir "$out" "$tree"
