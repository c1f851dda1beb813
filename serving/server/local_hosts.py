"""A router and its hosts on this machine: a tritonserver for each host of its plan, and one for the router."""

import logging
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from serving.bundle.load import Bundle, open_bundle, open_host, versions
from serving.bundle.manifest import MANIFEST
from serving.bundle.plan import HostBundle, is_host_model, path_of
from serving.bundle.signature import TrustedKeys
from serving.errors import ConfigurationError
from serving.log import LogFormat, close_log, server_log
from serving.model.config_file import Pins, check_pins, find_models, read_config
from serving.server.access import Access
from serving.server.ports import Ports
from serving.server.private_folder import Trust
from serving.server.run import run_server
from serving.server.running_server import Server
from serving.server.supervise import Supervisor
from serving.server.versions import configured_versions
from serving.tables.memory_need import SHM_BYTES

_FREE = Ports(grpc=0, http=0, operations=0)
_PERIOD_S = 0.25


@dataclass(frozen=True, slots=True)
class LocalFleet:
    """Servers whose models are ready.

    Attributes:
        hosts: the server of each host in the router's plan, by the host's number.
        router: the server of the router, and of all models in the repository that are not its hosts.
    """

    hosts: Mapping[int, Server]
    router: Server

    @property
    def addresses(self) -> dict[int, str]:
        """The gRPC address of each host, by its number."""
        return {number: server.grpc for number, server in self.hosts.items()}


@dataclass(frozen=True, slots=True)
class _Host:
    """The model of a host, and the versions of it that the router's versions name."""

    model: str
    versions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Placement:
    """Which models are on which server: the models beside the router, and each host's models by its number."""

    router: str
    models: tuple[str, ...]
    hosts: Mapping[int, _Host]


@contextmanager
def run_local_hosts(
    repository: Path,
    ports: Ports = _FREE,
    *,
    pins: Pins | None = None,
    access: Access | None = None,
    trust: Trust | None = None,
    deltas: Path | str | None = None,
    logs: Path | None = None,
    log_format: LogFormat = LogFormat.TEXT,
    shm_bytes: int = SHM_BYTES,
    drain_s: float = 0.0,
    options: Sequence[str] = (),
) -> Iterator[LocalFleet]:
    """Serve the router of a repository, and its hosts, until the block ends.

    Hosts listen on free ports of this machine alone, without TLS. The router is loaded with their addresses in place
    of those in its config.pbtxt, which stays as it is. Hosts serve the versions that the router's versions name.

    Args:
        repository: a model repository with one router and the models of its hosts.
        ports: the ports of the router's server.
        pins: as for `run_server`.
        access: who may reach the router's server; as for `run_server`.
        trust: as for `run_server`.
        deltas: as for `run_server`.
        logs: a folder for the log of each server, `<model>.log`. None stands for stderr.
        log_format: the format of these logs.
        shm_bytes: as for `run_server`, for each server.
        drain_s: as for `run_server`, for the router's server. Only the router calls the other servers.
        options: as for `run_server`, for each server.

    Raises:
        ConfigurationError: the repository has no router, several routers, or lacks the bundle of a host; or as for
            `run_server`.
        BundleError: a bundle is damaged, or is not the one that the router names; or as for `run_server`.
        TritonserverFailed: as `run_server`.
    """
    pins = pins or {}
    placed = _placement(repository, pins, None if trust is None else TrustedKeys.read(trust.keys))
    start = partial(run_server, repository, deltas=deltas, shm_bytes=shm_bytes, options=options)
    with ExitStack() as stack:

        def log_of(model: str, host: int | None = None) -> logging.Logger:
            log = server_log(None if logs is None else logs / f"{model}.log", log_format, host)
            stack.callback(close_log, log)
            return log

        hosts = {
            number: stack.enter_context(
                start(
                    _FREE,
                    models=[host.model],
                    pins={host.model: pins.get(host.model, host.versions)},
                    trust=_trust_in(trust, [host.model]),
                    log=log_of(host.model, number),
                )
            )
            for number, host in placed.hosts.items()
        }
        models = [placed.router, *placed.models]
        router = stack.enter_context(
            start(
                ports,
                models=models,
                pins={model: versions for model, versions in pins.items() if model in models},
                hosts={placed.router: {str(number): server.grpc for number, server in hosts.items()}},
                access=access,
                drain_s=drain_s,
                trust=_trust_in(trust, models),
                log=log_of(placed.router),
            )
        )
        yield LocalFleet(hosts, router)


