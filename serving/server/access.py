"""Who may reach a server, and which protocols they may use. docs/security.md gives the reasons."""

import ipaddress
import re
import ssl
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from serving.arguments import check_arguments
from serving.errors import ConfigurationError
from serving.triton.command_line import RESTRICTED, address_options, http_options, key_options, tls_options

if TYPE_CHECKING:
    from cryptography import x509

LOOPBACK = "127.0.0.1"
EVERYWHERE = "0.0.0.0"  # noqa: S104  # for comparisons only
# https://www.rfc-editor.org/rfc/rfc6750#section-2.1
_TOKEN = re.compile(r"[A-Za-z0-9\-._~+/]+=*")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerTls:
    """TLS on the gRPC port, with PEM files.

    Attributes:
        certificate: the server's certificate, with its chain.
        private_key: its private key, without a password.
        client_root: root certificates for the certificates of clients. None: clients need no certificate.

    Raises:
        ConfigurationError: a file cannot be read, or holds no such certificate or key.
    """

    certificate: Path
    private_key: Path
    client_root: Path | None = None

    def __post_init__(self) -> None:
        check_arguments(self)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.certificate, self.private_key, password=_no_password)
        except (OSError, ValueError) as error:  # ssl's own errors are OSErrors
            raise ConfigurationError(
                f"--tls-cert {self.certificate}, --tls-key {self.private_key}: expected a certificate and its key in "
                f"PEM: {error}"
            ) from error
        try:
            if self.client_root is not None:
                context.load_verify_locations(self.client_root)
        except (OSError, ValueError) as error:
            raise ConfigurationError(
                f"--tls-client-ca {self.client_root}: expected certificates in PEM: {error}"
            ) from error

    def expires(self) -> float:
        """When the first certificate of the file expires, the server's or one of its chain, Unix time.

        Raises:
            OSError, ValueError: the file cannot be read any more.
        """
        from cryptography import x509  # clients have none

        chain = x509.load_pem_x509_certificates(self.certificate.read_bytes())
        return min(each.not_valid_after_utc.timestamp() for each in chain)

    @property
    def files(self) -> list[Path]:
        """All of them."""
        return [each for each in (self.certificate, self.private_key, self.client_root) if each is not None]

    @property
    def options(self) -> list[str]:
        """The options of tritonserver."""
        return tls_options(self.certificate, self.private_key, self.client_root)


@dataclass(frozen=True, kw_only=True, slots=True)
class Access:
    """Who may reach a server.

    Attributes:
        host: the IPv4 address that gRPC listens on.
        operations_host: the IPv4 address of the operations port.
        operations_tls: whether it has the certificate of `tls`. Clients of it need none.
        operations_token: what its clients have to send for metrics, as a bearer token. None: nothing.
        http: whether clients may use HTTP too. A single request can kill an older tritonserver (docs/protocol.md).
            Triton has no TLS for HTTP. So HTTP listens on loopback only, unless `insecure`.
        tls: certificates of the gRPC port. None: no TLS.
        insecure: whether to listen beyond loopback without TLS. Something in front of the server must shield it.
        allow: the restricted protocols that need no key.

    Raises:
        ConfigurationError: an address is no IPv4 address, or is beyond loopback without TLS; or `allow` names another
            protocol.
    """

    host: str = LOOPBACK
    operations_host: str = LOOPBACK
    operations_tls: bool = False
    operations_token: str | None = field(default=None, repr=False)
    http: bool = False
    tls: ServerTls | None = None
    insecure: bool = False
    allow: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_arguments(self)
        if unknown := [name for name in self.allow if name not in RESTRICTED]:
            raise ConfigurationError(f"--allow {unknown[0]}: expected one of {', '.join(RESTRICTED)}")
        _expect_ipv4("--host", self.host)
        _expect_ipv4("--operations-host", self.operations_host)
        if self.operations_tls and self.tls is None:
            raise ConfigurationError("--operations-tls: expected --tls-cert and --tls-key beside it")
        if self.operations_token is not None and not _TOKEN.fullmatch(self.operations_token):
            raise ConfigurationError(
                "--operations-token: expected a file with one line of letters, digits and -._~+/=, as RFC 6750 says"
            )
        if self.tls is None and not self.insecure and not is_loopback(self.host):
            raise ConfigurationError(
                f"--host {self.host}: others could listen in: expected --tls-cert and --tls-key, or --insecure where "
                "something in front of the server keeps them out"
            )

    @property
    def http_host(self) -> str:
        """The address that HTTP listens on, if clients may use it."""
        return self.host if self.insecure else LOOPBACK

    def options(self, key: str) -> list[str]:
        """The options of tritonserver. `key` is the key of its restricted protocols."""
        return [
            *address_options(self.host),
            *(http_options(self.http_host) if self.http else ()),
            *key_options([name for name in RESTRICTED if name not in self.allow], key),
            *(() if self.tls is None else self.tls.options),
        ]


def expect_usable(path: Path) -> None:
    """Refuse certificates that nobody would accept now.

    Args:
        path: a PEM file with a chain, of which all have to be valid now; with authorities, of which one has to be; or
            with a private key.

    Raises:
        ConfigurationError: naming it: it cannot be read, or its certificates are not valid now.
    """
    from cryptography import x509  # clients have none

    try:
        content = path.read_bytes()
        found = [] if b"PRIVATE KEY" in content else x509.load_pem_x509_certificates(content)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path}: expected certificates or a key in PEM: {error}") from error
    now = datetime.now(UTC)
    late = [each for each in found if not each.not_valid_before_utc <= now < each.not_valid_after_utc]
    if late and (len(late) == len(found) or not _is_authority(found[0])):
        since, until = (
            f"{each:%Y-%m-%d %H:%M}" for each in (late[0].not_valid_before_utc, late[0].not_valid_after_utc)
        )
        raise ConfigurationError(f"{path}: is not valid now: a certificate is from {since} to {until} UTC")


def _is_authority(certificate: "x509.Certificate") -> bool:
    from cryptography import x509

    try:
        return bool(certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca)
    except x509.ExtensionNotFound:
        return False


def is_loopback(host: str) -> bool:
    """Whether an address can be reached only from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _expect_ipv4(option: str, host: str) -> None:
    try:
        ipaddress.IPv4Address(host)
    except ValueError:
        raise ConfigurationError(
            f"{option} {host}: expected an IPv4 address, such as 0.0.0.0 for all of this machine's"
        ) from None


def _no_password() -> str:
    raise ValueError("the key has a password, which Triton cannot be given")
