"""Models that died, servers that are told to stop, and bundles that cannot be loaded."""

import json
import os
import re
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tritonclient.grpc as triton

from export import ExportConfig, Sharding, WeightDtype, export_model
from serving.client import LookupClient, Retries
from serving.errors import DeadlineExceeded, ModelUnavailable, ServerUnavailable, TritonserverFailed
from serving.server import run_server
from tests.support.long_cases import one_in
from tests.support.models import Spec, collection
from tests.support.servers import (
    FREE,
    add_gate,
    gate_closed,
    metric,
    replace_model_py,
    running,
    shared_regions,
    slow_start,
    stubs,
    tbe_serve,
    wait_for_answer,
    wait_for_execution,
    wait_for_pending,
    wait_for_stubs,
)


def kill_stubs(triton: psutil.Process, model: str, count: int | None = None) -> None:
    for stub in stubs(triton, model)[:count]:
        stub.kill()


def test_a_dead_or_hanging_model_shows_in_health_and_as_a_typed_error(repository: Path, tmp_path: Path) -> None:
    """Triton itself says that it is ready."""
    bundle = repository / "m" / "1"
    add_gate(bundle)
    with (
        run_server(repository, FREE, log=tmp_path / "log") as server,
        triton.InferenceServerClient(server.grpc) as triton_client,
        LookupClient(server.grpc, "m", 30, retries=Retries(attempts=1)) as client,
    ):
        with gate_closed(bundle):
            done = tbe_serve("health", "m", "--url", server.grpc, "--timeout-s", "0.5")
        assert done.returncode == 1
        assert "Deadline Exceeded" in done.stderr
        done = tbe_serve("health", "unknown_model", "--url", server.grpc)
        assert done.returncode == 1
        done = tbe_serve("health", "m", "--url", server.grpc)
        assert (done.returncode, done.stdout) == (0, "m: version 1 answers\n")
        client.lookup({"x": [[1]]})
        kill_stubs(psutil.Process(server.process.pid), "m")
        time.sleep(1)
        with pytest.raises(ModelUnavailable, match=r"its process died: try again$"):
            client.lookup({"x": [[1]]})
        done = tbe_serve("health", "m", "--url", server.grpc, "--timeout-s", "5")
        assert done.returncode == 1
        assert "m" in done.stderr
        assert triton_client.is_model_ready("m"), "Triton notices by itself: then this is not needed any more"
        server.process.kill()  # it would wait for the dead model until its exit timeout


def test_a_model_that_died_serves_again(repository: Path) -> None:
    # Triton waits for a process that died until its exit timeout: here that would be seen.
    with running(repository, "--", "--exit-timeout-secs=600") as server:
        with LookupClient(server.grpc, "m", timeout_s=30) as client:
            alone = client.lookup({"x": [[1, 2]]})
            for times in (1, 2):
                kill_stubs(server.triton, "m")
                wait_for_answer(client)
                np.testing.assert_array_equal(client.lookup({"x": [[1, 2]]})["x"], alone["x"])
                assert metric(server, "tbe_recoveries_total", model="m") == times
        regions = shared_regions(server.triton)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(120) == 0
        assert server.process.stderr is not None
        said = server.process.stderr.read()
    assert said.count("model 'm': a backend process died; reloading") == 2
    assert said.count("model 'm': serves again after") == 2
    assert regions
    assert [path for path in regions if path.exists()] == []


