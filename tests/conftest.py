"""Bundles and a real server that several tests share.

Nothing here imports torch before a test needs it: `make quick`, and a file that needs none of it, do not wait for it.
"""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from serving.server import Access, Ports, Server, run_server
from tests.support import mutation_check
from tests.support.deadlines import no_default_deadlines
from tests.support.no_torchscript import NoTorchScript, remove_torchscript, without_torchscript
from tests.support.process_cleanup import end_together
from tests.support.reload_process import in_a_fresh_process, in_this_process
from tests.support.servers import add_gate, reloading

if TYPE_CHECKING:
    from serving.engine import Engine

# How fast examples are made and run, others on the machine have a say in. `make test-all` takes the profile `long`.
for profile, examples in (("short", 15), ("long", 200)):
    settings.register_profile(
        profile, max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
settings.load_profile("short")
# An export makes many objects beside the half million of torch: to go through them less often saves a tenth of the time.
gc.set_threshold(50_000)
end_together()
mutation_check.watch()
# Files that wait for servers, some of them for two minutes. They take turns with files that compute, so that neither
# the processor waits nor all wait for it; the longest begin first.
LONG_FILES = (
    "tests/faults/",
    "tests/serving/router/",
    "tests/serving/deltas/",
    "tests/serving/server/",
    "tests/soak/",
    "tests/serving/triton/",
)
_OTHERS_BETWEEN = 5


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.nodeid.partition("::")[0], []).append(item)
    long = dict.fromkeys(name for prefix in LONG_FILES for name in files if name.startswith(prefix))
    computing = [name for name in files if name not in long]
    order = {name: number * _OTHERS_BETWEEN for number, name in enumerate(long)}
    order |= {name: number for number, name in enumerate(computing)}
    items[:] = [item for name in sorted(files, key=lambda name: order[name]) for item in files[name]]


@pytest.fixture(scope="session", autouse=True)
def _everywhere() -> Iterator[None]:
    with no_default_deadlines(), in_this_process():
        yield


@pytest.fixture
def fresh_process() -> Iterator[None]:
    """For tests that are about it: a fresh process reloads the bundles of their exports, as it does everybody's."""
    with in_a_fresh_process():
        yield


@pytest.fixture(params=[*NoTorchScript])
def no_torchscript(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that are about it: torch is without TorchScript, in each way that it may be."""
    remove_torchscript(monkeypatch, request.param)


@pytest.fixture(scope="module", params=["torchscript", pytest.param(NoTorchScript.RAISES, marks=pytest.mark.long)])
def any_torchscript(request: pytest.FixtureRequest) -> Iterator[None]:
    """For files whose answers are the same without TorchScript. Where it is missing, their tests are `long`, and it is
    missing in one way: that the other makes no difference, tests with `no_torchscript` show.

    Fixtures of the module that export or load bundles have to name it.
    """
    if request.param == "torchscript":
        yield
        return
    with without_torchscript(request.param):
        yield


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with five models: `mixed`, `weighted`, `half` (FP16 out), `sharded`, `mixed` on four ranks, and
    `gated`, `mixed` that tests can hold.
    """
    from tests.support.models import export_shared

    path = tmp_path_factory.mktemp("served") / "repository"
    export_shared(path)
    add_gate(path / "gated" / "1")
    return path


@pytest.fixture(scope="session")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> "Engine":
    """An engine of `MIXED` on one rank, which others are compared with."""
    from tests.support.sharded_exports import sharded

    return sharded(tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="session")
def one_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository that starts fast, for tests that are about starting and stopping: with the model `m`."""
    from tests.support.models import exported

    return exported(tmp_path_factory.mktemp("one")).parent.parent


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
    with (
        run_server(repository, Ports(grpc=0, http=0, operations=0), access=access, log=log) as running,
        reloading(running),
    ):
        yield running
