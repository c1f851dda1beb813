"""The command line of tritonserver.

Run with 24.10. Read for 26.04, which has every option named here. tritonserver exits on an option that it does not
know.
"""

from collections.abc import Sequence
from pathlib import Path

# The protocols that clients need a key for. Whoever may load a model runs code in the server. Whoever may register
# shared memory reads and writes the server's own. Whoever may set logs and traces writes files.
RESTRICTED = ("model-repository", "shared-memory", "trace", "logging")
# The header that carries the key, which has a prefix over gRPC: docs/customization_guide/inference_protocols.md of
# Triton.
KEY_HEADER = "tbe-serving-key"
GRPC_KEY_HEADER = f"triton-grpc-protocol-{KEY_HEADER}"
# The default of --exit-timeout-secs.
_EXIT_TIMEOUT_S = 30.0


def serving_options(repository: Path, regions: str, backends: Path | None) -> list[str]:
    """How models are served, wherever the server listens.

    Args:
        repository: the model repository.
        regions: prefix of the names of its shared-memory regions.
        backends: the folder of its backends; the server's own where None.
    """
    options = [
        f"--model-repository={repository.absolute()}",
        # Explicit: a version is loaded when somebody asks for it, never because a file changed.
        "--model-control-mode=explicit",
        # config.pbtxt says everything. Completion would drop allow_ragged_batch, without which requests do not merge.
        "--disable-auto-complete-config",
        "--allow-gpu-metrics=false",
        # A pool keeps the memory of large requests for ever: eight of 1.9 GB are 15 GB.
        "--grpc-infer-allocation-pool-size=0",
        f"--backend-config=python,shm-region-prefix-name={regions}",
        "--pinned-memory-pool-byte-size=0",  # for copies to a GPU, which a CPU model never makes
        "--log-info=false",
        # The backend reads one header: the trace context.
        "--grpc-header-forward-pattern=(?i)traceparent",
        "--http-header-forward-pattern=(?i)traceparent",
        # Clients may send a keepalive ping twice a second. By default Triton closes a connection at the third ping
        # within five minutes.
        "--grpc-http2-min-recv-ping-interval-without-data=500",
    ]
    return options + ([] if backends is None else [f"--backend-directory={backends}"])


def port_options(grpc: int, http: int, metrics: int) -> list[str]:
    """The ports to listen on."""
    return [f"--grpc-port={grpc}", f"--http-port={http}", f"--metrics-port={metrics}"]


def address_options(grpc: str, metrics: str) -> list[str]:
    """The IPv4 addresses that gRPC and metrics listen on."""
    return [f"--grpc-address={grpc}", f"--metrics-address={metrics}"]


def http_options(address: str) -> list[str]:
    """Where the one HTTP endpoint listens: an IPv4 address, or "unix:/path"."""
    return [f"--http-address={address}"]


def key_options(restricted: Sequence[str], key: str) -> list[str]:
    """Have the `restricted` protocols ask for `key`, over gRPC and HTTP."""
    if not restricted:
        return []
    said = f"{','.join(restricted)}:{KEY_HEADER}={key}"
    return [f"--grpc-restricted-protocol={said}", f"--http-restricted-api={said}"]


def tls_options(certificate: Path, private_key: Path, client_root: Path | None) -> list[str]:
    """TLS on the gRPC port; clients show certificates signed by `client_root` unless it is None."""
    options = [f"--grpc-server-cert={certificate.absolute()}", f"--grpc-server-key={private_key.absolute()}"]
    if client_root is None:
        return ["--grpc-use-ssl=true", *options]
    return ["--grpc-use-ssl-mutual=true", *options, f"--grpc-root-cert={client_root.absolute()}"]


def model_options(models: Sequence[str]) -> list[str]:
    """The models to load at the start."""
    return [f"--load-model={model}" for model in models]


def exit_timeout_of(options: Sequence[str]) -> float:
    """Seconds that a server with these options waits for its requests when it is told to stop."""
    said = [option.partition("=")[2] for option in options if option.startswith("--exit-timeout-secs=")]
    return float(said[-1]) if said and said[-1].isdigit() else _EXIT_TIMEOUT_S
