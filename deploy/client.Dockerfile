# The client as an image: to look up, to score, and to measure from where there is no Python, such as a pod of a cluster.
# It has neither torch nor Triton.
#
#   docker build -f deploy/client.Dockerfile -t tbe-serving-client --build-arg PYTHON_DIGEST=sha256:… .
#   docker run --read-only -v "$PWD/ca.crt:/ca.crt:ro" tbe-serving-client health movies --url movies:8001 --tls-ca /ca.crt
ARG PYTHON_IMAGE=python:3.11-slim-bookworm
# A tag can be moved, a digest cannot. There is no build without one:
#   docker buildx imagetools inspect IMAGE --format '{{.Manifest.Digest}}', IMAGE being the one above
ARG PYTHON_DIGEST
FROM ${PYTHON_IMAGE}@${PYTHON_DIGEST}

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONDONTWRITEBYTECODE=1

# The pins without dependencies, each file compared with its hash (docs/decisions/0001); first, for they change least.
COPY requirements/client.txt /opt/tbe-serving/requirements/
RUN pip install --no-deps --require-hashes --requirement /opt/tbe-serving/requirements/client.txt
COPY pyproject.toml README.md LICENSE /opt/tbe-serving/
COPY serving /opt/tbe-serving/serving
COPY export /opt/tbe-serving/export
COPY model_repository /opt/tbe-serving/model_repository
RUN pip install --no-deps --no-build-isolation /opt/tbe-serving

USER 1000:1000
ENTRYPOINT ["tbe-serve"]
