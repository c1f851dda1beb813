"""The replicas of a router's hosts, each asked by itself: which of them could answer now."""

import asyncio
import re
import socket
from dataclasses import replace

from serving.bundle.hosts import HostBundle
from serving.bundle.manifest import Manifest
from serving.client.connection import Connection, Tls
from serving.errors import ServingError
from serving.files.strict import Strict
from serving.ranks.host import host_of
from serving.ranks.hosts import Hosts


class Replica(Strict, frozen=True):
    """A replica of a host.

    Attributes:
        address: "host:port".
        problem: why it would not answer; None if it would.
    """

    address: str
    problem: str | None


class HostReplicas(Strict, frozen=True):
    """A host of a router's plan.

    Attributes:
        host: its number.
        model: the model that answers for it.
        version: of that model.
        replicas: in the order of their addresses.
    """

    host: int
    model: str
    version: int
    replicas: tuple[Replica, ...]

    @property
    def up(self) -> int:
        """How many replicas would answer."""
        return sum(each.problem is None for each in self.replicas)


async def replicas_of(manifest: Manifest, hosts: Hosts) -> tuple[HostReplicas, ...]:
    """Ask every replica of every host whether it has its bundle, all at once.

    Args:
        manifest: a router's.
        hosts: where the hosts are; each question may take as long as `Hosts.timeout_s`.
    """
    found = await asyncio.gather(*(_ask_each(manifest, each, hosts.connection(each.host)) for each in manifest.hosts))
    return tuple(
        HostReplicas(host=each.host, model=each.model, version=each.version, replicas=replicas)
        for each, replicas in zip(manifest.hosts, found, strict=True)
    )


async def _ask_each(manifest: Manifest, bundle: HostBundle, connection: Connection) -> tuple[Replica, ...]:
    resolved = await asyncio.gather(*(_resolved(connection, address) for address in connection.addresses))
    replicas = [each for some in resolved for each in some]
    return tuple(await asyncio.gather(*(_ask(manifest, bundle, each) for each in replicas)))


async def _ask(manifest: Manifest, bundle: HostBundle, connection: Connection) -> Replica:
    (address,) = connection.addresses
    host = None
    try:
        host = host_of(manifest, bundle, connection)
        await host.check()
    except ServingError as error:
        return Replica(address=address, problem=str(error))
    finally:
        if host is not None:
            await host.close()
    return Replica(address=address, problem=None)


async def _resolved(connection: Connection, address: str) -> list[Connection]:
    """A connection to each server that an address stands for."""
    name, _, port = address.rpartition(":")
    name = re.sub(r"^(dns|ipv4|ipv6):(///)?", "", name).strip("[]")
    try:
        found = await asyncio.get_running_loop().getaddrinfo(name, int(port), type=socket.SOCK_STREAM)
    except OSError:
        return [replace(connection, addresses=[address])]  # gRPC says what is wrong with it
    ips = dict.fromkeys(str(each[4][0]) for each in found)
    return [
        replace(
            connection,
            addresses=[f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"],
            tls=_named(connection.tls, name),
        )
        for ip in ips
    ]


def _named(tls: Tls | None, name: str) -> Tls | None:
    """TLS to an address, with the name that its certificate has."""
    return tls if tls is None or tls.server_name is not None else replace(tls, server_name=name)
