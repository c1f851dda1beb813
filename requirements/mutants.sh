#!/usr/bin/env bash
# Make the environment of `make mutants`: mutmut, whose packages are not ours, before those of .venv.
set -euo pipefail
cd "$(dirname "$0")/.."
environment=.bench/mutants
if [ "$environment/.installed" -nt requirements/mutants.txt ]; then exit; fi
rm -rf "$environment"
"${PYTHON:-python3.11}" -m venv "$environment"
requirements/install.sh "$environment" mutants.txt
echo "import site; site.addsitedir('$PWD/.venv/lib/python3.11/site-packages')" \
  > "$environment/lib/python3.11/site-packages/environment.pth"
touch "$environment/.installed"
