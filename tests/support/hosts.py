"""Models whose ranks are on several hosts: exported, served, and the same plan in one process."""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from torch import nn

from export import ExportConfig, Sharding, export_model
from serving.bundle.manifest import Manifest
from serving.bundle.opening import open_bundle
from serving.ranks.hosts import Hosts
from tests.support.deadlines import PATIENT_S
from tests.support.servers import Running, running, tbe_serve

MODEL = "movies"


@dataclass(frozen=True)
class Fleet:
    """A router and its hosts, served.

    Attributes:
        bundle: the router's bundle, as it was exported.
        router: the server of the router.
        addresses: of each host, as `Engine.open` takes them.
        servers: of each host.
    """

    bundle: Path
    router: Running
    addresses: Mapping[int, Sequence[str]]
    servers: Mapping[int, Sequence[Running]]

    @property
    def hosts(self) -> Hosts:
        """As `Engine.open` takes them, by tests that are not about deadlines."""
        return patient(self.addresses)


def patient(addresses: Mapping[int, str | Sequence[str]]) -> Hosts:
    """Hosts that may take their time."""
    return Hosts(addresses=addresses, timeout_s=PATIENT_S)


def export_hosts(folder: Path, module: nn.Module, config: ExportConfig) -> Path:
    """The router's bundle in `folder`/r, beside those of its hosts."""
    config = replace(config, sharding=replace(config.sharding, hosts_as_models=True))
    return export_model(module, folder / "r", MODEL, config)


def in_one_process(folder: Path, module: nn.Module, config: ExportConfig, router: Path) -> Path:
    """A bundle in `folder` with the router's plan, and all ranks in it."""
    plan = folder / "plan.json"
    plan.write_text(plan_json(open_bundle(router).manifest))
    return export_model(module, folder / "one", MODEL, replace(config, sharding=Sharding(plan=plan)))


def plan_json(manifest: Manifest) -> str:
    """The plan of a bundle, as `--plan` takes it."""
    tables = {
        name: {
            "sharding_type": manifest.plan.sharding[name].value,
            "shards": [{"rank": each.rank, "rows": each.rows, "columns": each.columns} for each in shards],
        }
        for name, shards in manifest.plan.shards_by_table.items()
    }
    return json.dumps({"ranks": [{"host": rank.host} for rank in manifest.plan.ranks], "tables": tables})


def only(repository: Path, models: Sequence[str], into: Path) -> Path:
    """A repository with some of the models of another."""
    for model in models:
        shutil.copytree(repository / model, into / model)
    return into


@contextmanager
def fleet(folder: Path, router: Path, *settings: str, replicas: int = 1) -> Iterator[Fleet]:
    """Serve a router's bundle and those of its hosts, each on servers of its own.

    Args:
        folder: for copies of the repository.
        router: the router's bundle.
        settings: options of `tbe-serve configure` for the router.
        replicas: of each host.
    """
    repository, hosts = router.parent.parent, open_bundle(router).manifest.hosts
    with ExitStack() as stack:
        servers = {
            each.host: [
                stack.enter_context(running(only(repository, [each.model], folder / f"{each.host}.{replica}")))
                for replica in range(replicas)
            ]
            for each in hosts
        }
        addresses = {host: [server.grpc for server in found] for host, found in servers.items()}
        own = only(repository, [router.parent.name], folder / "router")
        configure(own / router.parent.name, addresses, *settings)
        yield Fleet(router, stack.enter_context(running(own)), addresses, servers)


def configure(model: Path, addresses: Mapping[int, Sequence[str]], *settings: str) -> None:
    """Tell a router where its hosts are, which may take their time if `settings` do not say how long."""
    if "--shard-timeout-ms" not in settings:
        settings = (*settings, "--shard-timeout-ms", str(int(1000 * PATIENT_S)))
    options = [part for host, found in addresses.items() for part in ("--host", f"{host}={','.join(found)}")]
    done = tbe_serve("configure", str(model), *options, *settings)
    assert done.returncode == 0, done.stderr


def edit_manifest(bundle: Path, **changes: object) -> None:
    """Change a published manifest."""
    manifest = open_bundle(bundle).manifest
    path = bundle / "manifest.json"
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(manifest, **changes)))
