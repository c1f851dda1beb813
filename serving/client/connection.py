"""How a client connects to its servers: addresses, TLS, metadata, deadline, retries."""

import ipaddress
import json
import os
import ssl
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from serving.arguments import check_arguments, check_timeout, is_address, is_host_name
from serving.client.metadata import Metadata, check_metadata, check_text
from serving.client.proxies import may_be_proxied, proxy_note
from serving.client.retries import Retries
from serving.client.targets import Target
from serving.errors import ConfigurationError, DeadlineExceeded, ServerUnavailable, ServingError, shown
from serving.triton.error_messages import error_of, handshake_advice

DEFAULT_TIMEOUT_S = 1.0

# gRPC tries calls again that end with one of these statuses: nothing happened, and another attempt may succeed.
RETRIED = ("UNAVAILABLE", "ABORTED")
_UNLIMITED = 2**31 - 1
# The first and the longest pause before a lost connection is made again. gRPC's own default is up to two minutes.
_RECONNECT_MS = (100, 1000)
# How long an attempt to connect may take, to the server's first word: where the network is slow, that is several ways
# there and back. gRPC's option for it has the name of a pause; its own default is 20 s.
_CONNECT_MS = 2000
# The least time between two resolutions of a name. gRPC resolves it again when a connection is lost or cannot be
# made. With its own default, 30 s, it goes on with addresses that are gone.
_RESOLVE_MS = 1000
# gRPC keeps messages of up to this size, to send them again. Larger ones are sent once.
_RETRY_BUFFER_BYTES = 64 << 20
# A connection with calls on it is sent a keepalive ping when it has been silent for so long.
_KEEPALIVE_S = 1.0
# The connection is given up if the answer to a ping takes more than a third of the deadline, but within these limits.
# The kernel waits as long for sent data to be acknowledged (TCP_USER_TIMEOUT). So the lower limit is what a busy
# server, or a packet that is sent again, may need.
_KEEPALIVE_TIMEOUT_S = (0.3, 5.0)
# Of two or more servers, one that fails nearly all calls for an interval gets none for a while. At most half of the
# servers are left out.
_BALANCING = {
    "outlier_detection_experimental": {
        "interval": "1s",
        "baseEjectionTime": "5s",
        "maxEjectionTime": "30s",
        "maxEjectionPercent": 50,
        "failurePercentageEjection": {"threshold": 90, "minimumHosts": 2, "requestVolume": 3},
        "childPolicy": [{"round_robin": {}}],
    }
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Tls:
    """TLS with PEM files.

    Attributes:
        root_certificates: who may have signed the server's certificate. None: whom the system trusts.
        certificate_chain: the client's own certificate, for mutual TLS.
        private_key: its private key, without a password.
        server_name: the name in the certificates of all servers. None: it is the host of the address.

    Raises:
        ConfigurationError: an argument is of another type, or `server_name` is not the name of a host.
    """

    root_certificates: Path | None = None
    certificate_chain: Path | None = None
    private_key: Path | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        check_arguments(self)
        if self.server_name is not None and not is_host_name(self.server_name):
            raise ConfigurationError(f"{self.server_name or repr('')}: expected the name of a host")

    def credentials(self) -> grpc.ChannelCredentials:
        """The credentials of a channel.

        Raises:
            ConfigurationError: a file cannot be read or is not PEM, or one of certificate_chain and private_key is
                missing.
        """
        if (self.certificate_chain is None) != (self.private_key is None):
            raise ConfigurationError("tls: expected certificate_chain and private_key together, got one of them")
        roots, key, chain = (
            None if path is None else _read_pem(path)
            for path in (self.root_certificates, self.private_key, self.certificate_chain)
        )
        self._check()
        return grpc.ssl_channel_credentials(roots, key, chain)

    def _check(self) -> None:
        """Have OpenSSL read the files. gRPC would only log that they are wrong, and fail each call."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            if self.certificate_chain is not None:
                context.load_cert_chain(self.certificate_chain, self.private_key, password=_no_password)
        except (OSError, ValueError) as error:  # ssl's own errors are OSErrors
            raise ConfigurationError(
                f"{self.certificate_chain}: expected a certificate in PEM, and its key in {self.private_key}: {error}"
            ) from error
        try:
            if self.root_certificates is not None:
                context.load_verify_locations(self.root_certificates)
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"{self.root_certificates}: expected certificates in PEM: {error}") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class Connection:
    """How a client reaches its servers.

    Attributes:
        addresses: "host:port" of one server or several. A name may stand for many. Calls go to each in turn.
        timeout_s: deadline of a call in seconds, retries included.
        retries: what is tried again.
        tls: certificates. None: no TLS.
        metadata: sent with each call. A function is called for each call, such as for a token that expires.

    Raises:
        ConfigurationError: an argument is of another type, or cannot be used.
    """

    addresses: Sequence[str]
    timeout_s: float = DEFAULT_TIMEOUT_S
    retries: Retries = field(default_factory=Retries)
    tls: Tls | None = None
    metadata: Metadata = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if not callable(self.metadata):
            check_metadata(self.metadata)
        check_arguments(self)
        check_timeout(self.timeout_s)
        if not self.addresses:
            raise ConfigurationError("addresses: expected at least one, got none")
        for address in self.addresses:
            if not is_address(address):
                raise ConfigurationError(f"{address or repr(address)}: expected host:port, such as 127.0.0.1:8001")
        if self.tls is not None and self._server_name is None and len(self.addresses) > 1:
            raise ConfigurationError(
                f"{', '.join(self.addresses)}: expected Tls(server_name=…), the one name that is in all their "
                "certificates"
            )

    @property
    def _server_name(self) -> str | None:
        """The name in certificates. gRPC would look for all of several addresses as one name."""
        if self.tls is not None and self.tls.server_name is not None:
            return self.tls.server_name
        hosts = {address.rpartition(":")[0] for address in self.addresses}
        return hosts.pop() if len(self.addresses) > 1 and len(hosts) == 1 else None

    @property
    def elsewhere(self) -> bool:
        """Whether another attempt may reach another server: there are several, or a name that may stand for many."""
        return len(self.addresses) > 1 or not _is_one_host(self.addresses[0].rpartition(":")[0])

    @property
    def _keepalive_timeout_s(self) -> float:
        least, most = _KEEPALIVE_TIMEOUT_S
        return min(max(self.timeout_s / 3, least), most)

    def error_of(self, error: grpc.RpcError, where: str = "", *, is_known: bool = False) -> ServingError:
        """The error of a call that failed. One that may be the proxy's names it, and one of TLS says what to change.

        Args:
            error: of grpc or grpc.aio.
            where, is_known: as `serving.triton.error_messages.error_of`.
        """
        message = error.details() or ""
        if (advice := handshake_advice(message)) is not None:
            return ServerUnavailable(f"{where}{shown(message.removesuffix(': OK'))}: {advice}")
        found = error_of(error.code().name, message, where, is_known=is_known)
        if isinstance(found, ServerUnavailable | DeadlineExceeded) and (note := proxy_note(self.addresses)):
            return type(found)(f"{found}: {note}")
        return found

    def call_metadata(self, trace: str | None) -> list[tuple[str, str | bytes]]:
        """The metadata of one call. `trace` is its W3C traceparent; None: that of OpenTelemetry's current span.

        Raises:
            ConfigurationError: gRPC cannot send it.
        """
        given = self.metadata
        if callable(given):
            given = given()
            check_metadata(given)
        pairs = [(key.lower(), value) for key, value in given.items()]
        if trace is not None:
            check_text("trace", trace)
        elif "traceparent" not in given:
            trace = _current_trace()
        return pairs if trace is None else [*pairs, ("traceparent", trace)]

    def check_tls(self) -> None:
        """Read the TLS files.

        Raises:
            ConfigurationError: as `Tls.credentials`.
        """
        if self.tls is not None:
            self.tls.credentials()

    def channel(self, library: Any, more_options: Sequence[tuple[str, Any]] = (), target: str | None = None) -> Any:
        """A channel of `library`: grpc or grpc.aio.

        Args:
            library: the module.
            more_options: of the channel. They go before its own of the same name.
            target: of the channel. None: what the addresses stand for now.

        Raises:
            ConfigurationError: as `Tls.credentials`.
            ServerUnavailable: a name among several addresses cannot be resolved.
        """
        target = Target(self.addresses).now() if target is None else target
        # Of two options with one name gRPC takes the first.
        options = [*{**dict(self._options()), **dict(more_options)}.items()]
        if self.tls is None:
            return library.insecure_channel(target, options)
        return library.secure_channel(target, self.tls.credentials(), options)

    def _options(self) -> list[tuple[str, Any]]:
        config: dict[str, Any] = {"loadBalancingConfig": [_BALANCING]}
        if self.retries.attempts > 1:
            policy = {
                "maxAttempts": self.retries.attempts,
                "initialBackoff": f"{self.retries.backoff_s:f}s",
                "maxBackoff": f"{self.retries.max_backoff_s:f}s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": RETRIED,
            }
            config["methodConfig"] = [{"name": [{}], "retryPolicy": policy}]
            config["retryThrottling"] = {"maxTokens": 100, "tokenRatio": 0.1}
        options: list[tuple[str, Any]] = [
            ("grpc.service_config", json.dumps(config)),
            ("grpc.service_config_disable_resolution", 1),
            ("grpc.dns_min_time_between_resolutions_ms", _RESOLVE_MS),
            # Connections are shared by channels of a process that have the same options: not with a forked child.
            ("tbe.process", os.getpid()),
            ("grpc.max_send_message_length", _UNLIMITED),
            ("grpc.max_receive_message_length", _UNLIMITED),
            ("grpc.per_rpc_retry_buffer_size", _RETRY_BUFFER_BYTES),
            ("grpc.initial_reconnect_backoff_ms", _RECONNECT_MS[0]),
            ("grpc.min_reconnect_backoff_ms", _CONNECT_MS),
            ("grpc.max_reconnect_backoff_ms", _RECONNECT_MS[1]),
            ("grpc.keepalive_time_ms", int(1000 * _KEEPALIVE_S)),
            ("grpc.keepalive_timeout_ms", int(1000 * self._keepalive_timeout_s)),
            # Where a ping of gRPC's own is on its way, a keepalive waits for that one: by default a minute.
            ("grpc.http2.ping_timeout_ms", int(1000 * self._keepalive_timeout_s)),
            ("grpc.enable_http_proxy", int(may_be_proxied(self.addresses))),
            # No ping without calls, and one in a long call: servers answer more pings with GOAWAY.
            ("grpc.keepalive_permit_without_calls", 0),
            ("grpc.http2.max_pings_without_data", 1),
        ]
        if self.tls is not None and (name := self._server_name) is not None:
            options.append(("grpc.ssl_target_name_override", name))
        return options


def _current_trace() -> str | None:
    """The traceparent of the span that this program is in by OpenTelemetry, if it uses that."""
    api = sys.modules.get("opentelemetry.trace")
    context = None if api is None else api.get_current_span().get_span_context()
    if context is None or not context.is_valid:
        return None
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def _read_pem(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read: {error.strerror}") from error


def _no_password() -> str:
    raise ValueError("the key has a password, which gRPC cannot be given")


def _is_one_host(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return host == "localhost"
    return True
