"""A tritonserver is found, started and ended."""

import json
import os
import signal
import socket
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib.machinery import PathFinder
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import psutil
import pytest

import serving
from export import export_model
from serving.client import LookupClient
from serving.errors import (
    ConfigurationError,
    TritonserverFailed,
)
from serving.server import Ports, Server, run_server, startup
from serving.server.child_process import GLIBC, malloc_environment
from serving.server.run import expect_not_hidden
from serving.server.running_server import ServedModel
from tests.support.long_cases import one_in
from tests.support.models import SUM, collection
from tests.support.servers import (
    FREE,
    FREE_PORTS,
    slow_start,
    start_tbe_serve,
)


@pytest.mark.parametrize("number", one_in(2, [signal.SIGINT, signal.SIGTERM]))
def test_the_command_prints_its_addresses_and_stops_on_a_signal(one_model: Path, number: signal.Signals) -> None:
    with start_tbe_serve(str(one_model), *FREE_PORTS, "--http", "--json") as process:
        assert process.stdout is not None
        where = json.loads(process.stdout.readline())
        assert {model["name"]: model["versions"] for model in where["models"]} == {"m": [1]}
        with LookupClient(where["grpc"], "m", 30) as client:
            assert client.lookup({"x": [[1]]})["x"].shape == (1, 8)
        assert urllib.request.urlopen(f"http://{where['http']}/v2/health/ready", timeout=30).status == 200
        assert urllib.request.urlopen(f"{where['operations']}/metrics", timeout=30).status == 200
        process.send_signal(number)
        assert process.wait(60) == 0
        assert process.stdout.read() == ""


def test_a_signal_before_the_models_are_ready_stops_the_server(one_model: Path) -> None:
    with start_tbe_serve(str(one_model), *FREE_PORTS) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while not (started := children.read_text().split()):
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
    assert not Path(f"/proc/{started[0]}").exists()


