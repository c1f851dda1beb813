"""A router and its hosts on this machine: a tritonserver for each host, and the router's own repository."""

import shutil
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from benchmarks.served import do_nothing_name, publish_do_nothing
from serving.bundle.opening import Bundle, open_bundle
from serving.model.config_file import apply_settings, read_config, settings_of, write_config
from serving.server import Ports, run_server

FREE = Ports(grpc=0, http=0, metrics=0)


def start_hosts(stack: ExitStack, router: Bundle, folder: Path, nothing: Iterable[int] = ()) -> dict[int, str]:
    """A server for each host of a router's plan; their addresses, by the host's number.

    Args:
        router: what was exported. The models of its hosts lie beside it, and move to repositories of their own.
        nothing: numbers of samples. Each host gets a model that does nothing but answer as many bytes.
    """
    addresses = {}
    for host in router.manifest.hosts:
        repository = folder / f"host-{host.host}"
        repository.mkdir()
        shutil.move(router.path.parent.parent / host.model, repository / host.model)
        part = open_bundle(repository / host.model / str(host.version)).manifest
        models = [host.model]
        for samples in nothing:
            width = sum(table.dim for table in part.feature_tables)
            publish_do_nothing(repository, samples, width, like=host.model)
            models.append(do_nothing_name(samples))
        addresses[host.host] = stack.enter_context(run_server(repository, FREE, models=models)).grpc
    return addresses


def name_hosts(router: Bundle, addresses: Mapping[int, str]) -> None:
    """Tell a router's model where its hosts are."""
    model = router.path.parent
    config = read_config(model)
    hosts = {str(host): address for host, address in addresses.items()}
    apply_settings(config, replace(settings_of(config), hosts=hosts, shard_timeout_ms=20_000))
    write_config(model, config)
