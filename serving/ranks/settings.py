"""The hosts of a served router, as its settings say."""

from pathlib import Path

from serving.client.connection import Tls
from serving.client.metadata import MetadataFile
from serving.model.settings import ServingSettings
from serving.ranks.hosts import DEFAULT_TIMEOUT_S, Hosts, OnLost


def hosts_of(settings: ServingSettings) -> Hosts:
    """Where the hosts are, and how they are asked.

    Raises:
        ConfigurationError: as `Hosts`.
    """
    given = settings.hosts or {}
    return Hosts(
        addresses={int(number): addresses.split(",") for number, addresses in given.items()},
        timeout_s=DEFAULT_TIMEOUT_S if settings.shard_timeout_ms is None else settings.shard_timeout_ms / 1000,
        tls=_tls_of(settings),
        metadata={} if settings.hosts_metadata is None else MetadataFile(Path(settings.hosts_metadata)),
        on_lost={pattern: OnLost(choice) for pattern, choice in (settings.on_lost or {}).items()},
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
