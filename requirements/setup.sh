#!/usr/bin/env bash
# Make the environment at $1, and install this project into it with what it needs to export, to serve and for `make demo`.
# $2 is the release of torch: 2.13, or one that has a lock, stack-$2.txt.
set -euo pipefail
cd "$(dirname "$0")/.."
environment=$1
stack=${2:-2.13}
python=${PYTHON:-python3.11}

fail() {
  echo "setup: $*" >&2
  exit 1
}

command -v "$python" >/dev/null || fail "$python is not on PATH; install Python 3.11 to 3.13 (Debian 12: apt install python3.11), or name it: make PYTHON=/path/to/python3.11"
found=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') || fail "$python does not run: the lines above say why"
case $found in 3.11 | 3.12 | 3.13) ;; *) fail "$python is Python $found; the pins are for 3.11 to 3.13" ;; esac

if [ "$stack" != 2.13 ] && ! [ -f "requirements/stack-$stack.txt" ]; then
  others=$(ls requirements/stack-*.txt | sed 's/.*stack-//; s/\.txt$//' | paste -sd ' ')
  fail "STACK=$stack: expected 2.13 (the default) or one of: $others"
fi

if ! [ -x "$environment/bin/pip" ]; then
  echo "setup: making $environment"
  rm -rf "$environment"
  if "$python" -c 'import ensurepip' 2>/dev/null; then
    "$python" -m venv "$environment"
  else
    # Debian keeps ensurepip in a package of its own; virtualenv brings its own pip.
    bootstrap=$(mktemp -d)
    trap 'rm -rf "$bootstrap"' EXIT
    "$python" -m pip install --quiet --target "$bootstrap" virtualenv
    PYTHONPATH="$bootstrap" "$python" -m virtualenv --quiet "$environment"
  fi
fi

# uv installs in a third of the time. Without it pip does.
requirements/install.sh "$environment" uv.txt || echo "setup: no uv: pip installs" >&2
if [ "$stack" = 2.13 ]; then
  torch=$(requirements/torch.sh "$environment/bin/pip") || fail "pip could not look for torch: the line above says why"
  requirements/install.sh "$environment" {serve,triton,export,demo}.txt "$torch" || fail "a pin could not be installed: the lines above say why"
else
  requirements/install.sh "$environment" {serve,triton,export,demo}.txt || fail "a pin could not be installed: the lines above say why"
  # Over the default's torchrec and FBGEMM.
  requirements/install.sh "$environment" "stack-$stack.txt" || fail "a pin could not be installed: the lines above say why"
fi
"$environment/bin/pip" install --quiet --no-deps --no-build-isolation --editable .
