#!/usr/bin/env bash
# Resolve cpu.in in an empty environment and write every version to cpu.txt.
set -euo pipefail
cd "$(dirname "$0")"
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
"${PYTHON:-python3.11}" -m venv "$environment"
"$environment/bin/pip" install --quiet --requirement cpu.in
"$environment/bin/pip" install --quiet --no-deps --requirement cpu-no-deps.in
{
  echo "# The whole CPU environment, written by \`make pins\` from cpu.in and cpu-no-deps.in."
  echo "# Install with --no-deps (docs/decisions/0001-cpu-pins.md)."
  "$environment/bin/pip" freeze --all --exclude pip --exclude wheel
} > cpu.txt.new
mv cpu.txt.new cpu.txt
