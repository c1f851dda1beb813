"""The replicas of all hosts: which of them answer, and whether each host has one with its bundle."""

import asyncio
import socket
import threading
import time
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

from serving.bundle.manifest import Manifest
from serving.bundle.plan import HostBundle
from serving.client.connection import Connection
from serving.client.targets import address_host
from serving.errors import ConfigurationError, HostUnavailable, InternalError, ModelNotFound, ServingError
from serving.files import Strict
from serving.router.host import Host, host_of
from serving.router.hosts_config import HostsConfig

T = TypeVar("T")
# Seconds between checks of a host that does not answer yet.
_POLL_S = 0.2


async def check_all(hosts: Mapping[int, Host], patience_s: float) -> None:
    """Check that every host has a replica with its bundle.

    Args:
        hosts: the hosts by rank.
        patience_s: how long to wait for hosts that do not answer, in seconds.

    Raises:
        HostUnavailable: a host lacks its bundle, or does not answer. The message names all such hosts.
    """
    deadline = time.monotonic() + patience_s
    problems = await asyncio.gather(*(_check(host, deadline) for host in hosts.values()))
    if wrong := [problem for problem in problems if problem is not None]:
        raise HostUnavailable("; ".join(wrong))


async def _check(host: Host, deadline: float) -> str | None:
    while True:
        try:
            await host.check()
        except (ModelNotFound, InternalError) as error:
            return str(error)
        except HostUnavailable as error:
            if time.monotonic() + _POLL_S >= deadline:
                return str(error)
        else:
            return None
        await asyncio.sleep(_POLL_S)


class LoopThread:
    """An event loop on its own thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="hosts", daemon=True)
        self._thread.start()

    @property
    def is_forked(self) -> bool:
        """Whether this process is a forked child, which has no such thread."""
        return not self._thread.is_alive()

    def check(self) -> None:
        """Refuse a forked child.

        Raises:
            ConfigurationError: this process is a forked child.
        """
        if self.is_forked:
            raise ConfigurationError(
                "hosts: this process was forked from the one that connected to them: start it by `spawn` or "
                "`forkserver`, and open the bundle in it"
            )

    def start(self, coroutine: Coroutine[Any, Any, T]) -> "Future[T]":
        """Run a coroutine on the loop. This returns at once."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> None:
        """Cancel the coroutines that still run on the loop, and end the thread."""
        self.start(_cancel_others()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_others() -> None:
    """Cancel all other tasks of this loop, and wait for their ends."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Replica(Strict, frozen=True):
    """A replica of a host, and the result of its last check.

    Attributes:
        address: "host:port".
        problem: why it cannot answer, or None if it can.
    """

    address: str
    problem: str | None


class HostReplicas(Strict, frozen=True):
    """A host of a router's plan.

    Attributes:
        host: the number of the host.
        model: the model that it serves for the router.
        version: the version of that model.
        replicas: its replicas, in the order of their addresses.
    """

    host: int
    model: str
    version: int
    replicas: tuple[Replica, ...]

    @property
    def up(self) -> int:
        """How many replicas can answer."""
        return sum(replica.problem is None for replica in self.replicas)


async def replicas_of(manifest: Manifest, hosts: HostsConfig) -> tuple[HostReplicas, ...]:
    """Check all replicas of all hosts at once: does each have its host's bundle?

    Args:
        manifest: the manifest of a router.
        hosts: the addresses of its hosts. Each check takes at most `HostsConfig.timeout_s`.
    """
    replicas_by_host = await asyncio.gather(
        *(_ask_each(manifest, host, hosts.connection(host.host)) for host in manifest.hosts)
    )
    return tuple(
        HostReplicas(host=host.host, model=host.model, version=host.version, replicas=replicas)
        for host, replicas in zip(manifest.hosts, replicas_by_host, strict=True)
    )


async def _ask_each(manifest: Manifest, bundle: HostBundle, connection: Connection) -> tuple[Replica, ...]:
    resolved = await asyncio.gather(*(_resolved(connection, address) for address in connection.addresses))
    replicas = [connection for some in resolved for connection in some]
    return tuple(await asyncio.gather(*(_ask(manifest, bundle, replica) for replica in replicas)))


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
    """A connection for each IP address that an address resolves to."""
    name, port = address_host(address), address.rpartition(":")[2]
    try:
        infos = await asyncio.get_running_loop().getaddrinfo(name, int(port), type=socket.SOCK_STREAM)
    except OSError:
        return [replace(connection, addresses=[address])]  # gRPC's error says why it cannot be resolved
    tls = connection.tls
    if tls is not None and tls.server_name is None:
        tls = replace(tls, server_name=name)  # an IP address would be expected in the certificate
    ips = dict.fromkeys(str(info[4][0]) for info in infos)
    return [replace(connection, addresses=[f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"], tls=tls) for ip in ips]