def _trust_in(trust: Trust | None, models: Sequence[str]) -> Trust | None:
    """The `trust` of a server that has only some of the models."""
    if trust is None:
        return None
    floors = {model: floor for model, floor in trust.min_versions.items() if model in ("*", *models)}
    return replace(trust, min_versions=floors)


def _placement(repository: Path, pins: Pins, keys: TrustedKeys | None) -> _Placement:
    models = find_models(repository)
    check_pins(repository, models, pins)
    bundles: dict[str, list[Bundle]] = {}
    for model in models:
        path = repository / model
        served = pins.get(model) or configured_versions(read_config(path, keys), versions(path))
        bundles[model] = [open_bundle(path / str(version), keys) for version in served]
    routers = [
        model
        for model, bundles_of_model in bundles.items()
        if any(bundle.manifest.hosts for bundle in bundles_of_model)
    ]
    if len(routers) != 1:
        got = "none" if not routers else f"{', '.join(routers)}: give each a repository of its own"
        raise ConfigurationError(
            f"{repository}: --local-hosts: expected one router, as `tbe-export model --hosts-as-models` makes it, "
            f"found {got}"
        )
    (router,) = routers
    return _Placement(
        router,
        tuple(other for other in models if other != router and not is_host_model(other, router)),
        _hosts(bundles[router], keys),
    )


def _hosts(routers: Sequence[Bundle], keys: TrustedKeys | None) -> dict[int, _Host]:
    """The hosts of all versions of a router."""
    hosts: dict[int, _Host] = {}
    for router in routers:
        for host in router.manifest.hosts:
            _check_host(router, host, keys)
            versions_before = hosts[host.host].versions if host.host in hosts else ()
            hosts[host.host] = _Host(host.model, tuple(sorted({*versions_before, host.version})))
    return hosts


def _check_host(router: Bundle, host: HostBundle, keys: TrustedKeys | None) -> None:
    path = path_of(router.path, host)
    if not (path / MANIFEST).exists():
        raise ConfigurationError(
            f"{path}: host {host.host} of {router.path}: expected its bundle here, found none: copy it here, or say "
            "where it is served, `tbe-serve configure --host`, and leave --local-hosts out"
        )
    open_host(router, host, keys)


class FleetSupervisor:
    """Supervises a router's server and its hosts' servers as one.

    A thread for each server watches and restarts it. The main thread receives signals meanwhile.

    Args:
        hosts: the supervisors of the hosts' servers.
        router: the supervisor of the router's server.
    """

    def __init__(self, hosts: Sequence[Supervisor], router: Supervisor) -> None:
        self._hosts, self._router = hosts, router
        self._number: int | None = None
        self._at_once = False

    def stop(self, number: int) -> None:
        """Stop all servers by signal `number`: first the router, which needs its hosts to answer accepted requests.

        A second call ends all servers at once.
        """
        self._at_once = self._number is not None
        self._number = number

    def wait(self) -> int:
        """Watch until all servers have ended. When one ends for good, the others are stopped.

        Returns:
            The exit code of the router's server; or if that is 0, the first exit code of a host's server that is not
            0.

        Raises:
            ServingError: as `Supervisor.wait`.
        """
        with ThreadPoolExecutor(1 + len(self._hosts)) as pool:
            router = pool.submit(self._router.wait)
            hosts = [pool.submit(supervisor.wait) for supervisor in self._hosts]
            while self._number is None and not wait([router, *hosts], 0, FIRST_COMPLETED).done:
                time.sleep(_PERIOD_S)
            self._stop([self._router], [router])
            self._stop(self._hosts, hosts)
        return next((code for code in (future.result() for future in (router, *hosts)) if code), 0)

    def _stop(self, supervisors: Sequence[Supervisor], running: Sequence["Future[int]"]) -> None:
        """Stop the running servers, and wait until they have ended."""
        signalled = 0
        while not all(future.done() for future in running):
            if signalled < 1 + self._at_once:
                signalled += 1
                for supervisor, future in zip(supervisors, running, strict=True):
                    if not future.done():
                        supervisor.stop(signal.SIGTERM if self._number is None else self._number)
            wait(running, _PERIOD_S)
