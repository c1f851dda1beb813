#!/usr/bin/env bash
# Make the environments of the servers that ours is compared with. One that cannot be made is absent from the comparison.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3.11}

install() { # an environment, and its locks
  local environment=.bench/$1
  shift
  if [ -e "$environment/.installed" ] && [ "$environment/.installed" -nt "requirements/$1" ]; then return; fi
  echo "bench: making $environment"
  rm -rf "$environment"
  "$python" -m venv "$environment" && requirements/install.sh "$environment" "$@" && touch "$environment/.installed" && return
  rm -rf "$environment"
  echo "bench: $environment could not be made: its servers will be absent" >&2
}

mkdir -p .bench
torch=$(requirements/torch.sh .venv/bin/pip)
install peers bench.txt "$torch"
install mlserver bench-mlserver.txt "$torch"
