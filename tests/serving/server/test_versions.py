"""Versions: switched under load, rolled back, refused when broken, pruned when nobody uses them."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from export import export_model
from serving.client import LookupClient, Retries
from serving.engine import Engine
from serving.errors import ServingError
from serving.model.config_file import of_json, settings_of
from serving.server import Control, Server, run_server
from tests.support import bundle_reader, oracle
from tests.support.commands import tbe_export
from tests.support.host_faults import until
from tests.support.long_cases import BREATH_S, one_in
from tests.support.models import SUM, Bags, collection, random_bags, table_of
from tests.support.servers import FREE, tbe_serve, until_answered


def export_version(repository: Path, seed: int) -> Path:
    module = collection(SUM)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return export_model(module, repository, "m")


def broken_version(repository: Path) -> Path:
    bundle = export_version(repository, 99)
    weights = bundle / "weights.0.bin"
    weights.write_bytes(weights.read_bytes()[:-1])
    return bundle


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    export_version(tmp_path / "r", 1)
    return tmp_path / "r"


@pytest.fixture
def server(repository: Path, tmp_path: Path) -> Iterator[Server]:
    with run_server(repository, FREE, log=tmp_path / "log") as running:
        yield running


@pytest.fixture
def control(server: Server) -> Control:
    return server.control(60)


def expected(bundle: Path, bags: dict[str, Bags]) -> dict[str, npt.NDArray[Any]]:
    tables = table_of(SUM)
    return {
        name: oracle.pool(bundle_reader.exported_table(bundle, tables[name].name), column, "SUM")
        for name, column in bags.items()
    }


@dataclass
class Seen:
    """What clients met under load."""

    versions: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    failed: list[ServingError] = field(default_factory=list)
    connected: list[int] = field(default_factory=list)

    def wait_for_clients(self, count: int) -> None:
        """Until so many are connected: from then on nothing may fail."""
        until(lambda: len(self.connected) == count, "clients are connected")

    def wait_for(self, version: int) -> None:
        """Until a version has answered once more."""
        before = self.versions[version]
        until(lambda: self.versions[version] > before, f"version {version} answers")


def ask_until(stopped: threading.Event, url: str, bundles: dict[int, Path], seed: int, log: Seen) -> None:
    """Look up the same requests again and again; each answer has to be the one of the version that it names."""
    random = np.random.default_rng(seed)
    requests = [random_bags(random, SUM, int(random.integers(1, 20))) for _ in range(8)]
    answers = {version: [expected(bundle, bags) for bags in requests] for version, bundle in bundles.items()}
    with LookupClient(url, "m", timeout_s=30, retries=Retries(attempts=1)) as client:
        until_answered(client.lookup, requests[0])  # a busy machine may not connect in time
        log.connected.append(seed)
        while not stopped.wait(BREATH_S):
            for number, bags in enumerate(requests):
                try:
                    answer = client.lookup(bags)
                except ServingError as error:
                    log.failed.append(error)
                    continue
                log.versions[answer.version] += 1
                for name, rows in answers[answer.version][number].items():
                    if not np.allclose(answer[name], rows, rtol=1e-5, atol=1e-5):
                        log.wrong.append(f"version {answer.version}, feature {name}")


@pytest.mark.promise("Switching versions under load loses no request, and each answer is computed by one version")
@pytest.mark.parametrize("rounds", [1, pytest.param(5, marks=pytest.mark.long)])
def test_versions_switch_under_load_without_a_failed_or_wrong_answer(
    repository: Path, server: Server, control: Control, rounds: int
) -> None:
    second = export_version(repository, 2)
    broken = broken_version(repository)
    bundles = {1: repository / "m" / "1", 2: second}
    assert broken.name == "3"
    log, stopped = Seen(), threading.Event()
    askers = [
        threading.Thread(target=ask_until, args=(stopped, server.grpc, bundles, seed, log)) for seed in range(4)
    ]
    for asker in askers:
        asker.start()
    try:
        log.wait_for_clients(len(askers))
        for _ in range(rounds):
            for version in (2, 1):
                assert control.load("m", (version,)) == (version,)
                log.wait_for(version)
            with pytest.raises(ServingError, match=r"weights\.0\.bin: expected \d+ bytes, got \d+"):
                control.load("m")  # the newest is the broken one
            assert control.ready("m") == (1,)
    finally:
        stopped.set()
        for asker in askers:
            asker.join()
    assert log.failed == []
    assert log.wrong == []
    assert set(log.versions) == {1, 2}
    print(f"{log.versions.total()} answers over {2 * rounds} switches and {rounds} refusals")


def test_load_serves_the_newest_or_an_older_version_and_refuses_others(repository: Path, server: Server) -> None:
    export_version(repository, 2)
    with LookupClient(server.grpc, "m", timeout_s=30) as client:
        assert client.lookup({"x": [[1]]}).version == 1
        done = tbe_serve("load", "m", "--url", server.grpc)
        assert (done.returncode, done.stdout) == (0, "m: version 1 → 2\n")
        assert client.lookup({"x": [[1]]}).version == 2
        done = tbe_serve("load", "m", "--version", "1", "--url", server.grpc)
        assert (done.returncode, done.stdout) == (0, "m: version 2 → 1\n")
        assert client.lookup({"x": [[1]]}).version == 1
        # And again: Triton itself would leave the version that it was told to serve.
        assert tbe_serve("load", "m", "--url", server.grpc).stdout == "m: version 1 → 2\n"
        assert tbe_serve("load", "m", "--version", "1", "--url", server.grpc).stdout == "m: version 2 → 1\n"
        for versions, said in (("2,1", "1 → 1, 2"), ("1", "1, 2 → 1")):
            done = tbe_serve("load", "m", "--version", versions, "--url", server.grpc)
            assert (done.returncode, done.stdout) == (0, f"m: version {said}\n")
            assert client.lookup({"x": [[1]]}).version == int(versions[0])
        for wrong in ("0", "2,", "x", "1" * 5000):
            done = tbe_serve("load", "m", "--version", wrong, "--url", server.grpc)
            assert f"--version {wrong}: expected version numbers N[,N]" in done.stderr
        done = tbe_serve("load", "m", "--version", "9", "--url", server.grpc)
        assert done.returncode == 1
        assert done.stdout == "m: still serves version 1\n"
        assert done.stderr == f"tbe-serve: {repository}/m: expected one of versions [2, 1], got 9\n"
        broken_version(repository)
        done = tbe_serve("load", "m", "--url", server.grpc)
        assert done.returncode == 1
        assert done.stdout == "m: still serves version 1\n"
        assert "weights.0.bin: expected" in done.stderr
        assert client.lookup({"x": [[1]]}).version == 1
    done = tbe_serve("load", "nobody", "--url", server.grpc)
    assert done.returncode == 1
    assert "nobody: serves no version" in done.stdout
    for url in (server.operations, "127.0.0.1:1", "lookup.example:8001"):
        done = tbe_serve("load", "m", "--url", url, "--timeout-s", "5")
        assert done.returncode == 1
        assert f"{url}: expected the gRPC address of a server that you run here with `tbe-serve run`" in done.stderr


def with_a_capture_that_cannot_be_written(model: Path) -> str:
    assert tbe_serve("configure", str(model), "--capture", "/proc/nowhere").returncode == 0
    return "capture: /proc/nowhere/m.jsonl cannot be written: No such file or directory"


def with_a_warm_up_that_is_none(model: Path) -> str:
    (model / "warm_up.jsonl").write_text("no request")
    return f"{model}/warm_up.jsonl: line 1: expected a captured request"


def with_another_program(model: Path) -> str:
    (model / "1" / "program.pt").write_bytes(b"no program")
    return f"{model}/1/program.pt: expected"


def with_a_setting_out_of_bounds(model: Path) -> str:
    config = model / "config.pbtxt"
    config.write_text(config.read_text().replace('string_value: "131072"', 'string_value: "many"'))
    return f"{config}: max_call_ids: expected a number, got 'many'"


@pytest.mark.parametrize(
    "spoil",
    one_in(
        4,
        [
            with_another_program,
            with_a_capture_that_cannot_be_written,
            with_a_warm_up_that_is_none,
            with_a_setting_out_of_bounds,
        ],
    ),
)
def test_a_load_of_a_damaged_served_version_is_refused_before_triton(
    repository: Path, server: Server, tmp_path: Path, spoil: Callable[[Path], str]
) -> None:
    """Triton 2.51 ends some requests after it was asked for that, by its own memory."""
    message, process = spoil(repository / "m"), server.process.pid
    for version in ((), ("--version", "1")):
        done = tbe_serve("load", "m", *version, "--url", server.grpc)
        assert (done.returncode, done.stdout) == (1, "m: still serves version 1\n")
        assert done.stderr.startswith(f"tbe-serve: {message}")
    assert "failed to load 'm'" not in (tmp_path / "log").read_text()
    with LookupClient(server.grpc, "m", timeout_s=30) as client:
        for _ in range(100):
            assert client.lookup({"x": [[1]]}).version == 1
    assert (server.process.pid, server.process.poll()) == (process, None)


@pytest.mark.long
def test_settings_take_effect_with_every_load(repository: Path, server: Server) -> None:
    """Also after a version was named, and with one: Triton itself then keeps the settings that it had."""
    export_version(repository, 2)
    for samples, version in enumerate(("1", None, "2", None, None), start=100):
        done = tbe_serve("configure", str(repository / "m"), "--max-request-samples", str(samples))
        assert done.returncode == 0, done.stderr
        named = () if version is None else ("--version", version)
        done = tbe_serve("load", "m", *named, "--url", server.grpc)
        assert done.stdout.endswith(f"→ {version or 2}\n"), done.stderr
        settings = settings_of(of_json(server.control(30).config("m")))
        assert settings is not None
        assert settings.max_request_samples == samples


@pytest.mark.long
def test_the_configured_version_is_served_after_a_restart(repository: Path, tmp_path: Path) -> None:
    export_version(repository, 2)
    done = tbe_serve("configure", str(repository / "m"), "--version", "1")
    assert done.returncode == 0, done.stderr
    with run_server(repository, FREE, log=tmp_path / "log") as server:
        assert [model.versions for model in server.models] == [(1,)]
    done = tbe_serve("configure", str(repository / "m"), "--version", "newest")
    with run_server(repository, FREE, log=tmp_path / "log") as server:
        assert [model.versions for model in server.models] == [(2,)]
    done = tbe_serve("configure", str(repository / "m"), "--version", "7")
    assert done.returncode == 1
    assert "expected 'newest' or one of [2, 1]" in done.stderr


def prune(*arguments: str) -> list[str]:
    done = tbe_export("prune", *arguments)
    assert done.exit_code == 0, done.stderr
    lines: list[str] = done.stdout.splitlines()
    return lines


def test_pruning_leaves_what_is_in_use(repository: Path, server: Server) -> None:
    """Version 1 is served, 2 is open in this process, 3 is configured, 5 is the newest: only 4 goes."""
    for seed in range(2, 6):
        export_version(repository, seed)
    model = repository / "m"
    with LookupClient(server.grpc, "m", timeout_s=30) as client:
        before = client.lookup({"x": [[1]]})
        engine = Engine.open(model / "2")
        assert tbe_serve("configure", str(model), "--version", "3").returncode == 0
        said = [
            f"{model}/5: among the newest 1",
            f"{model}/4: would be removed",
            f"{model}/3: config.pbtxt says to serve it",
            f"{model}/2: in use",
            f"{model}/1: in use",
        ]
        assert prune(str(model), "--keep", "1", "--dry-run") == said
        assert prune(str(model), "--keep", "1") == [line.replace("would be removed", "removed") for line in said]
        assert sorted(path.name for path in model.iterdir() if path.is_dir()) == ["1", "2", "3", "5"]
        assert [path.name for path in repository.parent.iterdir() if "draft" in path.name] == []
        np.testing.assert_array_equal(client.lookup({"x": [[1]]})["x"], before["x"])
        del engine
        assert f"{model}/2: removed" in prune(str(model), "--keep", "1")
        # When the server has gone on to another version, the first may go too.
        assert tbe_serve("load", "m", "--url", server.grpc).stdout == "m: version 1 → 3\n"
        deadline = time.monotonic() + 60
        while f"{model}/1: removed" not in prune(str(model), "--keep", "1") and time.monotonic() < deadline:
            time.sleep(0.2)
    assert sorted(path.name for path in model.iterdir() if path.is_dir()) == ["3", "5"]
