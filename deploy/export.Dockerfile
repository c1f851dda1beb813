# tbe-export as an image: the admission gate of deploy/kubernetes/lookup.yaml, or an export where there is no Python.
# The image that serves has no TorchRec, which this needs; this one has no Triton.
#
#   docker build -f deploy/export.Dockerfile -t tbe-serving-export --build-arg PYTHON_DIGEST=sha256:… .
#   docker run --read-only --tmpfs /tmp -v "$PWD/repository:/repository:ro" -v "$PWD/keys:/keys:ro" tbe-serving-export \
#       verify /repository/movies --trusted-keys /keys/trusted.pem
ARG PYTHON_IMAGE=python:3.11-slim-bookworm
# A tag can be moved, a digest cannot. There is no build without one:
#   docker buildx imagetools inspect IMAGE --format '{{.Manifest.Digest}}', IMAGE being the one above
ARG PYTHON_DIGEST
FROM ${PYTHON_IMAGE}@${PYTHON_DIGEST}

# PyTorch's CPU wheels are in an index of their own: name it when building, as PIP_EXTRA_INDEX_URL. Without it the image
# takes PyPI's torch, with CUDA packages that are never used (4.8 GB).
ARG PIP_EXTRA_INDEX_URL=
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONDONTWRITEBYTECODE=1

# The pins without dependencies, each file compared with its hash (docs/decisions/0001); first, for they change least.
WORKDIR /opt/tbe-serving/requirements
COPY requirements/serve.txt requirements/export.txt requirements/torch-cpu.txt requirements/torch-pypi.txt requirements/torch.sh ./
RUN torch=$(./torch.sh pip) && pip install --no-deps --require-hashes --requirement serve.txt --requirement export.txt --requirement "$torch"
WORKDIR /
COPY pyproject.toml README.md LICENSE /opt/tbe-serving/
COPY serving /opt/tbe-serving/serving
COPY export /opt/tbe-serving/export
COPY model_repository /opt/tbe-serving/model_repository
RUN pip install --no-deps --no-build-isolation /opt/tbe-serving

ENV OMP_NUM_THREADS=1
USER 1000:1000
ENTRYPOINT ["tbe-export"]
