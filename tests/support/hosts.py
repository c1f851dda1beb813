"""Models whose ranks are on several hosts: exported, served, and the same plan in one process."""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from torch import nn

from export import ExportConfig, Sharding, export_model
from serving.bundle.load import open_bundle
from serving.bundle.manifest import Manifest
from serving.router.hosts_config import HostsConfig
from serving.server import Server, run_local_hosts
from tests.support.deadlines import PATIENT_S
from tests.support.servers import tbe_serve

MODEL = "movies"


@dataclass(frozen=True)
class Fleet:
    """A router and its hosts, served, and supervised by nobody.

    Attributes:
        bundle: the router's bundle, as it was exported.
        router: the server of the router.
        servers: of each host.
    """

    bundle: Path
    router: Server
    servers: Mapping[int, Server]

    @property
    def hosts(self) -> HostsConfig:
        """As `Engine.open` takes them, by tests that are not about deadlines."""
        return patient({host: server.grpc for host, server in self.servers.items()})


def patient(addresses: Mapping[int, str | Sequence[str]]) -> HostsConfig:
    """Hosts that may take their time."""
    return HostsConfig(addresses=addresses, timeout_s=PATIENT_S)


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
            "shards": [{"rank": shard.rank, "rows": shard.rows, "columns": shard.columns} for shard in shards],
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
def fleet(logs: Path, router: Path, *settings: str) -> Iterator[Fleet]:
    """Serve a router's bundle and those of its hosts, each on a server of its own.

    Args:
        logs: a folder for the servers' logs.
        router: the router's bundle.
        settings: options of `tbe-serve configure` for the router.
    """
    configure(router.parent, {}, *settings)
    with run_local_hosts(router.parent.parent, logs=logs) as served:
        yield Fleet(router, served.router, served.hosts)


def configure(model: Path, addresses: Mapping[int, Sequence[str]], *settings: str) -> None:
    """Tell a router where its hosts are, which may take their time if `settings` do not say how long."""
    if "--shard-timeout-ms" not in settings:
        settings = (*settings, "--shard-timeout-ms", str(int(1000 * PATIENT_S)))
    options = [part for host, address in addresses.items() for part in ("--host", f"{host}={','.join(address)}")]
    done = tbe_serve("configure", str(model), *options, *settings)
    assert done.returncode == 0, done.stderr


def edit_manifest(bundle: Path, **changes: object) -> None:
    """Change keys of a published manifest."""
    path = bundle / "manifest.json"
    path.write_bytes(msgspec.json.encode({**msgspec.json.decode(path.read_bytes()), **changes}))