def test_the_server_dies_with_its_command(one_model: Path) -> None:
    with start_tbe_serve(str(one_model), *FREE_PORTS, "--json") as process:
        assert process.stdout is not None
        process.stdout.readline()
        (server,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.kill()
        process.wait()
    deadline = time.monotonic() + 30
    while Path(f"/proc/{server}/exe").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{server}/exe").exists()


def test_a_server_that_dies_ends_the_command_with_a_failure(one_model: Path) -> None:
    with start_tbe_serve(str(one_model), *FREE_PORTS, "--no-recover", "--json") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        (server,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(server), signal.SIGKILL)
        assert process.wait(30) == 128 + signal.SIGKILL
        assert "tritonserver exited with -9" in process.stderr.read()


def test_a_server_is_ready_when_its_metrics_are_available(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Triton opens them last, after a model can be ready: whoever read where they are was refused there."""
    monkeypatch.setattr(startup, "_ready_models", lambda _: (ServedModel("m", (1,)),))
    ended = SimpleNamespace(output=SimpleNamespace(reason=lambda: "no reason"))
    address = f"unix:{tmp_path / 'metrics'}"
    server = SimpleNamespace(process=SimpleNamespace(poll=lambda: None), metrics_address=address, child=ended)
    with pytest.raises(TritonserverFailed, match="m not ready within"):
        startup._wait_until_ready(cast(Server, server), ["m"], 0.2)
    (tmp_path / "metrics").touch()
    startup._wait_until_ready(cast(Server, server), ["m"], 30)


@pytest.mark.promise("A tritonserver that a signal ends while it loads its models is restarted once")
@pytest.mark.parametrize("times", one_in(2, [1, 2]))
def test_a_tritonserver_killed_while_it_loads_is_restarted_once(tmp_path: Path, times: int) -> None:
    """Triton 2.51 aborts sometimes on a busy machine. If it is killed twice, there is another reason."""
    bundle = export_model(collection(SUM), tmp_path / "r", "m")
    gate = tmp_path / "gate"
    gate.touch()
    slow_start(bundle, gate)

    earlier = {child.pid for child in psutil.Process().children()}  # such as a server that tests share

    def kill() -> None:
        killed: set[int] = set()
        while len(killed) < times:
            for child in psutil.Process().children():
                # It has the model's process, which waits. One that was killed may be a zombie for a while.
                if child.name() == "tritonserver" and child.pid not in earlier | killed and child.children():
                    child.kill()
                    killed.add(child.pid)
            time.sleep(0.05)
        gate.unlink()

    with ThreadPoolExecutor(1) as pool, ExitStack() as stack:
        killed = pool.submit(kill)
        if times == 2:
            with pytest.raises(TritonserverFailed, match="exited with -9 before its models were ready"):
                stack.enter_context(run_server(tmp_path / "r", FREE, log=tmp_path / "log"))
            killed.result()
            return
        server = stack.enter_context(run_server(tmp_path / "r", FREE, log=tmp_path / "log"))
        killed.result()
        assert server.warnings[0].startswith("tritonserver exited with -9 before its models were ready: ")
        assert server.warnings[0].endswith("; it was started once more")
        with LookupClient(server.grpc, "m", 30) as client:
            assert client.lookup({"x": [[1]]}).version == 1


def test_a_folder_that_hides_this_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an environment of the wheel. A development install finds ours wherever it is started."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "serving").mkdir()
    monkeypatch.setattr(sys, "meta_path", [PathFinder])
    monkeypatch.setattr(sys, "path", [str(Path(serving.__file__).parents[1]), *sys.path])
    expect_not_hidden(Path.cwd())  # a folder without code hides nothing
    for name in ("serving/__init__.py", "serving.py"):
        (tmp_path / name).touch()
        with pytest.raises(ConfigurationError, match=rf"^{tmp_path}/{name}: hides the package `serving`"):
            expect_not_hidden(Path.cwd())
        (tmp_path / name).unlink()
    expect_not_hidden(Path(serving.__file__).parents[1])


def test_folders_and_ports_are_checked_before_anything_starts(tmp_path: Path) -> None:
    ports = FREE
    with pytest.raises(ConfigurationError, match="found no folder"), run_server(tmp_path / "none", ports):
        pass
    with pytest.raises(ConfigurationError, match="found none"), run_server(tmp_path, ports):
        pass
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "manifest.json").write_text("")
    # As gRPC listens: others may with it, if they ask for that as well.
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as listener:
        bad_ports = Ports(grpc=listener.getsockname()[1], http=0, operations=0)
        with (
            pytest.raises(ConfigurationError, match=f"--grpc-port {bad_ports.grpc}: cannot listen"),
            run_server(tmp_path, bad_ports),
        ):
            pass


@pytest.mark.parametrize("preload", one_in(2, [None, ""]))
def test_a_server_and_its_models_use_tcmalloc_if_installed(
    one_model: Path, monkeypatch: pytest.MonkeyPatch, preload: str | None
) -> None:
    """`requirements/test-tools.sh` installs it. Who sets LD_PRELOAD has the last word."""
    if preload is not None:
        monkeypatch.setenv("LD_PRELOAD", preload)
    with run_server(one_model, FREE) as server:
        processes = [server.process.pid, *(child.pid for child in psutil.Process(server.process.pid).children())]
        assert len(processes) == 2
        for process in processes:
            assert ("tcmalloc" in Path(f"/proc/{process}/maps").read_text()) == (preload is None)


def test_glibc_s_malloc_keeps_memory_without_tcmalloc(tmp_path: Path) -> None:
    assert malloc_environment([str(tmp_path)]) == GLIBC
    (tmp_path / "libtcmalloc.so.4").touch()
    assert malloc_environment(["/absent", str(tmp_path)])["LD_PRELOAD"] == str(tmp_path / "libtcmalloc.so.4")
