"""A router and its hosts on this machine, where each host's server has further models beside that of the host."""

import re
import shutil
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import psutil

from benchmarks.served import do_nothing_name, publish_do_nothing
from serving.bundle.load import Bundle, open_bundle
from serving.model.config_file import apply_settings, read_config, settings_of, write_config
from serving.server import Ports, Server, run_server
from serving.server.status import process_memory

FREE = Ports(grpc=0, http=0, operations=0)


def start_hosts(stack: ExitStack, router: Bundle, folder: Path, nothing: Iterable[int]) -> dict[int, str]:
    """A server for each host of a router's plan; their addresses, by the host's number.

    `run_local_hosts` does that where a host's server needs no other model.

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
            publish_do_nothing(repository, samples, (1, samples, width), like=host.model)
            models.append(do_nothing_name(samples))
        addresses[host.host] = stack.enter_context(run_server(repository, FREE, models=models)).grpc
    return addresses


def make_patient(router: Bundle, hosts: Mapping[str, str] | None = None) -> None:
    """Have a router wait 20 s for its hosts, so that no deadline decides, and tell it where they are, if need be."""
    model = router.path.parent
    config = read_config(model)
    apply_settings(config, replace(settings_of(config), hosts=hosts, shard_timeout_ms=20_000))
    write_config(model, config)


def memory_bytes(server: Server, model: str) -> int:
    """What tritonserver and the instances of one of its models use, shared pages by their share (PSS)."""
    named = re.compile(rf"{re.escape(model)}_\d+_\d+")  # how Triton calls an instance
    stubs = psutil.Process(server.process.pid).children()
    instances = [stub.pid for stub in stubs if any(map(named.fullmatch, stub.cmdline()))]
    memory = [process_memory(pid) for pid in (server.process.pid, *instances)]
    assert len(memory) > 1
    return sum(process.share for process in memory if process is not None)
