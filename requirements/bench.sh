#!/usr/bin/env bash
# Make the environments of the servers that ours is compared with. One that cannot be made is absent from the comparison.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3.11}

install() {
  local environment=.bench/$1 pins=requirements/$2
  if [ -e "$environment/.installed" ] && [ "$environment/.installed" -nt "$pins" ]; then return; fi
  echo "bench: installing $(grep -c == "$pins") pinned packages into $environment"
  rm -rf "$environment"
  "$python" -m venv "$environment" &&
    "$environment/bin/pip" install --quiet --no-deps --requirement "$pins" && touch "$environment/.installed" && return
  rm -rf "$environment"
  echo "bench: $environment could not be made: its servers will be absent" >&2
}

mkdir -p .bench
install peers bench.txt
install mlserver bench-mlserver.txt
