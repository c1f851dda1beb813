#!/usr/bin/env bash
# Make sure that what `make kube` needs is there: podman, images to build on, all images of deploy/, and a linter of
# manifests. What is there already is kept, in .bench/kube and among podman's images.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=.bench/kube
mkdir -p "$folder"
PATH=$PATH:/usr/sbin:/sbin

fail() {
  echo "kube: $*" >&2
  exit 1
}

[ "$(id -u)" = 0 ] || fail "expected root, which makes network namespaces and mounts: sudo make kube"
missing=()
for program in podman runc catatonit conmon netavark debootstrap ip nsenter unshare; do
  command -v "$program" >/dev/null || [ -x "/usr/libexec/podman/$program" ] || [ -x "/usr/lib/podman/$program" ] || missing+=("$program")
done
if [ ${#missing[@]} -gt 0 ]; then
  command -v apt-get >/dev/null || fail "expected ${missing[*]} on PATH: install podman and what it needs"
  echo "kube: installing podman, for ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq
  apt-get install -qq --no-install-recommends \
    podman runc catatonit conmon netavark debootstrap iproute2 util-linux >/dev/null
fi

# Where this user may not raise limits, podman's own defaults end every container.
export CONTAINERS_CONF=$PWD/$folder/containers.conf
cat > "$CONTAINERS_CONF" <<CONF
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]
base_hosts_file = "$PWD/$folder/hosts"
[engine]
runtime = "runc"
CONF
touch "$folder/hosts"

if ! podman image exists localhost/debian:bookworm-slim; then
  echo "kube: making a Debian (about a minute)"
  root=$(mktemp -d)
  trap 'rm -rf "$root"' EXIT
  debootstrap --variant=minbase bookworm "$root" >"$folder/debootstrap.log" 2>&1 || fail "see $folder/debootstrap.log"
  tar -C "$root" -c . | podman import --quiet - localhost/debian:bookworm-slim >/dev/null
fi

# pip inside a build has the packages that pip has here, and no network.
printf '[global]\nno-index = true\nfind-links = /wheels\n' > "$folder/pip.conf"
torch=$(requirements/torch.sh .venv/bin/pip)
cat requirements/{serve,triton,export}.txt "requirements/$torch" > "$folder/pins.new"
if ! cmp --silent "$folder/pins.new" "$folder/pins"; then
  echo "kube: fetching $(grep -c == "$folder/pins.new") pinned packages"
  rm -rf "$folder/wheels"
  .venv/bin/pip download --quiet --no-deps --require-hashes --dest "$folder/wheels" --requirement "$folder/pins.new" \
    2> >(grep -v '^WARNING: Location' >&2)
  mv "$folder/pins.new" "$folder/pins"
fi

# In place of the images that Dockerfiles name, where those cannot be had.
base() { # an image's name, and a folder with what its Dockerfile copies; the Dockerfile
  podman image exists "localhost/$1" || {
    echo "kube: making localhost/$1"
    podman build --quiet --network host --tag "localhost/$1" --file - "$2" >/dev/null
  }
}

build() { # a Dockerfile, the image it makes, how its arguments' names begin, and the image it is built on
  local digest
  digest=$(podman image inspect "localhost/$4" --format '{{.Digest}}')
  echo "kube: building $1 (two minutes the first time)"
  # Of podman's formats this one knows health checks.
  podman build --quiet --pull=never --network host --format docker --file "deploy/$1" --tag "localhost/tbe-serving:$2" \
    --build-arg "$3_IMAGE=localhost/${4%%:*}" --build-arg "$3_DIGEST=$digest" \
    --volume "$PWD/$folder/wheels:/wheels:ro" --volume "$PWD/$folder/pip.conf:/etc/pip.conf:ro" . >/dev/null
  echo "kube: localhost/tbe-serving:$2 has $(($(podman image inspect "localhost/tbe-serving:$2" --format '{{.Size}}') / 1000000)) MB"
}

build debian.Dockerfile kube DEBIAN debian:bookworm-slim

base python:3.11 "$folder" <<'FILE'
FROM localhost/debian:bookworm-slim
RUN apt-get update && apt-get install --yes --no-install-recommends ca-certificates python3 python3-venv \
    && rm -rf /var/lib/apt/lists/* && python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
FILE
build export.Dockerfile export PYTHON python:3.11
build client.Dockerfile client PYTHON python:3.11

# Laid out as Triton's image: in /opt/tritonserver, beside the system's Python. That is Ubuntu's 3.12 there, and 3.11 here.
layout=$folder/layout
if ! podman image exists localhost/tritonserver:layout; then
  rm -rf "$layout"
  mkdir -p "$layout/opt/backends"
  .venv/bin/python -m zipfile --extract "$folder"/wheels/nvidia_pytriton-*.whl "$layout/wheel"
  cp -r "$layout/wheel/pytriton/tritonserver/bin" "$layout/opt/bin"
  cp -r "$layout/wheel/pytriton/tritonserver/backends/python" "$layout/opt/backends/python"
  cp "$layout/wheel/pytriton/tritonserver/python_backend_stubs/3.11/triton_python_backend_stub" "$layout/opt/backends/python"
  cp -r "$layout/wheel/nvidia_pytriton.libs" "$layout/opt/lib"
  chmod 755 "$layout/opt/bin/tritonserver" "$layout/opt/backends/python/triton_python_backend_stub"
fi
base tritonserver:layout "$layout" <<'FILE'
FROM localhost/debian:bookworm-slim
RUN apt-get update && apt-get install --yes --no-install-recommends ca-certificates libpython3.11 python3 python3-pip \
    && rm -rf /var/lib/apt/lists/*
COPY opt /opt/tritonserver
ENV PATH=/opt/tritonserver/bin:$PATH LD_LIBRARY_PATH=/opt/tritonserver/lib
FILE
build Dockerfile triton TRITON tritonserver:layout

if ! [ "$folder/checkov/.installed" -nt requirements/kube.txt ]; then
  echo "kube: installing checkov"
  rm -rf "$folder/checkov"
  "${PYTHON:-python3.11}" -m venv "$folder/checkov"
  requirements/install.sh "$folder/checkov" kube.txt
  touch "$folder/checkov/.installed"
fi
