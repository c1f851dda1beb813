"""Who reaches a server, over what, and what they may ask of it: docs/security.md says why."""

import ipaddress
import ssl
from dataclasses import dataclass
from pathlib import Path

from serving.errors import ServerFailed

LOOPBACK = "127.0.0.1"
# Of what Triton offers: who may load a model runs code, who may register shared memory reads and writes the
# server's own, and who may set its logs and traces writes files.
CLOSED = ("model-repository", "shared-memory", "trace", "logging")
# The header that opens them; over gRPC it has a prefix (Triton's docs/customization_guide/inference_protocols.md).
KEY_HEADER = "tbe-serving-key"
GRPC_KEY_HEADER = f"triton-grpc-protocol-{KEY_HEADER}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerTls:
    """TLS on the gRPC port, with PEM files.

    Attributes:
        certificate, private_key: the server's own; the certificate with its chain.
        client_root: who must have signed the certificates that clients show; they need none where None.

    Raises:
        ServerFailed: a file cannot be read, or is not what it should be.
    """

    certificate: Path
    private_key: Path
    client_root: Path | None = None

    def __post_init__(self) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.certificate, self.private_key, password=_no_password)
        except (OSError, ValueError) as error:  # ssl's own errors are OSErrors
            raise ServerFailed(
                f"--tls-cert {self.certificate}, --tls-key {self.private_key}: expected a certificate and its key in "
                f"PEM: {error}"
            ) from error
        try:
            if self.client_root is not None:
                context.load_verify_locations(self.client_root)
        except (OSError, ValueError) as error:
            raise ServerFailed(
                f"--tls-client-ca {self.client_root}: expected certificates in PEM: {error}"
            ) from error

    @property
    def options(self) -> list[str]:
        """What tritonserver takes."""
        options = [
            f"--grpc-server-cert={self.certificate.absolute()}",
            f"--grpc-server-key={self.private_key.absolute()}",
        ]
        if self.client_root is None:
            return ["--grpc-use-ssl=true", *options]
        return ["--grpc-use-ssl-mutual=true", *options, f"--grpc-root-cert={self.client_root.absolute()}"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Access:
    """Who may reach a server.

    Attributes:
        host: the IPv4 address that gRPC and metrics listen on.
        http: clients may use HTTP too. Single requests end older tritonservers (docs/protocol.md). Triton speaks it
            in the clear alone: it stays on loopback unless `insecure`.
        tls: certificates of the gRPC port; in the clear where None.
        insecure: listen beyond loopback in the clear, because something in front keeps others out.
        allow: those of `CLOSED` that need no key.

    Raises:
        ServerFailed: `host` is no such address, others could listen in, or `allow` names something else.
    """

    host: str = LOOPBACK
    http: bool = False
    tls: ServerTls | None = None
    insecure: bool = False
    allow: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if unknown := [name for name in self.allow if name not in CLOSED]:
            raise ServerFailed(f"--allow {unknown[0]}: expected one of {', '.join(CLOSED)}")
        try:
            ipaddress.IPv4Address(self.host)
        except ValueError:
            # Triton's metrics would listen on 255.255.255.255, and say nothing.
            raise ServerFailed(
                f"--host {self.host}: expected an IPv4 address, such as 0.0.0.0 for all of this machine's"
            ) from None
        if self.tls is None and not self.insecure and not is_loopback(self.host):
            raise ServerFailed(
                f"--host {self.host}: others could listen in: expected --tls-cert and --tls-key, or --insecure where "
                "something in front of the server keeps them out"
            )

    @property
    def http_host(self) -> str:
        """The address that HTTP listens on, where clients may use it."""
        return self.host if self.insecure else LOOPBACK

    def options(self, key: str) -> list[str]:
        """What tritonserver takes, so that `key` opens what is closed."""
        options = [f"--grpc-address={self.host}", f"--metrics-address={self.host}"]
        options += [f"--http-address={self.http_host}"] if self.http else []
        if closed := ",".join(name for name in CLOSED if name not in self.allow):
            options += [
                f"--grpc-restricted-protocol={closed}:{KEY_HEADER}={key}",
                f"--http-restricted-api={closed}:{KEY_HEADER}={key}",
            ]
        return options + ([] if self.tls is None else self.tls.options)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _no_password() -> str:
    raise ValueError("the key has a password, which Triton cannot be given")
