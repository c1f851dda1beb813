#!/usr/bin/env bash
# Make sure that there is a Chromium, for the tests of pages.
set -euo pipefail
for name in chromium chromium-browser google-chrome; do
  if command -v "$name" >/dev/null; then exit 0; fi
done
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  echo "setup: installing chromium, for the tests of pages"
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq && apt-get install -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null && exit 0
fi
echo "setup: no Chromium on PATH, which the tests of pages need; install it (Debian: sudo apt install chromium)" >&2
exit 1
