# tbe-serving on Debian, with the tritonserver of the nvidia-pytriton wheel: for trials and tests (`make kube`) where Triton's
# image cannot be had. That tritonserver (2.51) lacks later security fixes: production takes deploy/Dockerfile.
#
#   docker build -f deploy/debian.Dockerfile -t tbe-serving-debian --build-arg DEBIAN_DIGEST=sha256:… .
ARG DEBIAN_IMAGE=debian:bookworm-slim
# A tag can be moved, a digest cannot. There is no build without one:
#   docker buildx imagetools inspect IMAGE --format '{{.Manifest.Digest}}', IMAGE being the one above
ARG DEBIAN_DIGEST
FROM ${DEBIAN_IMAGE}@${DEBIAN_DIGEST}

# Debian removes old versions of its packages, so that a pin of one would soon fail.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates libpython3.11 libtcmalloc-minimal4 python3 python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH

# PyTorch's CPU wheels are in an index of their own: name it when building, as PIP_EXTRA_INDEX_URL. Without it the image
# takes PyPI's torch, with CUDA packages that are never used (4.8 GB).
ARG PIP_EXTRA_INDEX_URL=
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONDONTWRITEBYTECODE=1

# The pins without dependencies, each file compared with its hash (docs/decisions/0001); first, for they change least.
WORKDIR /opt/tbe-serving/requirements
COPY requirements/serve.txt requirements/triton.txt requirements/torch-cpu.txt requirements/torch-pypi.txt requirements/torch.sh ./
RUN torch=$(./torch.sh pip) \
    && pip install --no-deps --require-hashes --requirement serve.txt --requirement triton.txt --requirement "$torch"
WORKDIR /
COPY pyproject.toml README.md LICENSE /opt/tbe-serving/
COPY serving /opt/tbe-serving/serving
COPY export /opt/tbe-serving/export
COPY model_repository /opt/tbe-serving/model_repository
RUN pip install --no-deps --no-build-isolation /opt/tbe-serving

# A TBE call runs on one thread; instances are processes (tbe-serve configure --instances).
ENV OMP_NUM_THREADS=1
# Ready as /readyz says, asked by the shell alone: it costs no start of Python. Not with --operations-tls.
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s \
    CMD ["bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/8002 && printf 'GET /readyz HTTP/1.0\\r\\n\\r\\n' >&3 && grep --quiet --max-count=1 ' 200 ' <&3"]
USER 1000:1000
EXPOSE 8001 8002
STOPSIGNAL SIGTERM
ENTRYPOINT ["tbe-serve", "run", "/repository"]
# `docker stop` kills after 10 s. With more time to drain (--stop-timeout), connections are closed less often.
CMD ["--host", "0.0.0.0", "--operations-host", "0.0.0.0", "--drain-s", "6", "--tls-cert", "/tls/tls.crt", "--tls-key", "/tls/tls.key"]
