#!/usr/bin/env bash
# Make sure that what `make kube` needs is there: podman, a Debian to build on, the image of deploy/debian.Dockerfile, and
# a linter of manifests. What is there already is kept, in .bench/kube and among podman's images.
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
base=$(podman image inspect localhost/debian:bookworm-slim --format '{{.Digest}}')

# pip inside the build has the packages that pip has here, and no network.
torch=$(requirements/torch.sh .venv/bin/pip)
cat requirements/{serve,triton}.txt "requirements/$torch" > "$folder/pins.new"
if ! cmp --silent "$folder/pins.new" "$folder/pins"; then
  echo "kube: fetching $(grep -c == "$folder/pins.new") pinned packages"
  rm -rf "$folder/wheels"
  .venv/bin/pip download --quiet --no-deps --require-hashes --dest "$folder/wheels" --requirement "$folder/pins.new" \
    2> >(grep -v '^WARNING: Location' >&2)
  mv "$folder/pins.new" "$folder/pins"
fi
printf '[global]\nno-index = true\nfind-links = /wheels\n' > "$folder/pip.conf"

echo "kube: building the image (two minutes the first time)"
podman build --quiet --pull=never --network host --file deploy/debian.Dockerfile --tag localhost/tbe-serving:kube \
  --build-arg DEBIAN_IMAGE=localhost/debian --build-arg "DEBIAN_DIGEST=$base" \
  --volume "$PWD/$folder/wheels:/wheels:ro" --volume "$PWD/$folder/pip.conf:/etc/pip.conf:ro" . >/dev/null

if ! [ "$folder/checkov/.installed" -nt requirements/kube.txt ]; then
  echo "kube: installing checkov"
  rm -rf "$folder/checkov"
  "${PYTHON:-python3.11}" -m venv "$folder/checkov"
  requirements/install.sh "$folder/checkov" kube.txt
  touch "$folder/checkov/.installed"
fi
