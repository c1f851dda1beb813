"""The command line of tritonserver: its options, and how a secret in them is erased.

tritonserver takes the key of its restricted protocols only as an option, and every user of the machine can read the
command line of a process. tritonserver copies its options when it starts, and does not read them again, so the key is
overwritten after that. proc(5) says where the command line is (arg_start and arg_end of /proc/PID/stat) and how to
write to it (/proc/PID/mem). tritonserver has copied its options when it loads the library of the Python backend.

Run with Triton 24.10. The source of 26.04 was read for the name of that library.
"""

import math
import re
import subprocess
import time
from collections.abc import Sequence
from itertools import pairwise, zip_longest
from pathlib import Path

from serving.errors import ConfigurationError

_BACKEND = "libtriton_python"
_POLL_S = 0.002
_PATIENCE_S = 5.0


def erase_from_command_line(child: "subprocess.Popen[bytes]", secret: str, *, has_started: bool = False) -> bool:
    """Overwrite `secret` in the command line of a tritonserver, as soon as it has copied its options.

    Args:
        child: a tritonserver.
        secret: one of its options, or part of one.
        has_started: whether it answers, which means that it has copied its options. If not, wait until it has.

    Returns:
        Whether the secret is gone. The kernel may forbid it: Yama's ptrace_scope 2 and above.
    """
    process = Path("/proc") / str(child.pid)
    deadline = time.monotonic() + _PATIENCE_S
    try:
        while not has_started and not _has_loaded_a_backend(process) and time.monotonic() < deadline:
            if child.poll() is not None:
                return True
            time.sleep(_POLL_S)
        _overwrite(process, secret.encode())
        return secret.encode() not in (process / "cmdline").read_bytes()
    except OSError:
        return False


def _overwrite(process: Path, secret: bytes) -> None:
    fields = (process / "stat").read_text(errors="surrogateescape").rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    with (process / "mem").open("r+b", buffering=0) as memory:
        memory.seek(start)
        words = memory.read(end - start)
        memory.seek(start)
        memory.write(words.replace(secret, b"*" * len(secret)))


def _has_loaded_a_backend(process: Path) -> bool:
    return _BACKEND in (process / "maps").read_text(errors="surrogateescape")


# The protocols that clients need a key for. A client that may load a model can run code in the server. One that may
# register shared memory can read and write the server's own. One that may set logs and traces can write files.
RESTRICTED = ("model-repository", "shared-memory", "trace", "logging")
# The header that carries the key.
KEY_HEADER = "tbe-serving-key"
_LOAD = "--load-model"
_AGE = "--grpc-max-connection-age"
# The default of --exit-timeout-secs.
_EXIT_TIMEOUT_S = 30.0
# The age after which clients reconnect, and see a renewed certificate.
RENEWAL_AGE_MS = 300_000


# Triton's Python backend starts a process by `bash -c "exec STUB MODEL/VERSION/model.py …"`, without quotes.
_SHELL = re.compile(r"""[\s"'\\$&();<>|*?\[`{]""")


def is_plain(path: str) -> bool:
    """Whether Triton's Python backend can start a model at this path."""
    return _SHELL.search(path) is None


def serving_options(repository: Path, backends: Path | None) -> list[str]:
    """The options for models and limits, which do not depend on where the server listens.

    Args:
        repository: the model repository.
        backends: the folder of the backends, or None for the server's own.

    Raises:
        ConfigurationError: the Python backend cannot open models in a folder with this name.
    """
    if not is_plain(str(repository.absolute())):
        raise ConfigurationError(
            f"{repository.absolute()}: expected the path of a repository without blanks and characters that a shell "
            "reads, by which Triton starts the processes of its models: move it, or link to it"
        )
    options = [
        f"--model-repository={repository.absolute()}",
        # Explicit: a version is loaded on request, never because a file changed.
        "--model-control-mode=explicit",
        # config.pbtxt is complete. Completion would drop allow_ragged_batch, and requests would not be merged.
        "--disable-auto-complete-config",
        "--allow-gpu-metrics=false",
        # A pool keeps the memory of large requests forever: 15 GB after eight requests of 1.9 GB.
        "--grpc-infer-allocation-pool-size=0",
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


def port_options(grpc: int, http: int, *, share: bool) -> list[str]:
    """The ports to listen on. `share`: several processes may listen on the gRPC port."""
    return [f"--grpc-port={grpc}", f"--http-port={http}", *(["--reuse-grpc-port=true"] if share else [])]


def age_options(age_ms: int | None) -> list[str]:
    """The age at which gRPC closes connections, in milliseconds. None: connections are not closed by age."""
    return [] if age_ms is None else [f"{_AGE}={age_ms}"]


def region_options(prefix: str) -> list[str]:
    """The prefix of the names of the server's shared-memory regions."""
    return [f"--backend-config=python,shm-region-prefix-name={prefix}"]


def address_options(grpc: str) -> list[str]:
    """The IPv4 address that gRPC listens on."""
    return [f"--grpc-address={grpc}"]


def metrics_options(address: str) -> list[str]:
    """Where metrics listen: "unix:/path"."""
    return [f"--metrics-address={address}"]


def http_options(address: str) -> list[str]:
    """Where the one HTTP endpoint listens: an IPv4 address, or "unix:/path"."""
    return [f"--http-address={address}"]


def key_options(restricted: Sequence[str], key: str) -> list[str]:
    """The options that make the `restricted` protocols require `key`, over gRPC and HTTP."""
    if not restricted:
        return []
    restriction = f"{','.join(restricted)}:{KEY_HEADER}={key}"
    return [f"--grpc-restricted-protocol={restriction}", f"--http-restricted-api={restriction}"]


def tls_options(certificate: Path, private_key: Path, client_root: Path | None) -> list[str]:
    """TLS on the gRPC port. Clients need a certificate signed by `client_root`, unless it is None."""
    options = [f"--grpc-server-cert={certificate.absolute()}", f"--grpc-server-key={private_key.absolute()}"]
    if client_root is None:
        return ["--grpc-use-ssl=true", *options]
    return ["--grpc-use-ssl-mutual=true", *options, f"--grpc-root-cert={client_root.absolute()}"]


def model_options(models: Sequence[str]) -> list[str]:
    """The models to load at the start."""
    return [f"{_LOAD}={model}" for model in models]


def loaded_by(options: Sequence[str]) -> set[str]:
    """The models that options of tritonserver load at its start; "*" stands for all models."""
    joined = {option.partition("=")[2] for option in options if option.startswith(f"{_LOAD}=")}
    return joined | {value for option, value in pairwise(options) if option == _LOAD}


def exit_timeout_of(options: Sequence[str]) -> float:
    """The maximum time that a stopping server with these options waits for running requests, in seconds."""
    return _option_value(options, "--exit-timeout-secs", _EXIT_TIMEOUT_S)


def connection_age_of(options: Sequence[str]) -> float:
    """The maximum time that a server with these options keeps a connection, in seconds.

    gRPC draws each connection's time from 0.9 to 1.1 of the option (MAX_CONNECTION_AGE of its proposal A9).
    """
    return 1.1e-3 * _option_value(options, _AGE, math.inf)


def _option_value(options: Sequence[str], name: str, default: float) -> float:
    """The number of an option, as "NAME=N" or as "NAME", "N". If the option is repeated, the last one counts."""
    number = default
    for option, following in zip_longest(options, options[1:], fillvalue=""):
        value = following if option == name else option.removeprefix(f"{name}=")
        if option.startswith(name) and value.isdigit():
            number = float(value)
    return number
