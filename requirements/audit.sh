#!/usr/bin/env bash
# Ask PyPI's advisories about every package that we pin. Fails for a known vulnerability, and where nothing could be asked.
set -euo pipefail
cd "$(dirname "$0")/.."
environment=.bench/audit
if ! [ "$environment/.installed" -nt requirements/audit.txt ]; then
  rm -rf "$environment"
  "${PYTHON:-python3.11}" -m venv "$environment"
  "$environment/bin/pip" install --quiet --no-deps --requirement requirements/audit.txt
  touch "$environment/.installed"
fi
pins=$(mktemp)
trap 'rm -f "$pins"' EXIT
found=0
for name in cpu serve; do
  # PyPI knows no local versions: PyTorch's CPU build has the code of the other.
  sed -E 's/\+[a-z0-9]+$//' "requirements/$name.txt" > "$pins"
  echo "audit: $(grep -c == "$pins") packages of requirements/$name.txt"
  # --strict: what could not be asked about counts as found.
  "$environment/bin/pip-audit" --strict --no-deps --disable-pip --progress-spinner off --requirement "$pins" \
    2> >(grep -v '^WARNING' >&2) || found=1
done
exit "$found"
