"""Where a client connects, and how: addresses, TLS, metadata, deadline, retries."""

import ipaddress
import json
import re
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc

from serving.client.retries import Retries
from serving.errors import InvalidRequest, ServerUnavailable

DEFAULT_TIMEOUT_S = 1.0
Metadata = Mapping[str, str] | Callable[[], Mapping[str, str]]

# The statuses of errors that say: nothing happened, another try may do.
RETRIED = ("UNAVAILABLE", "ABORTED")
_UNLIMITED = 2**31 - 1
_MOST_TIMEOUT_S = 1_000_000
# A name or IP address, IPv6 in brackets, that gRPC may be told how to resolve ("dns:///name:8001").
_HOST = r"[A-Za-z0-9_.-]{1,253}"
_ADDRESS = re.compile(rf"(?:(?:dns|ipv4|ipv6):(?:///)?)?(?:{_HOST}|\[[0-9A-Fa-f:.%]{{2,60}}\]):[0-9]{{1,5}}")
_MOST_PORT = 65535
# How soon a connection that was lost is tried again, at first and at last; gRPC would wait for up to two minutes.
_RECONNECT_MS = (100, 1000)
# gRPC keeps a message of up to this size to send it again; larger ones are sent once.
_RETRY_BUFFER_BYTES = 64 << 20
# A connection with calls on it that is silent for so long is asked for a sign of life,
_SILENCE_S = 1.0
# and given up without one after a third of the deadline, within these. For so long the kernel waits for what was sent
# to be taken, too (TCP_USER_TIMEOUT): it must not be less than a busy server, or a packet sent again, may take.
_SIGN_OF_LIFE_S = (0.3, 5.0)
# A server that fails nearly all calls for an interval, of two or more, is left out for a while; never more than half.
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


