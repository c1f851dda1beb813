#!/usr/bin/env bash
# Write what each image has of Python packages, with the hashes that they are compared with as it is built, as CycloneDX
# JSON. What Debian or Triton's image has besides, the builder says: `docker buildx build --sbom=true`.
set -euo pipefail
cd "$(dirname "$0")/.."
source requirements/audit-environment.sh
folder=build/sbom
mkdir -p "$folder"
pins=$(mktemp)
trap 'rm -f "$pins"' EXIT
write() { # the image's name, and the locks that it is built from
  local name=$1
  shift
  cat "${@/#/requirements/}" > "$pins"
  PYTHONWARNINGS=ignore "$environment/bin/cyclonedx-py" requirements --pyproject pyproject.toml --output-reproducible \
    --output-file "$folder/$name.json" "$pins"
  echo "sbom: $folder/$name.json: $(grep -c == "$pins") packages"
}
write server serve.txt torch-cpu.txt
write debian serve.txt triton.txt torch-cpu.txt
write export serve.txt export.txt torch-cpu.txt
write client client.txt
