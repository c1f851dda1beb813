#!/usr/bin/env bash
# Resolve each .in, and write every version, with the SHA-256 of all of its files that PyPI has, to the .txt of its name.
set -euo pipefail
cd "$(dirname "$0")"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

"${PYTHON:-python3.11}" -m venv "$folder/uv"
./install.sh "$folder/uv" uv.txt

compile() {
  "$folder/uv/bin/uv" pip compile --quiet --no-header --no-annotate --python-version "${version:-3.11}" "$@"
}

lock() { # its name, what it is, and what uv resolves
  local name=$1 what=$2
  shift 2
  {
    echo "# $what, written by \`make pins\` from $name.in."
    echo "# Install with --no-deps (docs/decisions/0001-pins.md)."
    compile --generate-hashes --no-emit-package pip --no-emit-package wheel "$@"
  } > "$folder/lock"
  cp "$folder/lock" "$name.txt"
}

without() { # the packages of locks: uv's options that leave them out
  sed -n 's/^\([A-Za-z0-9._-]*\)==.*/--no-emit-package \1/p' "$@"
}

# torch apart, for it has two locks: PyTorch's CPU build, and PyPI's with all that it requires.
ours=(--excludes excludes.in --no-emit-package torch)
# What shares an environment is resolved at once. A lock has what those before it have not.
ours+=(--overrides overrides.in)
compile "${ours[@]}" serve.in export.in dev.in > "$folder/all"
# Later versions of Python have to do with the same packages.
for version in 3.12 3.13; do
  compile "${ours[@]}" --constraints "$folder/all" serve.in export.in dev.in > "$folder/all-$version"
  if comm -13 <(sort "$folder/all") <(sort "$folder/all-$version") | grep .; then
    echo "pins: Python $version needs the packages above, which 3.11 does not: a lock of its own" >&2
    exit 1
  fi
done
unset version
ours+=(--constraints "$folder/all")
lock serve "What serves, beside torch and a tritonserver" "${ours[@]}" serve.in
lock client "What a client needs" "${ours[@]}" client.in
lock triton "The tritonserver of a wheel" --no-deps triton.in
# shellcheck disable=SC2046
lock export "What an export needs beside serve.txt" "${ours[@]}" export.in $(without serve.txt)
# Its data files are read; its code, which would need 60 packages, is not.
lock demo "What \`make demo\` needs beside export.txt" --no-deps demo.in
# shellcheck disable=SC2046
lock dev "What tests and checks need beside demo.txt" "${ours[@]}" dev.in $(without serve.txt triton.txt export.txt demo.txt)
# shellcheck disable=SC2046
lock torch-pypi "PyPI's torch, and what it requires beside serve.txt" torch-pypi.in --constraints serve.txt $(without serve.txt)
# Installed after the others, over their torch, torchrec and FBGEMM. What both stacks have is in the others alone.
grep -vE '^(torch|torchrec|fbgemm-gpu-cpu)==' "$folder/all" > "$folder/shared"
echo fbgemm-gpu > "$folder/cuda-build"
# shellcheck disable=SC2046
lock stack-2.14 "torch 2.14 and what was built for it" stack-2.14.in --excludes "$folder/cuda-build" \
  --constraints "$folder/shared" $(without <(cat "$folder/shared"))

lock uv "What installs packages" uv.in
lock bench "The servers that \`make bench\` compares ours with, beside torch" "${ours[@]:0:4}" bench.in
lock bench-mlserver "MLServer, for \`make bench\`, beside torch" "${ours[@]:0:4}" bench-mlserver.in
lock release "What \`make dist\` runs" release.in
lock audit "What \`make audit\` and \`make sbom\` run" audit.in
lock kube "What \`make kube\` checks manifests with" kube.in
lock mutants "What \`make mutants\` runs, beside the environment" mutants.in
