"""`tbe-serve run --local-hosts`: a router and its hosts on one machine, as one."""

import json
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from export import ExportConfig, Sharding, export_model
from serving.client import LookupClient
from serving.engine import Engine
from serving.errors import BundleError, ConfigurationError, ServingError
from serving.model.settings import ServingSettings
from serving.server import run_local_hosts
from tests.support.deadlines import PATIENT_S
from tests.support.hosts import MODEL, configure, edit_manifest, export_hosts, in_one_process, patient
from tests.support.models import SUM, Spec, collection
from tests.support.servers import running, start_tbe_serve, tbe_serve, until_answered

SPECS = (Spec("item", 101, 8, "SUM", ("i",)), Spec("user", 99, 16, "MEAN", ("u",)))
CONFIG = ExportConfig(sharding=Sharding(ranks=2, ranks_per_host=1, types={"*": "row_wise"}))
ASKED: dict[str, Any] = {"i": [[0, 100], [50]], "u": [[98, 1], []]}
# Where nobody listens.
ELSEWHERE = {0: ["127.0.0.1:1"], 1: ["127.0.0.1:1"]}


@dataclass(frozen=True)
class Published:
    """A router with two hosts, beside another model, and what the same plan answers in one process."""

    repository: Path
    expected: Any


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Published:
    folder, module = tmp_path_factory.mktemp("local"), collection(SPECS)
    router = export_hosts(folder, module, CONFIG)
    one = Engine.open(in_one_process(folder, module, CONFIG, router))
    export_model(collection(SUM), router.parent.parent, "m")
    configure(router.parent, ELSEWHERE)
    return Published(router.parent.parent, one.lookup(ASKED))


@pytest.fixture
def copied(published: Published, tmp_path: Path) -> Path:
    """The repository, to be changed."""
    return Path(shutil.copytree(published.repository, tmp_path / "r"))


def tritonservers(process: "subprocess.Popen[str]") -> list[psutil.Process]:
    """Of the command, in the order of their starts: the router's is the last at first."""
    return sorted(psutil.Process(process.pid).children(), key=psutil.Process.create_time)


def assert_same(answer: Any, expected: Any) -> None:
    for name, rows in expected.items():
        np.testing.assert_array_equal(answer[name], rows)


@contextmanager
def started(repository: Path, *options: str) -> Iterator["subprocess.Popen[str]"]:
    """The command, which is ended with the block."""
    ports = ("--grpc-port", "0", "--operations-port", "0")
    with start_tbe_serve(str(repository), "--local-hosts", *ports, *options) as process:
        try:
            yield process
        finally:
            process.terminate()
            process.wait()


def lines(process: "subprocess.Popen[str]", count: int) -> list[str]:
    """What it prints when it is ready."""
    assert process.stdout is not None
    assert process.stderr is not None
    printed = [process.stdout.readline() for _ in range(count)]
    assert all(printed), process.stderr.read()
    return printed


def test_a_router_and_its_hosts_serve_recover_and_stop_together(published: Published) -> None:
    config = (published.repository / MODEL / "config.pbtxt").read_bytes()
    with started(published.repository, "--json") as process:
        said = json.loads(lines(process, 1)[0])
        hosts = [[model["name"] for model in host["models"]] for host in said["hosts"]]
        assert hosts == [[f"{MODEL}-host-0"], [f"{MODEL}-host-1"]]
        assert [model["name"] for model in said["models"]] == ["m", MODEL]
        assert (published.repository / MODEL / "config.pbtxt").read_bytes() == config
        tritons = tritonservers(process)
        assert len(tritons) == 3
        with LookupClient(said["grpc"], MODEL, PATIENT_S) as client:
            assert_same(client.lookup(ASKED), published.expected)
            # One that dies is started anew at its address: first a host's, then the router's.
            for died in (tritons[0], tritons[-1]):
                died.kill()
                died.wait(PATIENT_S)
                assert_same(until_answered(client.lookup, ASKED), published.expected)
        # What is loaded later has the hosts of this run, too.
        done = tbe_serve("load", MODEL, "--version", "1", "--url", said["grpc"])
        assert (done.returncode, done.stdout) == (0, f"{MODEL}: version 1 → 1\n"), done.stderr
        tritons = tritonservers(process)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENT_S) == 0
        assert [triton for triton in tritons if triton.is_running()] == []
        assert process.stderr is not None
        log = process.stderr.read()
        assert " ERROR tbe-serve server_died: host 0: tritonserver died (SIGKILL); restarting" in log
        assert " ERROR tbe-serve server_died: tritonserver died (SIGKILL); restarting" in log


