#!/usr/bin/env bash
# Resolve each .in in an empty environment, and write every version to the .txt of its name.
set -euo pipefail
cd "$(dirname "$0")"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

resolve() {
  local name=$1 what=$2
  shift 2
  "${PYTHON:-python3.11}" -m venv "$folder/$name"
  "$folder/$name/bin/pip" install --quiet --requirement "$name.in" "$@"
  local inputs=$name.in
  if [ -e "$name-no-deps.in" ]; then
    inputs="$inputs and $name-no-deps.in"
    "$folder/$name/bin/pip" install --quiet --no-deps --requirement "$name-no-deps.in"
  fi
  {
    echo "# $what, written by \`make pins\` from $inputs."
    echo "# Install with --no-deps (docs/decisions/0001-pins-without-dependencies.md)."
    "$folder/$name/bin/pip" freeze --all --exclude pip --exclude wheel
  } > "$name.txt.new"
  mv "$name.txt.new" "$name.txt"
}

resolve cpu "The whole CPU environment"
resolve serve "What deploy/Dockerfile installs" --constraint cpu.txt
resolve bench "The servers that \`make bench\` compares ours with"
resolve bench-mlserver "MLServer, for \`make bench\`"
resolve audit "What \`make audit\` runs"
