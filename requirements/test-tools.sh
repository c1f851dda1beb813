#!/usr/bin/env bash
# Make sure that the programs are there which tests need and pip does not have: a Chromium for pages, OpenSSL for keys,
# a private network whose packets can be dropped, the malloc that servers take where it is there.
set -euo pipefail

need() { # what it is, Debian's packages, and the names it may have; a library's is its path
  local what=$1 packages=$2 name
  shift 2
  for name in "$@"; do
    if [ -e "$name" ] || command -v "$name" >/dev/null; then return; fi
  done
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "setup: installing $what, for tests"
    export DEBIAN_FRONTEND=noninteractive
    # shellcheck disable=SC2086
    apt-get update -qq && apt-get install -qq --no-install-recommends $packages >/dev/null && return
  fi
  echo "setup: no $what, which tests need; install it (Debian: sudo apt install $packages)" >&2
  exit 1
}

need Chromium "chromium fonts-dejavu-core" chromium chromium-browser google-chrome
need OpenSSL openssl openssl
need tcmalloc libtcmalloc-minimal4 "/usr/lib/$(uname -m)-linux-gnu/libtcmalloc_minimal.so.4" /usr/lib64/libtcmalloc_minimal.so.4
need "Prometheus (promtool)" prometheus promtool
# Debian has them where only root looks.
PATH=$PATH:/usr/sbin:/sbin
need iptables iptables iptables
need iproute2 iproute2 ip
need util-linux util-linux unshare