@pytest.mark.long
def test_a_dead_host_ends_all_with_no_recover(published: Published) -> None:
    with started(published.repository, "--no-recover") as process:
        first, *_, grpc, operations, stop = (line.split() for line in lines(process, 7))
        assert (first[:2], first[3:]) == (["host", "0"], [f"{MODEL}-host-0", "1"])
        assert (grpc[0], operations[0], stop) == ("gRPC", "operations", ["stop", "Ctrl-C"])
        tritons = tritonservers(process)
        tritons[0].kill()
        assert process.wait(PATIENT_S) == 128 + signal.SIGKILL
        assert [triton for triton in tritons if triton.is_running()] == []


@pytest.mark.long
def test_local_hosts_can_be_run_from_python(published: Published, tmp_path: Path) -> None:
    with (
        run_local_hosts(published.repository, logs=tmp_path) as fleet,
        LookupClient(fleet.router.grpc, MODEL, PATIENT_S) as client,
        Engine.open(published.repository / MODEL / "1", patient(fleet.addresses)) as engine,
    ):
        assert [*fleet.hosts] == [0, 1]
        assert_same(client.lookup(ASKED), published.expected)
        assert_same(engine.lookup(ASKED), published.expected)
    assert {path.name for path in tmp_path.iterdir()} >= {f"{MODEL}.log", f"{MODEL}-host-0.log"}


def without_a_router(repository: Path) -> None:
    shutil.rmtree(repository / MODEL)


def with_two_routers(repository: Path) -> None:
    shutil.copytree(repository / MODEL, repository / "other")


def without_a_host(repository: Path) -> None:
    shutil.rmtree(repository / f"{MODEL}-host-1")


def with_another_host(repository: Path) -> None:
    edit_manifest(repository / f"{MODEL}-host-1" / "1", exported_at=1.0)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (without_a_router, ConfigurationError, r"r: --local-hosts: expected one router, .*, found none$"),
        (with_two_routers, ConfigurationError, r"found movies, other: give each a repository of its own$"),
        (
            without_a_host,
            ConfigurationError,
            r"movies-host-1/1: host 1 of .*/movies/1: expected its bundle here, found none: copy it here, or",
        ),
        (
            with_another_host,
            BundleError,
            r"movies-host-1/1: expected the bundle with SHA-256 \w+ of its manifest, which .*/movies/1 names, got",
        ),
    ],
)
def test_invalid_local_hosts_are_refused_by_name(
    copied: Path, change: Callable[[Path], None], kind: type[ServingError], message: str
) -> None:
    change(copied)
    with pytest.raises(kind, match=message), run_local_hosts(copied):
        pass


@pytest.mark.long
def test_a_version_is_replaced_as_documented_without_a_failed_request(tmp_path: Path) -> None:
    """Hosts serve both while the router goes over."""
    config = replace(CONFIG, serving=ServingSettings(shard_timeout_ms=int(1000 * PATIENT_S)))
    export_hosts(tmp_path, collection(SPECS), config)
    with running(tmp_path / "r", "--local-hosts") as served, LookupClient(served.grpc, MODEL, PATIENT_S) as client:
        export_hosts(tmp_path, collection(SPECS, seed=1), config)
        versions: list[int] = []
        ended = threading.Event()

        def ask() -> None:
            while not ended.wait(0.02):  # the servers have the same cores
                versions.append(client.lookup(ASKED).version)

        def load(model: str, address: str, *more: str) -> None:
            done = tbe_serve("load", model, "--url", address, *more)
            assert done.returncode == 0, done.stderr

        hosts = {f"{MODEL}-host-{number}": address for number, address in enumerate(served.hosts)}
        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(ask)
            try:
                for host, address in hosts.items():
                    load(host, address, "--version", "2,1")
                load(MODEL, served.grpc)
                for host, address in hosts.items():
                    load(host, address, "--version", "2")
            finally:
                ended.set()
            asking.result()
        assert client.lookup(ASKED).version == 2
    assert versions == sorted(versions)
    assert {*versions} == {1, 2}
