"""Where the hosts of a router's plan are, and how they are asked."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from serving.arguments import check_arguments
from serving.bundle.manifest import Manifest
from serving.client.connection import Connection, Tls
from serving.client.metadata import Metadata
from serving.client.retries import Retries
from serving.errors import ConfigurationError
from serving.timeouts import check_timeout

DEFAULT_TIMEOUT_S = 0.3


class OnLost(enum.Enum):
    """What a request gets that needs rows of a host that does not answer: an error, or zeros in their place."""

    ERROR = "error"
    ZERO = "zero"


@dataclass(frozen=True, kw_only=True, slots=True)
class Hosts:
    """The hosts of a router's plan.

    Attributes:
        addresses: of each host, by its number: "host:port" of one server or several, each with a replica. A name
            may stand for many. Calls go to each in turn.
        timeout_s: how long a host may take, in seconds, all attempts together.
        tls: certificates. None: no TLS.
        metadata: sent with each call.
        on_lost: what happens when a host is lost, by name or glob of a table; the last that matches counts; `error`
            where none matches.

    Raises:
        ConfigurationError: an argument has another type, or an address or the timeout cannot be used.
    """

    addresses: Mapping[int, str | Sequence[str]]
    timeout_s: float = DEFAULT_TIMEOUT_S
    tls: Tls | None = None
    metadata: Metadata = field(default_factory=dict)
    on_lost: Mapping[str, OnLost] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_arguments(self)
        check_timeout(self.timeout_s)
        for host in self.addresses:
            self.connection(host)

    def connection(self, host: int) -> Connection:
        """How a host is reached. gRPC itself tries nothing again."""
        given = self.addresses[host]
        return Connection(
            addresses=[given] if isinstance(given, str) else list(given),
            timeout_s=self.timeout_s,
            retries=Retries(attempts=1),
            tls=self.tls,
            metadata=self.metadata,
        )

    def on_lost_of(self, table: str) -> OnLost:
        """What happens when a host is lost that holds rows of `table`."""
        found = [choice for pattern, choice in self.on_lost.items() if fnmatchcase(table, pattern)]
        return found[-1] if found else OnLost.ERROR

    def check(self, manifest: Manifest) -> None:
        """Refuse addresses and tables that do not fit a bundle.

        Raises:
            ConfigurationError: a host of the plan has no address, an address is for no host, or a pattern matches no
                table.
        """
        expected = {each.host: each.model for each in manifest.hosts}
        named = ", ".join(f"{host} ({model})" for host, model in expected.items())
        for host in [*expected.keys() - self.addresses.keys(), *self.addresses.keys() - expected.keys()]:
            what = "got none for" if host in expected else "got some for"
            raise ConfigurationError(f"hosts: expected addresses for hosts {named}, {what} {host}")
        for pattern in self.on_lost:
            if not any(fnmatchcase(table.name, pattern) for table in manifest.tables):
                raise ConfigurationError(f"on_lost {pattern!r}: the model has no such table")
