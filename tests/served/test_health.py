"""Models that died, servers that are told to stop, and bundles that cannot be loaded."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tritonclient.grpc as triton

from export import export_model
from serving.client import LookupClient, Retries
from serving.errors import ServerFailed, ServerFault, ServerUnavailable
from serving.server import Server, run_server
from serving.server.run_file import find_run_file
from serving.server.stubs import shared_regions
from tests.models import SUM, collection
from tests.served.tools import (
    FREE,
    FREE_PORTS,
    add_gate,
    held,
    metric,
    replace_model_py,
    start_tbe_serve,
    stubs,
    tbe_serve,
    tritonserver_of,
    wait_for_answer,
    wait_for_execution,
    wait_for_pending,
)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    export_model(collection(SUM), tmp_path / "r", "m")
    return tmp_path / "r"


@contextmanager
def running(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], Server]]:
    """`tbe-serve run`, once it is ready."""
    with start_tbe_serve(*arguments, *FREE_PORTS, "--json") as process:
        assert process.stdout is not None
        try:
            said: dict[str, Any] = json.loads(process.stdout.readline())
            server: Any = psutil.Process(tritonserver_of(process).pid)
            run_file = find_run_file(said["http"])
            assert run_file is not None
            yield process, Server(server, said["grpc"], said["http"], said["metrics"], run_file.key)
        finally:
            process.kill() if process.poll() is None else None


def kill_stubs(server: Server, model: str, count: int | None = None) -> None:
    for stub in stubs(psutil.Process(server.process.pid), model)[:count]:
        stub.kill()


def test_health_tells_the_truth_where_triton_does_not(repository: Path, tmp_path: Path) -> None:
    with (
        run_server(repository, FREE, log=tmp_path / "log") as server,
        triton.InferenceServerClient(server.grpc) as theirs,
    ):
        done = tbe_serve("health", "m", "--url", server.grpc)
        assert (done.returncode, done.stdout) == (0, "m: version 1 answers\n")
        kill_stubs(server, "m")
        time.sleep(1)
        done = tbe_serve("health", "m", "--url", server.grpc)
        assert done.returncode == 1
        assert "m" in done.stderr
        assert theirs.is_model_ready("m"), "Triton notices by itself: then this is not needed any more"
        server.process.kill()  # it would wait for the dead model until its exit timeout


def test_health_has_a_deadline(repository: Path, tmp_path: Path) -> None:
    bundle = repository / "m" / "1"
    add_gate(bundle)
    with run_server(repository, FREE, log=tmp_path / "log") as server:
        with held(bundle):
            done = tbe_serve("health", "m", "--url", server.grpc, "--timeout-s", "0.5")
        assert done.returncode == 1
        assert "Deadline Exceeded" in done.stderr
        assert tbe_serve("health", "nobody", "--url", server.grpc).returncode == 1


def test_a_model_that_died_serves_again(repository: Path) -> None:
    with running(str(repository)) as (process, server):
        with LookupClient(server.grpc, "m", timeout_s=30) as client:
            alone = client.lookup({"x": [[1, 2]]})
            for times in (1, 2):
                kill_stubs(server, "m")
                wait_for_answer(client)
                np.testing.assert_array_equal(client.lookup({"x": [[1, 2]]})["x"], alone["x"])
                assert metric(server, "tbe_recoveries_total", model="m") == times
        regions = shared_regions(psutil.Process(server.process.pid))
        process.send_signal(signal.SIGTERM)
        started = time.monotonic()
        assert process.wait(60) == 0
        assert time.monotonic() - started < 25, "it waited for the dead process until Triton's exit timeout, 30 s"
        assert process.stderr is not None
        said = process.stderr.read()
    assert said.count("model 'm': a process of its died; loading it anew") == 2
    assert said.count("model 'm': serves again after") == 2
    assert regions
    assert [path for path in regions if path.exists()] == []


def test_one_of_two_instances_that_died_is_noticed(repository: Path) -> None:
    assert tbe_serve("configure", str(repository / "m"), "--instances", "2").returncode == 0
    with running(str(repository)) as (process, server), LookupClient(server.grpc, "m", timeout_s=30) as client:
        kill_stubs(server, "m", 1)
        deadline = time.monotonic() + 60
        while metric(server, "tbe_recoveries_total", model="m") != 1:
            assert time.monotonic() < deadline
        wait_for_answer(client)
        assert len(stubs(psutil.Process(server.process.pid), "m")) == 2
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_no_recover_ends_with_the_reason(repository: Path) -> None:
    with running(str(repository), "--no-recover") as (process, server):
        kill_stubs(server, "m")
        assert process.wait(60) == 1
        assert process.stderr is not None
        said = process.stderr.read()
    assert "tbe-serve: model 'm': a process of its died; stopping, as --no-recover says" in said


def test_a_stop_answers_all_that_was_accepted(repository: Path) -> None:
    bundle = repository / "m" / "1"
    add_gate(bundle)
    with running(str(repository)) as (process, server):
        client = LookupClient(server.grpc, "m", timeout_s=60, retries=Retries(attempts=1))
        expected = client.lookup({"x": [[1, 2]]})
        with ThreadPoolExecutor(40) as pool, held(bundle):
            first = pool.submit(client.lookup, {"x": [[1, 2]]})
            wait_for_execution(server, "m")
            answers = [first, *(pool.submit(client.lookup, {"x": [[1, 2]]}) for _ in range(39))]
            wait_for_pending(server, "m", 39)
            process.send_signal(signal.SIGTERM)
            time.sleep(1)
            with pytest.raises(ServerUnavailable):  # what comes after is refused, and may be tried elsewhere
                client.lookup({"x": [[1, 2]]})
        for answer in answers:
            np.testing.assert_array_equal(answer.result()["x"], expected["x"])
        assert process.wait(60) == 0
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


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (without_weights, r"weights\.0\.bin: cannot be read: No such file or directory: publish the bundle again"),
        (with_short_weights, r"weights\.0\.bin: expected \d+ bytes, got 100: publish the bundle again"),
        (for_another_device, r"rank 0: was made for device 'cuda', this is for 'cpu': export it again for that"),
        (of_a_newer_format, r"format_version: expected 3, got 99: serve it with the tbe-serving that exported it"),
        (with_wrong_pins, r"torch: expected 2\.13, found 2\.12\.0: install the pins of requirements/cpu\.txt"),
        (with_a_capture_that_cannot_be_written, r"capture: /proc/nowhere/m\.jsonl cannot be written: .*configure"),
        (with_a_setting_that_is_no_number, r"max_call_ids: expected a number, got 'many'"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_bundle_that_cannot_be_served_is_refused_in_one_line(
    repository: Path, tmp_path: Path, spoil: Any, message: str
) -> None:
    spoil(repository / "m" / "1")
    with pytest.raises(ServerFailed) as caught, run_server(repository, FREE, log=tmp_path / "log"):
        pass
    assert "Traceback" not in (tmp_path / "log").read_text()
    reasons = [line for line in str(caught.value).splitlines() if re.search(message, line)]
    assert reasons  # Triton says it when the instance fails, and when the model does
    assert [line for line in reasons if "backend.py" in line] == []


def test_a_dead_model_is_a_typed_error(repository: Path, tmp_path: Path) -> None:
    with (
        run_server(repository, FREE, log=tmp_path / "log") as server,
        LookupClient(server.grpc, "m", timeout_s=30) as client,
    ):
        client.lookup({"x": [[1]]})
        kill_stubs(server, "m")
        time.sleep(0.5)
        with pytest.raises(ServerFault):
            client.lookup({"x": [[1]]})
        server.process.kill()
