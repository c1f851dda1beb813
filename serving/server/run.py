"""Run a real tritonserver: start it, wait until its models are ready, stop it."""

import contextlib
import logging
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path

import serving
from serving.bundle.lineage import deltas_folder
from serving.delta_store import store_of
from serving.errors import ConfigurationError
from serving.log import close_log, server_log
from serving.model.config_file import OURS, Pins, check_pins, find_models, read_config, settings_of
from serving.server.access import Access
from serving.server.child_process import Launch, signals_deferred
from serving.server.delta_service import DeltaService
from serving.server.drain import check_drain
from serving.server.health_http import operations_port
from serving.server.health_state import HealthState
from serving.server.ports import Ports, free_endpoints
from serving.server.private_folder import Trust, private_folder
from serving.server.run_file import RunFile, RunFileWriter
from serving.server.running_server import FIRST_REGIONS, Server
from serving.server.shared_memory import region_prefix
from serving.server.startup import CONTROL_TIMEOUT_S, make_ready
from serving.tables.huge_page_copy import remove_unused_copies
from serving.tables.memory_need import SHM_BYTES
from serving.triton.command_line import (
    erase_from_command_line,
    exit_timeout_of,
    model_options,
    serving_options,
)
from serving.triton.control import metrics_page
from serving.triton.installation import find_tritonserver

# Seconds after a stopping server's own exit timeout until it is killed.
_GRACE_S = 15.0


@contextlib.contextmanager
def run_server(
    repository: Path,
    ports: Ports,
    *,
    models: Sequence[str] | None = None,
    pins: Pins | None = None,
    hosts: Mapping[str, Mapping[str, str]] | None = None,
    access: Access | None = None,
    trust: Trust | None = None,
    deltas: Path | str | None = None,
    ready_timeout_s: float = 120.0,
    log: Path | logging.Logger | None = None,
    shm_bytes: int = SHM_BYTES,
    drain_s: float = 0.0,
    options: Sequence[str] = (),
) -> Iterator[Server]:
    """Start a tritonserver on `repository`, wait until its models are ready, and stop it afterwards.

    The server is also stopped if this process dies.

    Args:
        repository: a model repository with models made by tbe-export.
        ports: the ports to listen on.
        models: the models to load. None stands for all models that tbe-export made.
        pins: the versions to serve, by model. Other models are served as their config.pbtxt says.
        hosts: by router and number of the host, the address of the host, in place of the addresses in config.pbtxt.
        access: who may reach the server. None stands for this machine only, without TLS.
        trust: which signatures are trusted, and how signed bundles are served. None: signatures are not checked.
        ready_timeout_s: maximum time to load the models, in seconds.
        deltas: the folder of the models' deltas, or its URL in a store. None stands for REPOSITORY.deltas.
        log: the server's log (`serving.log`), or its file. None stands for stderr.
        shm_bytes: maximum bytes of shared memory of an instance, for the requests that it answers together. The
            kernel's limit on the size of files enforces it (RLIMIT_FSIZE).
        drain_s: how long the supervisor waits for clients to leave before a stop, in seconds; 0 for not at all.
        options: further options of tritonserver, such as "--log-info=true".

    Raises:
        TritonserverFailed: tritonserver was not found, it ended, or its models were not ready in time.
        ConfigurationError: an argument cannot be used, a pinned version does not exist, a port is taken, or the
            working directory hides this package.
        BundleError: a bundle is not signed by a trusted key.
    """
    models, pins, hosts = models or find_models(repository), pins or {}, hosts or {}
    check_pins(repository, models, pins)
    access = access or Access()
    key = secrets.token_hex(16)
    with contextlib.ExitStack() as stack:
        private = None if trust is None else stack.enter_context(private_folder(repository, models, trust, pins))
        served = private.repository if private else repository
        folder = Path(private.path) if private else None
        expect_not_hidden(folder or Path.cwd())
        installation = find_tritonserver(stack)
        endpoints = stack.enter_context(free_endpoints(access, ports, drain_s))
        connection_age_s = check_drain(drain_s, [*endpoints.options, *options])
        environment = installation.environment | (private.environment if private else {})
        if not isinstance(log, logging.Logger):
            log = server_log(log)
            stack.callback(close_log, log)
        health = HealthState(tls=access.tls)
        copies = stack.enter_context(_live_copies(repository, models, deltas, environment, log, health))
        scrape = partial(metrics_page, endpoints.metrics, CONTROL_TIMEOUT_S)
        stack.enter_context(operations_port(endpoints.listener, health, scrape, access))
        regions = stack.enter_context(region_prefix())
        launch = Launch(
            command=[
                str(installation.program),
                *serving_options(served, installation.backends),
                *endpoints.options,
                *access.options(key),
                *options,
            ],
            environment=environment | copies.environment,
            folder=folder,
            shm_bytes=shm_bytes,
            log=log,
        )
        # Versions other than config.pbtxt's can be loaded only once Triton answers.
        to_load = {**dict.fromkeys(hosts, ()), **pins}
        loaded_at_start = [model for model in models if model not in to_load]
        server = Server(
            grpc=endpoints.grpc,
            http=endpoints.http,
            operations=endpoints.operations,
            control_address=endpoints.control,
            metrics_address=endpoints.metrics,
            port_handover=endpoints.port_handover,
            health=health,
            key=key,
            launch=launch,
            certificates=tuple(_certificates(access, served, models)),
            regions=f"{regions}{FIRST_REGIONS}",
            exit_timeout_s=exit_timeout_of(options) + _GRACE_S,
            connection_age_s=connection_age_s,
            drain_s=drain_s,
            repository=served,
            private=private,
        )
        stack.enter_context(_started(server, loaded_at_start))
        writer = RunFileWriter(_run_file(server, repository, pins, hosts))
        server.run_file_writer = stack.enter_context(writer.published())
        make_ready(server, loaded_at_start, to_load, ready_timeout_s)
        yield server


