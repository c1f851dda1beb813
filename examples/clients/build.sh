#!/usr/bin/env bash
# Build one of the clients with Debian's compilers and gRPC libraries: build.sh go|java|cpp|node FOLDER
#
# protoc makes code of KServe's protocol from serving/protocol/descriptors.binpb. With grpc_service.proto and
# model_config.proto of github.com/triton-inference-server/common, leave --descriptor_set_in out.
set -euo pipefail
language=$1
mkdir -p "$2"
out=$(realpath "$2")
here=$(cd "$(dirname "$0")" && pwd)
protoc=(protoc --descriptor_set_in="$here/../../serving/protocol/descriptors.binpb")
protos=(grpc_service.proto model_config.proto)

case $language in
  go) # golang-go golang-google-grpc-dev protobuf-compiler protoc-gen-go-grpc
    package=example.com/inference
    options=paths=source_relative,Mgrpc_service.proto=$package,Mmodel_config.proto=$package
    mkdir -p "$out/src/$package"
    "${protoc[@]}" --go_out="$options:$out/src/$package" --go-grpc_out="$options:$out/src/$package" "${protos[@]}"
    GO111MODULE=off GOPATH=$out:/usr/share/gocode GOCACHE=$out/cache go build -o "$out/ranker" "$here/go/ranker.go"
    ;;
  java) # default-jdk-headless libgrpc-java protobuf-compiler protobuf-compiler-grpc-java-plugin
    "${protoc[@]}" --java_out="$out" --grpc-java_out="$out" --plugin=protoc-gen-grpc-java=/usr/bin/grpc_java_plugin \
      "${protos[@]}"
    javac -nowarn -d "$out" -cp '/usr/share/java/*' "$out"/inference/*.java "$here/java/Ranker.java"
    ;;
  cpp) # g++ libgrpc++-dev pkg-config protobuf-compiler protobuf-compiler-grpc
    "${protoc[@]}" --cpp_out="$out" --grpc_out="$out" --plugin=protoc-gen-grpc="$(command -v grpc_cpp_plugin)" \
      "${protos[@]}"
    # shellcheck disable=SC2046
    g++ -std=c++17 -O1 -I"$out" "$out"/*.cc "$here/cpp/ranker.cc" -o "$out/ranker" \
      $(pkg-config --cflags --libs grpc++ protobuf)
    ;;
  node) # node, npm
    cp "$here"/node/* "$out"
    npm --prefix "$out" ci --no-audit --no-fund --loglevel=error
    ;;
  *)
    echo "expected go, java, cpp or node, got $language" >&2
    exit 1
    ;;
esac
