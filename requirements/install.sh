#!/usr/bin/env bash
# Install pins into the environment at $1, from the locks named after it, each file compared with its hash; a line for
# whatever takes long. By uv where .venv has it, which downloads and unpacks several at a time, else by pip.
set -euo pipefail
environment=$(realpath --no-symlinks "$1")
shift
cd "$(dirname "$0")"
echo "setup: installing $(cat "$@" | grep -c ==) pinned packages"

if [ -x ../.venv/bin/uv ]; then
  said=$(mktemp)
  trap 'rm -f "$said"' EXIT
  if ./uv.sh "$environment/bin/pip" --no-progress "${@/#/--requirements=}" 2>&1 |
    tee "$said" | sed -unE 's#^ *(Downloading .*)#setup: \l\1#p'; then exit; fi
  echo "setup: uv could not: $(tail -n 1 "$said"). Asking pip" >&2
fi
PYTHONUNBUFFERED=1 "$environment/bin/pip" install --progress-bar off --no-deps --require-hashes "${@/#/--requirement=}" \
  2> >(grep -v '^WARNING: Location' >&2) |
  sed -unE 's#^ *Downloading ([^ ]*/)?([^ /]+ \([0-9.]+ MB\)).*#setup: downloading \2#p; s/^Installing collected.*/setup: unpacking/p'
