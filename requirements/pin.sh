#!/usr/bin/env bash
# Resolve cpu.in and serve.in, each in an empty environment, and write every version to cpu.txt and serve.txt.
set -euo pipefail
cd "$(dirname "$0")"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

resolve() {
  local name=$1 what=$2
  shift 2
  "${PYTHON:-python3.11}" -m venv "$folder/$name"
  "$folder/$name/bin/pip" install --quiet --requirement "$name.in" "$@"
  "$folder/$name/bin/pip" install --quiet --no-deps --requirement "$name-no-deps.in"
  {
    echo "# $what, written by \`make pins\` from $name.in and $name-no-deps.in."
    echo "# Install with --no-deps (docs/decisions/0001-pins-without-dependencies.md)."
    "$folder/$name/bin/pip" freeze --all --exclude pip --exclude wheel
  } > "$name.txt.new"
  mv "$name.txt.new" "$name.txt"
}

resolve cpu "The whole CPU environment"
resolve serve "What deploy/Dockerfile installs" --constraint cpu.txt