@contextlib.contextmanager
def _live_copies(
    repository: Path,
    models: Sequence[str],
    deltas: Path | str | None,
    environment: Mapping[str, str],
    log: logging.Logger,
    health: HealthState,
) -> Iterator[DeltaService]:
    """The live copies of models, to which deltas are applied in the block: of a folder, or of a store by its URL."""
    deltas = deltas or deltas_folder(repository)
    store = store_of(deltas)
    folder = Path(deltas) if store is None else store.folder
    health.deltas = copies = DeltaService(folder.absolute(), environment, log)
    with contextlib.ExitStack() as stack:
        if store is not None:
            stack.enter_context(
                copies.fetching(store, [repository / model for model in models], health.note_store_read)
            )
        stack.enter_context(copies.running())
        yield copies


def _certificates(access: Access, repository: Path, models: Sequence[str]) -> Iterator[Path]:
    """The files of the server's certificate, and of the certificates that routers and hosts use among themselves.

    With HTTP there are none: a second process with renewed certificates could not share its port.
    """
    if access.tls is None or access.http:
        return
    yield from access.tls.files
    for model in models:
        config = read_config(repository / model)
        if OURS in config.parameters:
            settings = settings_of(config)
            paths = settings.hosts_root_certificates, settings.hosts_certificate_chain, settings.hosts_private_key
            yield from (Path(path) for path in paths if path is not None)


def _run_file(server: Server, repository: Path, pins: Pins, hosts: Mapping[str, Mapping[str, str]]) -> RunFile:
    return RunFile(
        grpc=server.grpc,
        control=server.control_address,
        metrics=server.metrics_address,
        key=server.key,
        repository=str(repository.absolute()),
        private=server.private,
        process=server.process.pid,
        pinned=dict(pins),
        hosts={router: dict(addresses) for router, addresses in hosts.items()},
    )


@contextlib.contextmanager
def _started(server: Server, models: Sequence[str]) -> Iterator[None]:
    """Start a server that loads `models`. They are not ready yet. It is stopped when the block ends."""
    with contextlib.ExitStack() as stack:
        with signals_deferred():
            server.start(model_options(models))
            # The last process that uses a copy removes it when it ends, but not if Triton kills it.
            stack.callback(remove_unused_copies)
            stack.callback(server.end)
        if models:  # a loaded model shows that it has copied its options; without models, only its first answer does
            erase_from_command_line(server.process, server.key)
        yield


def expect_not_hidden(folder: Path) -> None:
    """Refuse a working directory with another `serving`: a model's process looks there first.

    Raises:
        ConfigurationError: naming it.
    """
    for finder in sys.meta_path:
        searched = [str(folder), *sys.path] if finder is PathFinder else None
        package = finder.find_spec("serving", searched)
        if package is not None and package.origin is not None:
            if not Path(package.origin).samefile(str(serving.__file__)):
                raise ConfigurationError(
                    f"{package.origin}: hides the package `serving` of tbe-serving from the processes of models, "
                    "which look in the working directory first: start in another folder, or give yours another name"
                )
            return
