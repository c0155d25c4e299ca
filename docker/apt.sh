#!/usr/bin/env bash
# Install packages of the distribution exactly as locked for a base image; run `apt-get update` first:
#
#   apt.sh LOCK PACKAGE...
#
# LOCK (recipes/lock/apt/) has a line NAME=VERSION --hash=sha256:HASH for each package that may be installed; packages of
# the base stay as they are. APT=newest in the environment ignores the lock and takes what the distribution has today.
set -euo pipefail
lock=${1:?the lock}
shift
export DEBIAN_FRONTEND=noninteractive
if [ "${APT:-locked}" = newest ]; then
  exec apt-get install --yes --no-install-recommends "$@"
fi
wanted=/etc/apt/preferences.d/fusebox archives=/var/cache/apt/archives
sed -nE 's/^([^=#]+)=([^ ]+) --hash=.*/Package: \1\nPin: version \2\nPin-Priority: 990\n/p' "$lock" > "$wanted"
mkdir -p "$archives/partial"
apt-get install --yes --no-install-recommends --download-only "$@"
others=()
for package in "$archives"/*.deb; do
  [ -e "$package" ] || continue
  sum=$(sha256sum < "$package")
  if ! grep --quiet --fixed-strings -e "--hash=sha256:${sum%% *}" "$lock"; then
    # shellcheck disable=SC2016  # dpkg-deb's own variables
    others+=("$(dpkg-deb --show --showformat='${Package} ${Version}' "$package")")
  fi
done
if [ "${#others[@]}" -gt 0 ]; then
  echo "fusebox: ${others[0]}, which apt would install, is not in $(basename "$lock") (${#others[@]} such packages):" \
    "lock again with \`nox -s lock -- apt\`, or take what the distribution has with --build-arg APT=newest." >&2
  exit 2
fi
apt-get install --yes --no-install-recommends --no-download "$@"
rm "$wanted"