def check_timeout(timeout_s: float) -> None:
    """Refuse what cannot be waited for.

    Raises:
        InvalidRequest: it is not a number of seconds above 0, or more than a million.
    """
    if not 0 < timeout_s <= _MOST_TIMEOUT_S:
        raise InvalidRequest(f"timeout_s: expected > 0 and at most {_MOST_TIMEOUT_S}, got {timeout_s}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tls:
    """TLS with PEM files.

    Attributes:
        root_certificates: who may have signed the server's certificate; the system's where None.
        certificate_chain, private_key: the client's own, for mutual TLS.
        server_name: the name that the server's certificate must have, if it is not its address.
    """

    root_certificates: Path | None = None
    certificate_chain: Path | None = None
    private_key: Path | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        if self.server_name is not None and not re.fullmatch(_HOST, self.server_name):
            raise InvalidRequest(f"{self.server_name or repr('')}: expected the name of a host")

    def credentials(self) -> grpc.ChannelCredentials:
        """What gRPC takes.

        Raises:
            InvalidRequest: a file cannot be read, or one of certificate_chain and private_key is missing.
        """
        if (self.certificate_chain is None) != (self.private_key is None):
            raise InvalidRequest("tls: expected certificate_chain and private_key together, got one of them")
        roots, key, chain = (
            None if path is None else _read_pem(path)
            for path in (self.root_certificates, self.private_key, self.certificate_chain)
        )
        self._check()
        return grpc.ssl_channel_credentials(roots, key, chain)

    def _check(self) -> None:
        """Have OpenSSL read the files first: gRPC would log what it thinks of them, and fail each call."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            if self.certificate_chain is not None:
                context.load_cert_chain(self.certificate_chain, self.private_key, password=_no_password)
        except (OSError, ValueError) as error:  # ssl's own errors are OSErrors
            raise InvalidRequest(
                f"{self.certificate_chain}: expected a certificate in PEM, and its key in {self.private_key}: {error}"
            ) from error
        try:
            if self.root_certificates is not None:
                context.load_verify_locations(self.root_certificates)
        except (OSError, ValueError) as error:
            raise InvalidRequest(f"{self.root_certificates}: expected certificates in PEM: {error}") from error


class Closing:
    """Is closed where a `with` block ends."""

    def close(self) -> None:
        """Give back what it holds."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class Connection:
    """How clients reach a server.

    Attributes:
        addresses: "host:port" of one server or several; a name may stand for many. Calls go to each in turn.
        timeout_s: deadline of a call, tries and all.
        tls: None sends in the clear.
        metadata: sent with each call; a function is asked each time, such as for a token that expires.
    """

    addresses: Sequence[str]
    timeout_s: float = DEFAULT_TIMEOUT_S
    retries: Retries = field(default_factory=Retries)
    tls: Tls | None = None
    metadata: Metadata = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_timeout(self.timeout_s)
        if not self.addresses:
            raise InvalidRequest("addresses: expected at least one, got none")
        for address in self.addresses:
            if not _ADDRESS.fullmatch(address) or int(address.rpartition(":")[2]) > _MOST_PORT:
                raise InvalidRequest(f"{address or repr(address)}: expected host:port, such as 127.0.0.1:8001")

    @property
    def target(self) -> str:
        """What gRPC takes: a name is resolved by gRPC, now and later; several addresses are resolved once, here.

        Raises:
            ServerUnavailable: a name among several cannot be resolved.
        """
        if len(self.addresses) == 1:
            return self.addresses[0]
        found = [_resolved(address) for address in self.addresses]
        return f"ipv4:{','.join(found)}"

    @property
    def elsewhere(self) -> bool:
        """Whether another try may reach another server: there are several, or a name that may stand for many."""
        return len(self.addresses) > 1 or not _is_one_host(self.addresses[0].rpartition(":")[0])

    @property
    def _sign_of_life_s(self) -> float:
        least, most = _SIGN_OF_LIFE_S
        return min(max(self.timeout_s / 3, least), most)

    def call_metadata(self, trace: str | None) -> list[tuple[str, str]]:
        """The metadata of one call; `trace` is its W3C traceparent."""
        given = self.metadata() if callable(self.metadata) else self.metadata
        return [(key.lower(), value) for key, value in given.items()] + ([("traceparent", trace)] if trace else [])

    def channel(self, library: Any) -> Any:
        """A channel of `library`, which is grpc or grpc.aio."""
        if self.tls is None:
            return library.insecure_channel(self.target, self._options())
        return library.secure_channel(self.target, self.tls.credentials(), self._options())

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
            ("grpc.max_send_message_length", _UNLIMITED),
            ("grpc.max_receive_message_length", _UNLIMITED),
            ("grpc.per_rpc_retry_buffer_size", _RETRY_BUFFER_BYTES),
            ("grpc.initial_reconnect_backoff_ms", _RECONNECT_MS[0]),
            ("grpc.min_reconnect_backoff_ms", _RECONNECT_MS[0]),
            ("grpc.max_reconnect_backoff_ms", _RECONNECT_MS[1]),
            ("grpc.keepalive_time_ms", int(1000 * _SILENCE_S)),
            ("grpc.keepalive_timeout_ms", int(1000 * self._sign_of_life_s)),
            # Without calls none is asked for, and in a long call one: servers answer more with GOAWAY.
            ("grpc.keepalive_permit_without_calls", 0),
            ("grpc.http2.max_pings_without_data", 1),
        ]
        if self.tls is not None and self.tls.server_name is not None:
            options.append(("grpc.ssl_target_name_override", self.tls.server_name))
        return options


def _read_pem(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"{path}: cannot be read: {error.strerror}") from error


def _no_password() -> str:
    raise ValueError("the key has a password, which gRPC cannot be given")


def _is_one_host(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return host == "localhost"
    return True


def _resolved(address: str) -> str:
    host, _, port = address.rpartition(":")
    try:
        ip = socket.getaddrinfo(host, int(port), socket.AF_INET, socket.SOCK_STREAM)[0][4][0]
    except (OSError, ValueError) as error:
        raise ServerUnavailable(f"{address}: expected host:port of a host with an IPv4 address: {error}") from error
    return f"{ip}:{port}"
