"""The configuration of a router's hosts: addresses, timeout, TLS, metadata, and what a lost host means."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from serving.arguments import check_arguments, check_timeout
from serving.bundle.manifest import Manifest
from serving.client.connection import Connection, Tls
from serving.client.metadata import Metadata, MetadataFile
from serving.client.retries import Retries
from serving.errors import ConfigurationError
from serving.model.settings import ServingSettings

DEFAULT_TIMEOUT_S = 0.3


class OnShardFailure(enum.Enum):
    """What a request gets if it needs rows of a lost host: an error, or zeros in place of the rows."""

    ERROR = "error"
    ZERO = "zero"


@dataclass(frozen=True, kw_only=True, slots=True)
class HostsConfig:
    """The hosts of a router's plan.

    Attributes:
        addresses: the "host:port" of each replica of a host, by the host's number. A name may resolve to several
            replicas. Calls go to the replicas in turn.
        timeout_s: the timeout of a call to a host with all its attempts, in seconds.
        tls: the certificates, or None for no TLS.
        metadata: the metadata of each call.
        on_shard_failure: what a request gets if a host is lost, by name or glob of a table. The last match counts,
            and without a match it is `error`.

    Raises:
        ConfigurationError: an argument has a wrong type, or an address or the timeout cannot be used.
    """

    addresses: Mapping[int, str | Sequence[str]]
    timeout_s: float = DEFAULT_TIMEOUT_S
    tls: Tls | None = None
    metadata: Metadata = field(default_factory=dict)
    on_shard_failure: Mapping[str, OnShardFailure] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_arguments(self)
        check_timeout(self.timeout_s)
        for host in self.addresses:
            self.connection(host)

    def connection(self, host: int) -> Connection:
        """How a host is reached. gRPC's own retries are off: `Host` makes the attempts."""
        address = self.addresses[host]
        return Connection(
            addresses=[address] if isinstance(address, str) else list(address),
            timeout_s=self.timeout_s,
            retries=Retries(attempts=1),
            tls=self.tls,
            metadata=self.metadata,
        )

    def on_shard_failure_of(self, table: str) -> OnShardFailure:
        """What a request gets if it needs rows of `table` from a lost host."""
        choices = [choice for pattern, choice in self.on_shard_failure.items() if fnmatchcase(table, pattern)]
        return choices[-1] if choices else OnShardFailure.ERROR

    def check(self, manifest: Manifest) -> None:
        """Refuse addresses and tables that do not fit a bundle.

        Raises:
            ConfigurationError: a host of the plan has no address, an address belongs to no host, or a pattern matches
                no table.
        """
        expected = {bundle.host: bundle.model for bundle in manifest.hosts}
        named = ", ".join(f"{host} ({model})" for host, model in expected.items())
        for host in [*expected.keys() - self.addresses.keys(), *self.addresses.keys() - expected.keys()]:
            what = "got none for" if host in expected else "got some for"
            raise ConfigurationError(f"hosts: expected addresses for hosts {named}, {what} {host}")
        for pattern in self.on_shard_failure:
            if not any(fnmatchcase(table.name, pattern) for table in manifest.tables):
                raise ConfigurationError(f"on_shard_failure {pattern!r}: the model has no such table")


def hosts_of(settings: ServingSettings) -> HostsConfig:
    """The HostsConfig of a model's settings.

    Raises:
        ConfigurationError: as `HostsConfig`.
    """
    hosts = settings.hosts or {}
    return HostsConfig(
        addresses={int(number): addresses.split(",") for number, addresses in hosts.items()},
        timeout_s=DEFAULT_TIMEOUT_S if settings.shard_timeout_ms is None else settings.shard_timeout_ms / 1000,
        tls=_tls_of(settings),
        metadata={} if settings.hosts_metadata is None else MetadataFile(Path(settings.hosts_metadata)),
        on_shard_failure={
            pattern: OnShardFailure(choice) for pattern, choice in (settings.on_shard_failure or {}).items()
        },
    )


def _tls_of(settings: ServingSettings) -> Tls | None:
    roots, chain, key = (
        None if path is None else Path(path)
        for path in (
            settings.hosts_root_certificates,
            settings.hosts_certificate_chain,
            settings.hosts_private_key,
        )
    )
    if (roots, chain, key, settings.hosts_server_name) == (None, None, None, None):
        return None
    return Tls(
        root_certificates=roots,
        certificate_chain=chain,
        private_key=key,
        server_name=settings.hosts_server_name,
    )
