#!/usr/bin/env bash
# Resolve each .in in an empty environment, and write every version, with the SHA-256 of all of its files that PyPI has,
# to the .txt of its name.
set -euo pipefail
cd "$(dirname "$0")"
python=${PYTHON:-python3.11}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

"$python" -m venv "$folder/uv"
"$folder/uv/bin/pip" install --quiet uv==0.13.9

hashed() { # what it is, and what of; reads requirements, and writes them with hashes
  local what=$1 inputs=$2
  shift 2
  echo "# $what, written by \`make pins\` from $inputs."
  echo "# Install with --no-deps (docs/decisions/0001-pins-without-dependencies.md)."
  "$folder/uv/bin/uv" pip compile --quiet --generate-hashes --no-header --no-annotate --python-version 3.11 \
    --no-emit-package pip --no-emit-package wheel "$@" -
}

resolve() {
  local name=$1 what=$2 inputs=$1.in
  shift 2
  "$python" -m venv "$folder/$name"
  "$folder/$name/bin/pip" install --quiet --requirement "$name.in" "$@"
  if [ -e "$name-no-deps.in" ]; then
    inputs="$inputs and $name-no-deps.in"
    "$folder/$name/bin/pip" install --quiet --no-deps --requirement "$name-no-deps.in"
  fi
  # torch apart, for it has two locks: PyTorch's CPU build, and PyPI's with all that it requires.
  "$folder/$name/bin/pip" freeze --all | grep -v '^torch==' | hashed "$what" "$inputs" --no-deps > "$name.txt.new"
  mv "$name.txt.new" "$name.txt"
}

resolve cpu "The whole CPU environment but torch"
hashed "PyPI's torch, and what it requires beside cpu.txt" cpu.in --constraint cpu.txt \
  $(sed -n 's/^\([A-Za-z0-9._-]*\)==.*/--no-emit-package \1/p' cpu.txt) < <(grep '^torch==' cpu.in) > torch-pypi.txt
resolve serve "What deploy/Dockerfile installs beside torch" --constraint cpu.txt
hashed "The tritonserver of a wheel, for deploy/debian.Dockerfile" cpu.in --no-deps \
  < <(grep '^nvidia-pytriton==' cpu.txt | tr -d ' \\') > triton.txt
resolve bench "The servers that \`make bench\` compares ours with, beside torch"
resolve bench-mlserver "MLServer, for \`make bench\`, beside torch"
resolve audit "What \`make audit\` runs"
resolve kube "What \`make kube\` checks manifests with"
resolve mutants "What \`make mutants\` runs, beside the environment"
