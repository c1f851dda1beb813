"""Bundles and a real server that several tests share."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support import unchanged  # noqa: F401  first: it has all exports compare their models

# isort: split

from export import ExportConfig, OutputDtype, Sharding, export_model
from serving.server import Access, Ports, Server, run_server
from tests.support.deadlines import no_default_deadlines
from tests.support.ending import end_together
from tests.support.models import MIXED, MIXED_CONFIG, SUM, collection
from tests.support.quick_reload import quick_reload
from tests.support.servers import add_gate

# How fast examples are made and run, others on the machine have a say in.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
end_together()


@pytest.fixture(scope="session", autouse=True)
def _no_default_deadlines() -> Iterator[None]:
    with no_default_deadlines():
        yield


@pytest.fixture(scope="module", name="quick_reload")
def _quick_reload() -> Iterator[None]:
    """For modules that export much and are not about it: `pytestmark = pytest.mark.usefixtures("quick_reload")`.

    All other exports are checked as everybody's: a fresh process reloads the bundle.
    """
    with quick_reload():
        yield


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with five models: `mixed`, `weighted`, `half` (FP16 out), `sharded`, `mixed` on four ranks, and
    `gated`, `mixed` that tests can hold.
    """
    path = tmp_path_factory.mktemp("served") / "repository"
    export_model(collection(MIXED), path, "mixed", MIXED_CONFIG)
    export_model(collection(SUM, weighted=True), path, "weighted")
    export_model(collection(MIXED), path, "half", ExportConfig(output_dtype=OutputDtype.FP16))
    sharding = Sharding(ranks=4, ranks_per_host=2, types={"*": "grid_shard", "genre": "data_parallel"})
    export_model(collection(MIXED), path, "sharded", replace(MIXED_CONFIG, sharding=sharding))
    add_gate(export_model(collection(MIXED), path, "gated", MIXED_CONFIG))
    return path


@pytest.fixture(scope="session")
def one_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository that starts fast, for tests that are about starting and stopping: with the model `m`."""
    path = tmp_path_factory.mktemp("one") / "repository"
    export_model(collection(SUM), path, "m")
    return path


@pytest.fixture(scope="session")
def gated(repository: Path) -> Path:
    """The bundle of the model `gated`."""
    return repository / "gated" / "1"


@pytest.fixture(scope="session")
def mixed(repository: Path) -> Path:
    """The bundle of the model `mixed`."""
    return repository / "mixed" / "1"


@pytest.fixture(scope="session")
def server(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A tritonserver on `repository`, open to HTTP and shared memory."""
    log = tmp_path_factory.mktemp("server") / "tritonserver.log"
    access = Access(http=True, allow=("shared-memory",))
    with run_server(repository, Ports(grpc=0, http=0, metrics=0), access=access, log=log) as running:
        yield running


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest file first: on two processes the others then fill the time beside it."""
    items.sort(key=lambda item: item.path.name != "test_sharded.py")
