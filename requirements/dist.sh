#!/usr/bin/env bash
# Build the sdist and the wheel in build/dist, and check what PyPI would show of them.
set -euo pipefail
cd "$(dirname "$0")/.."
environment=.bench/release
if ! [ "$environment/.installed" -nt requirements/release.txt ]; then
  rm -rf "$environment"
  "${PYTHON:-python3.11}" -m venv "$environment"
  requirements/install.sh "$environment" release.txt
  touch "$environment/.installed"
fi
rm -rf build/dist
log=$(mktemp)
trap 'rm -f "$log"' EXIT
"$environment/bin/python" -m build --no-isolation --outdir build/dist . > "$log" 2>&1 || { cat "$log" >&2; exit 1; }
"$environment/bin/twine" check --strict build/dist/*