@pytest.mark.promise(
    "A model whose process dies during its reload is reloaded after 1 s and after 3 s, and then the server ends with the reason"
)
def test_a_model_that_crashes_while_it_reloads_is_loaded_once_more(repository: Path, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    slow_start(repository / "m" / "1", gate)
    with running(repository) as server, LookupClient(server.grpc, "m", timeout_s=60) as client:
        alone = client.lookup({"x": [[1, 2]]})
        gate.touch()
        (first,) = stubs(server.triton, "m")
        first.kill()
        deadline = time.monotonic() + 60
        while not gate.with_name("gate.reached").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        kill_stubs(server.triton, "m")
        gate.unlink()
        wait_for_answer(client)
        np.testing.assert_array_equal(client.lookup({"x": [[1, 2]]})["x"], alone["x"])
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        assert server.process.stderr is not None
        said = server.process.stderr.read()
    assert said.count("model 'm': could not be reloaded; trying once more: ") == 1


@pytest.mark.promise("A model whose process is killed as its reload begins serves again")
def test_a_model_killed_at_the_start_of_a_reload_serves_again(repository: Path) -> None:
    """Triton 2.51 does not notice that, and waits for ever."""
    with running(repository) as server, LookupClient(server.grpc, "m", timeout_s=60) as client:
        triton = server.triton
        alone = client.lookup({"x": [[1, 2]]})
        before = stubs(triton, "m")
        kill_stubs(triton, "m")
        deadline = time.monotonic() + 60
        while not any(stub not in before for stub in stubs(triton, "m")):
            assert time.monotonic() < deadline
            time.sleep(0.002)
        kill_stubs(triton, "m")
        wait_for_answer(client)
        np.testing.assert_array_equal(client.lookup({"x": [[1, 2]]})["x"], alone["x"])


@pytest.mark.long
def test_one_of_two_instances_that_died_is_noticed(repository: Path) -> None:
    assert tbe_serve("configure", str(repository / "m"), "--instances", "2").returncode == 0
    with running(repository) as server, LookupClient(server.grpc, "m", timeout_s=30) as client:
        kill_stubs(server.triton, "m", 1)
        deadline = time.monotonic() + 60
        while metric(server, "tbe_recoveries_total", model="m") != 1:
            assert time.monotonic() < deadline
        wait_for_answer(client)
        wait_for_stubs(server.triton, "m", 2)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0


def test_no_recover_ends_with_the_reason(repository: Path) -> None:
    with running(repository, "--no-recover") as server:
        kill_stubs(server.triton, "m")
        assert server.process.wait(60) == 1
        assert server.process.stderr is not None
        said = server.process.stderr.read()
    assert "tbe-serve: model 'm': a backend process died; stopping, as --no-recover says" in said


def look_up_until_refused(client: LookupClient) -> None:
    """What comes before a held server has noticed that it is to stop waits until its deadline."""
    while True:
        with suppress(DeadlineExceeded):
            client.lookup({"x": [[1, 2]]}, timeout_s=1)


@pytest.mark.promise("A stop answers every accepted request")
def test_a_stop_answers_all_that_was_accepted(repository: Path) -> None:
    bundle = repository / "m" / "1"
    add_gate(bundle)
    with running(repository) as server:
        client = LookupClient(server.grpc, "m", timeout_s=60, retries=Retries(attempts=1))
        expected = client.lookup({"x": [[1, 2]]})
        with ThreadPoolExecutor(40) as pool, gate_closed(bundle):
            first = pool.submit(client.lookup, {"x": [[1, 2]]})
            wait_for_execution(bundle)
            answers = [first, *(pool.submit(client.lookup, {"x": [[1, 2]]}) for _ in range(39))]
            wait_for_pending(server, "m", 39)
            server.process.send_signal(signal.SIGTERM)
            with pytest.raises(ServerUnavailable):  # what comes after is refused, and may be tried elsewhere
                look_up_until_refused(client)
        for answer in answers:
            np.testing.assert_array_equal(answer.result()["x"], expected["x"])
        assert server.process.wait(60) == 0
        client.close()


# --- what is refused at load, in one line


def edit_manifest(bundle: Path, **changes: Any) -> None:
    manifest = json.loads((bundle / "manifest.json").read_text())
    manifest.update(changes)
    (bundle / "manifest.json").write_text(json.dumps(manifest))


def without_weights(bundle: Path) -> None:
    (bundle / "weights.0.bin").unlink()


def with_short_weights(bundle: Path) -> None:
    os.truncate(bundle / "weights.0.bin", 100)


def for_another_device(bundle: Path) -> None:
    manifest = json.loads((bundle / "manifest.json").read_text())
    manifest["plan"]["ranks"][0]["device"] = "cuda"
    edit_manifest(bundle, plan=manifest["plan"])


def of_a_newer_format(bundle: Path) -> None:
    edit_manifest(bundle, format_version=99)


def with_wrong_pins(bundle: Path) -> None:
    """As if another torch were installed."""
    versions = {"torch": "2.12.0", "fbgemm-gpu-cpu": "1.8.0"}
    replace_model_py(
        bundle,
        f"from serving import pins\npins.installed = lambda: {versions!r}\n"
        "from serving.backend import TritonPythonModel\n",
    )


def with_a_capture_that_cannot_be_written(bundle: Path) -> None:
    assert tbe_serve("configure", str(bundle.parent), "--capture", "/proc/nowhere").returncode == 0


def with_a_setting_that_is_no_number(bundle: Path) -> None:
    config = bundle.parent / "config.pbtxt"
    config.write_text(config.read_text().replace('string_value: "131072"', 'string_value: "many"'))


LITTLE_ADDRESS_SPACE = """
import resource
from pathlib import Path
from serving.backend import TritonPythonModel
from serving.engine import Engine

init = Engine.__init__

def init_with_little(self, *arguments, **options):
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + {spare_bytes}, taken + {spare_bytes}))
    init(self, *arguments, **options)

Engine.__init__ = init_with_little
"""


@pytest.mark.parametrize(
    ("spoil", "message"),
    one_in(
        4,
        [
            (
                without_weights,
                r"weights\.0\.bin: cannot be read: No such file or directory: publish the bundle again",
            ),
            (with_short_weights, r"weights\.0\.bin: expected \d+ bytes, got 100: publish the bundle again"),
            (for_another_device, r"rank 0: was made for device 'cuda', this is for 'cpu': export it again for that"),
            (
                of_a_newer_format,
                r"format_version: expected 10, got 99: serve it with the tbe-serving that exported it",
            ),
            (
                with_wrong_pins,
                r"torch: expected 2\.13 or 2\.14, found 2\.12\.0: mend this environment with `pip install torch==2\.13\.0`",
            ),
            (
                with_a_capture_that_cannot_be_written,
                r"capture: /proc/nowhere/m\.jsonl cannot be written: .*configure",
            ),
            (with_a_setting_that_is_no_number, r"max_call_ids: expected a number, got 'many'"),
        ],
    ),
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_an_unservable_bundle_is_refused_without_a_traceback(
    repository: Path, tmp_path: Path, spoil: Any, message: str
) -> None:
    spoil(repository / "m" / "1")
    with pytest.raises(TritonserverFailed) as caught, run_server(repository, FREE, log=tmp_path / "log"):
        pass
    assert "Traceback" not in (tmp_path / "log").read_text()
    reasons = [line for line in str(caught.value).splitlines() if re.search(message, line)]
    assert reasons  # Triton says it when the instance fails, and when the model does
    assert [line for line in reasons if re.search(r"serving/backend|\.py", line)] == []


@pytest.mark.promise("A rank that does not fit into memory is refused by name, and the serving version continues")
def test_a_rank_without_enough_memory_leaves_the_old_version_serving(tmp_path: Path) -> None:
    """Two ranks of 128 MB each, and address space for one and a half."""
    repository = tmp_path / "r"
    config = ExportConfig(dtype={"*": WeightDtype.FP32}, sharding=Sharding(ranks=2, types={"*": "row_wise"}))
    first = export_model(collection((Spec("t", 500_000, 128, "SUM", ("x",)),)), repository, "m", config)
    second = shutil.copytree(first, first.with_name("2"))
    replace_model_py(second, LITTLE_ADDRESS_SPACE.format(spare_bytes=192_000_000))
    assert tbe_serve("configure", str(first.parent), "--version", "1").returncode == 0
    with run_server(repository, FREE, log=tmp_path / "log") as server, LookupClient(server.grpc, "m", 30) as client:
        expected = client.lookup({"x": [[1, 499_999]]})
        done = tbe_serve("load", "m", "--version", "2", "--url", server.grpc)
        assert (done.returncode, done.stdout) == (1, "m: still serves version 1\n")
        assert "weights.1.bin: cannot be mapped: Cannot allocate memory: " in done.stderr
        assert "Traceback" not in done.stderr
        np.testing.assert_array_equal(client.lookup({"x": [[1, 499_999]]})["x"], expected["x"])
