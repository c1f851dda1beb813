"""Bundles and a real server that several tests share."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from export import ExportConfig, IdPolicy, OutputDtype, Sharding, WeightDtype, export_model
from serving.server import Access, Ports, Server, run_server
from tests.answering_here import answer
from tests.models import MIXED, SUM, collection
from tests.served.tools import add_gate

# Every dtype at once, and both id policies.
MIXED_CONFIG = ExportConfig(
    dtype={"user": WeightDtype.INT8, "item": WeightDtype.INT4, "genre": WeightDtype.FP16, "word": WeightDtype.INT2},
    id_policy={"word": IdPolicy.ZERO},
)


@pytest.fixture(scope="module")
def _answering_here() -> Iterator[None]:
    """For modules with many exports that are about something else than an export's last check."""
    with mock.patch("export.parity.run_reloaded", answer):
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
def gated(repository: Path) -> Path:
    """The bundle of the model `gated`."""
    return repository / "gated" / "1"


@pytest.fixture(scope="session")
def mixed(repository: Path) -> Path:
    """The bundle of the model `mixed`."""
    return repository / "mixed" / "1"


@pytest.fixture(scope="session")
def server(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A tritonserver on `repository`, open to shared memory."""
    log = tmp_path_factory.mktemp("server") / "tritonserver.log"
    access = Access(allow=("shared-memory",))
    with run_server(repository, Ports(grpc=0, http=0, metrics=0), access=access, log=log) as running:
        yield running


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest file first: on two processes the others then fill the time beside it."""
    items.sort(key=lambda item: item.path.name != "test_sharding.py")
