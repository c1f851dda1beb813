"""How a client connects to its servers: addresses, TLS, metadata, deadline, retries."""

import ipaddress
import json
import os
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
from serving.pem import check_certificate_chain, check_root_certificates
from serving.triton.error_messages import error_of, handshake_advice

DEFAULT_TIMEOUT_S = 1.0

# gRPC retries calls that end with these statuses: the server did nothing, and another attempt may succeed.
RETRIED = ("UNAVAILABLE", "ABORTED")
_UNLIMITED = 2**31 - 1
# The first and the longest pause before reconnecting. gRPC's own default is up to two minutes.
_RECONNECT_MS = (100, 1000)
# The longest attempt to connect, up to the server's first message: on a slow network that takes several round trips.
# gRPC's option for it is named after a pause, and defaults to 20 s.
_CONNECT_MS = 2000
# The least time between two resolutions of a name. gRPC resolves it again when a connection is lost or cannot be
# made. With its own default, 30 s, it would keep using addresses that no longer exist.
_RESOLVE_MS = 1000
# gRPC buffers messages up to this size for retries. Larger messages are sent once.
_RETRY_BUFFER_BYTES = 64 << 20
# Seconds of silence after which a connection with calls sends a keepalive ping.
_KEEPALIVE_S = 1.0
# The connection is closed if a ping's answer takes longer than a third of the deadline, clamped to these limits.
# The kernel waits as long for sent data to be acknowledged (TCP_USER_TIMEOUT). The lower limit leaves time for a busy
# server or a retransmitted packet.
_KEEPALIVE_TIMEOUT_S = (0.3, 5.0)
# With several servers, one that fails nearly all calls in an interval is ejected for a while. At most half of the
# servers are ejected.
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
        root_certificates: the CAs that may sign the server's certificate. None: the system's CAs.
        certificate_chain: the client's own certificate, for mutual TLS.
        private_key: its private key, without a password.
        server_name: the name in the certificates of all servers. None: the host of the address.

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
        # gRPC would only log that a file is invalid, and fail each call.
        if self.certificate_chain is not None:
            check_certificate_chain(self.certificate_chain, self.private_key)
        if self.root_certificates is not None:
            check_root_certificates(self.root_certificates)
        return grpc.ssl_channel_credentials(roots, key, chain)


@dataclass(frozen=True, kw_only=True, slots=True)
class Connection:
    """How a client reaches its servers.

    Attributes:
        addresses: "host:port" of one server or several. A name may have many addresses. Calls go to each in turn.
        timeout_s: deadline of a call in seconds, including its retries.
        retries: how failed calls are retried.
        tls: certificates. None: no TLS.
        metadata: gRPC metadata of each call, or a function that returns it, for example with a token that expires.

    Raises:
        ConfigurationError: an argument has the wrong type or value.
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
        """The name to expect in certificates. From several addresses gRPC would make one name."""
        if self.tls is not None and self.tls.server_name is not None:
            return self.tls.server_name
        hosts = {address.rpartition(":")[0] for address in self.addresses}
        return hosts.pop() if len(self.addresses) > 1 and len(hosts) == 1 else None

    @property
    def has_other_servers(self) -> bool:
        """Whether another attempt may reach another server: with several addresses, or a name that may resolve to
        several."""
        return len(self.addresses) > 1 or not _is_one_host(self.addresses[0].rpartition(":")[0])

    @property
    def _keepalive_timeout_s(self) -> float:
        least, most = _KEEPALIVE_TIMEOUT_S
        return min(max(self.timeout_s / 3, least), most)

    def error_of(self, error: grpc.RpcError, where: str = "", *, is_known: bool = False) -> ServingError:
        """The ServingError for a failed call. It names a proxy that may be the cause, and advises on TLS failures.

        Args:
            error: an error of grpc or grpc.aio.
            where: as `serving.triton.error_messages.error_of`.
            is_known: as `serving.triton.error_messages.error_of`.
        """
        message = error.details() or ""
        if (advice := handshake_advice(message)) is not None:
            return ServerUnavailable(f"{where}{shown(message.removesuffix(': OK'))}: {advice}")
        failure = error_of(error.code().name, message, where, is_known=is_known)
        if isinstance(failure, ServerUnavailable | DeadlineExceeded) and (note := proxy_note(self.addresses)):
            return type(failure)(f"{failure}: {note}")
        return failure

    def call_metadata(self, trace: str | None) -> list[tuple[str, str | bytes]]:
        """The metadata of one call. `trace` is its W3C traceparent. None: OpenTelemetry's current span's.

        Raises:
            ConfigurationError: gRPC cannot send it.
        """
        metadata = self.metadata
        if callable(metadata):
            metadata = metadata()
            check_metadata(metadata)
        pairs = [(key.lower(), value) for key, value in metadata.items()]
        if trace is not None:
            check_text("trace", trace)
        elif "traceparent" not in metadata:
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
            more_options: channel options that override the connection's own.
            target: a gRPC target. None: the addresses, resolved now.

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
            # gRPC shares connections between channels with equal options. The pid keeps a forked child's apart.
            ("tbe.process", os.getpid()),
            ("grpc.max_send_message_length", _UNLIMITED),
            ("grpc.max_receive_message_length", _UNLIMITED),
            ("grpc.per_rpc_retry_buffer_size", _RETRY_BUFFER_BYTES),
            ("grpc.initial_reconnect_backoff_ms", _RECONNECT_MS[0]),
            ("grpc.min_reconnect_backoff_ms", _CONNECT_MS),
            ("grpc.max_reconnect_backoff_ms", _RECONNECT_MS[1]),
            ("grpc.keepalive_time_ms", int(1000 * _KEEPALIVE_S)),
            ("grpc.keepalive_timeout_ms", int(1000 * self._keepalive_timeout_s)),
            # A keepalive waits for a ping that gRPC has already sent: by default a minute.
            ("grpc.http2.ping_timeout_ms", int(1000 * self._keepalive_timeout_s)),
            ("grpc.enable_http_proxy", int(may_be_proxied(self.addresses))),
            # No pings without calls, and one in a long call: servers answer more pings with GOAWAY.
            ("grpc.keepalive_permit_without_calls", 0),
            ("grpc.http2.max_pings_without_data", 1),
        ]
        if self.tls is not None and (name := self._server_name) is not None:
            options.append(("grpc.ssl_target_name_override", name))
        return options


def _current_trace() -> str | None:
    """The traceparent of OpenTelemetry's current span, if the program uses OpenTelemetry."""
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


def _is_one_host(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return host == "localhost"
    return True
