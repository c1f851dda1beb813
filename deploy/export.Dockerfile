# tbe-export as an image: the admission gate of deploy/kubernetes/lookup.yaml, or an export where there is no Python.
# The image that serves has no TorchRec, which this needs; here is all of the environment that the tests run in.
#
#   docker build -f deploy/export.Dockerfile -t tbe-serving-export .
#   docker run --read-only --tmpfs /tmp -v "$PWD/repository:/repository:ro" -v "$PWD/keys:/keys:ro" tbe-serving-export \
#       verify /repository/movies --trusted-keys /keys/trusted.pem
FROM python:3.11-slim-bookworm

# PyTorch's CPU wheels are in an index of their own: name it when building, as PIP_EXTRA_INDEX_URL.
ARG PIP_EXTRA_INDEX_URL=
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONDONTWRITEBYTECODE=1

COPY requirements/cpu.txt /opt/tbe-serving/requirements/
RUN python3 -m pip install --no-deps --requirement /opt/tbe-serving/requirements/cpu.txt
COPY pyproject.toml README.md /opt/tbe-serving/
COPY serving /opt/tbe-serving/serving
COPY export /opt/tbe-serving/export
COPY model_repository /opt/tbe-serving/model_repository
RUN python3 -m pip install --no-deps --no-build-isolation /opt/tbe-serving

ENV OMP_NUM_THREADS=1
USER 1000:1000
ENTRYPOINT ["tbe-export"]
