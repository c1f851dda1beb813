#!/usr/bin/env bash
# Change the code of a part, $1, and list the changes that no test notices; of all parts, one after another, where there
# is none. What follows are names of changes, such as 'export.rows.table_error*'; all of the part by default.
set -euo pipefail
cd "$(dirname "$0")/.."

# mutmut, whose packages are not ours, before those of .venv.
environment=$PWD/.bench/mutants
if [ ! "$environment/.installed" -nt requirements/mutants.txt ]; then
  rm -rf "$environment"
  "${PYTHON:-python3.11}" -m venv "$environment"
  requirements/install.sh "$environment" mutants.txt
  packages=$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  echo "import site; site.addsitedir('${packages/#$environment/$PWD\/.venv}')" > "$packages/environment.pth"
  touch "$environment/.installed"
fi

mapfile -t parts < <("$environment/bin/python" -c '
import sys, tomllib
print("\n".join(tomllib.load(open("pyproject.toml", "rb"))["tool"]["mutmut"]["parts"]))')
if [ -n "${1-}" ]; then
  if [[ " ${parts[*]} " != *" $1 "* ]]; then
    echo "mutants: expected a part of ${parts[*]}, got $1" >&2
    exit 2
  fi
  parts=("$1")
fi
shift || true

for part in "${parts[@]}"; do
  echo "mutants of $part"
  # A copy of the part's own: what is edited here in the hours that it takes does not reach it.
  rm -rf "mutants/$part"
  mkdir -p "mutants/$part"
  git ls-files -z --cached --others --exclude-standard |
    tar --create --null --ignore-failed-read --files-from=- | tar --extract --directory="mutants/$part"
  "$environment/bin/python" - "$part" <<'PYTHON'
import json, pathlib, sys, tomllib

file = pathlib.Path("mutants", sys.argv[1], "pyproject.toml")
text = file.read_text()
part = tomllib.loads(text)["tool"]["mutmut"]["parts"][sys.argv[1]]
keys = "".join(f"{key} = {json.dumps(value)}\n" for key, value in part.items())
file.write_text(text.replace("[tool.mutmut]\n", "[tool.mutmut]\n" + keys, 1))
PYTHON
  (
    cd "mutants/$part"
    "$environment/bin/mutmut" run --max-children "${CHILDREN:-2}" "$@"
    "$environment/bin/mutmut" results
  )
done
