"""Which clients may reach a server, and by which protocols. docs/security.md gives the reasons."""

import ipaddress
import re
from dataclasses import dataclass, field

from serving.arguments import check_arguments
from serving.errors import ConfigurationError
from serving.server.tls import ServerTls
from serving.triton.command_line import RESTRICTED, address_options, http_options, key_options

LOOPBACK = "127.0.0.1"
EVERYWHERE = "0.0.0.0"  # noqa: S104  # for comparisons only
# https://www.rfc-editor.org/rfc/rfc6750#section-2.1
_TOKEN = re.compile(r"[A-Za-z0-9\-._~+/]+=*")


@dataclass(frozen=True, kw_only=True, slots=True)
class Access:
    """Which clients may reach a server.

    Attributes:
        host: the IPv4 address that gRPC listens on.
        operations_host: the IPv4 address of the operations port.
        operations_tls: whether the operations port uses the certificate of `tls`. It asks no client for a
            certificate.
        operations_token: the bearer token that clients must send for `/metrics`, or None if no token is needed.
        http: whether clients may use HTTP too. A single request can kill an older tritonserver (docs/protocol.md).
            Triton has no TLS for HTTP, so HTTP listens on loopback only, unless `insecure` is set.
        tls: the certificates of the gRPC port, or None for no TLS.
        insecure: whether to listen beyond loopback without TLS. A proxy or network policy must protect the server
            then.
        allow: the restricted protocols that need no key.

    Raises:
        ConfigurationError: an address is not IPv4, or is beyond loopback without TLS; or `allow` names an unknown
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
