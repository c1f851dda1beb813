#!/usr/bin/env bash
# Print the lock of the torch that pip, $1, can have: PyTorch's CPU build where an index or a folder has it, else PyPI's.
set -euo pipefail
pip=$1
here=$(dirname "$0")
lock=$here/torch-cpu.txt
build=$(sed -n 's/^\(torch==[^ ]*\).*/\1/p' "$lock")
said=$(mktemp)
trap 'rm -f "$said"' EXIT
# uv asks for less: pip downloads all of torch before it says that it could.
if [ -x "$here/../.venv/bin/uv" ] && "$here/uv.sh" "$pip" --dry-run --reinstall --requirements "$lock" >"$said" 2>&1 ||
  "$pip" install --dry-run --ignore-installed --no-deps --require-hashes --requirement "$lock" >"$said" 2>&1; then
  echo "setup: taking $build, PyTorch's CPU build: an index or a folder that pip knows has it" >&2
  echo torch-cpu.txt
elif grep -qE 'No matching distribution found for torch|ResolutionImpossible' "$said"; then # the latter beside constraints
  echo "setup: taking PyPI's torch and the CUDA packages that it requires (4.8 GB on disk): nothing that pip knows has" \
    "$build, PyTorch's CPU build. To have that, name PyTorch's CPU wheel index in PIP_EXTRA_INDEX_URL, or a folder with" \
    "the wheel in PIP_FIND_LINKS" >&2
  echo torch-pypi.txt
else
  tail -n 3 "$said" >&2
  exit 1
fi
