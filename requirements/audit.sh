#!/usr/bin/env bash
# Ask PyPI's advisories about every package that we pin. Fails for a known vulnerability, and where nothing could be asked.
set -euo pipefail
cd "$(dirname "$0")/.."
source requirements/audit-environment.sh
pins=$(mktemp)
trap 'rm -f "$pins"' EXIT
found=0
# PyPI knows nothing of PyTorch's CPU build, which has the code of its own.
for name in serve client triton export demo dev torch-pypi uv; do
  grep -v -- --hash "requirements/$name.txt" | tr -d ' \\' > "$pins"
  echo "audit: $(grep -c == "$pins") packages of requirements/$name.txt"
  # --strict: what could not be asked about counts as found.
  "$environment/bin/pip-audit" --strict --no-deps --disable-pip --progress-spinner off --requirement "$pins" \
    2> >(grep -v '^WARNING' >&2) || found=1
done
exit "$found"
