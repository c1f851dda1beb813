#!/usr/bin/env bash
# Make sure that the programs are there which tests need and pip does not have: a Chromium for pages, OpenSSL for keys,
# a private network whose packets can be dropped, the malloc that servers take where it is there. With `clients` as the
# argument: the compilers and gRPC libraries of examples/clients.
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

if [ "${1:-}" = clients ]; then
  java=/usr/share/java
  need "protoc" "protobuf-compiler protobuf-compiler-grpc" protoc
  need "the C++ plugin of protoc" protobuf-compiler-grpc grpc_cpp_plugin
  need "a C++ compiler" "g++ pkg-config" g++
  need "gRPC for C++" "libgrpc++-dev libprotobuf-dev pkg-config" /usr/include/grpcpp/grpcpp.h
  need Go golang-go go
  need "gRPC for Go" "golang-google-grpc-dev golang-goprotobuf-dev" /usr/share/gocode/src/google.golang.org/grpc
  need "protoc's plugin for Go" "protoc-gen-go-grpc golang-goprotobuf-dev" protoc-gen-go-grpc
  need "a JDK" default-jdk-headless javac
  need "the Java plugin of protoc" protobuf-compiler-grpc-java-plugin grpc_java_plugin
  need "gRPC for Java" "libgrpc-java libnetty-java libperfmark-java libgeronimo-annotation-1.3-spec-java" $java/grpc-netty.jar
  need "protobuf for Java" libprotobuf-java $java/protobuf.jar
  need Node "nodejs npm" npm
fi
