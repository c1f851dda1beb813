#!/usr/bin/env bash
# Install pins beside pip, $1, with the uv of .venv, from the indexes and folders of wheels that this pip knows. The rest
# are options of uv.
set -euo pipefail
configured=$("$1" config list 2>/dev/null)
options=(--python "${1%pip}python")
shift

pip_knows() { # an option of pip; what uv's is called
  local level values value
  for level in :env: install global; do
    values=$(sed -nE "s/^$level\.$1='(.*)'\$/\1/p" <<< "$configured")
    if [ -n "$values" ]; then
      for value in ${values//\\n/ }; do options+=("$2" "$value"); done
      return
    fi
  done
}

pip_knows index-url --default-index
pip_knows extra-index-url --index
pip_knows find-links --find-links
case $configured in *.no-index=\'[1tyTY]*) options+=(--no-index) ;; esac
cert=$(sed -nE "s/^.*\.cert='(.*)'\$/\1/p;T;q" <<< "$configured")
if [ -n "$cert" ]; then export SSL_CERT_FILE=$cert; fi

# Each file's hash is pinned, so it does not matter which index has it.
exec "$(dirname "$0")/../.venv/bin/uv" pip install --no-config --no-deps --require-hashes \
  --index-strategy unsafe-best-match "${options[@]}" "$@"
