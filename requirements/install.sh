#!/usr/bin/env bash
# Install pins into the environment at $1, from the locks named after it, each file compared with its hash; a line for
# whatever takes long.
set -euo pipefail
pip=$(realpath --no-symlinks "$1")/bin/pip
shift
cd "$(dirname "$0")"
echo "setup: installing $(cat "$@" | grep -c ==) pinned packages"
PYTHONUNBUFFERED=1 "$pip" install --progress-bar off --no-deps --require-hashes "${@/#/--requirement=}" \
  2> >(grep -v '^WARNING: Location' >&2) |
  sed -unE 's#^ *Downloading ([^ ]*/)?([^ /]+ \([0-9.]+ MB\)).*#setup: downloading \2#p; s/^Installing collected.*/setup: unpacking/p'
