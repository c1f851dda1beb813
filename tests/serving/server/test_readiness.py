"""What the operations port of a real server says while things die and are replaced, and while it stops."""

import json
import os
import signal
import threading
from ipaddress import ip_address
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

from export import export_model
from serving.client import LookupClient
from serving.requests.types import Array
from tests.support.host_faults import until
from tests.support.models import SUM, collection
from tests.support.servers import (
    FREE_PORTS,
    add_gate,
    gate_closed,
    listens,
    metric,
    running,
    slow_start,
    start_tbe_serve,
    stubs,
    wait_for_execution,
)


def status_of(url: str, path: str) -> tuple[int, str]:
    try:
        with urlopen(f"{url}{path}", timeout=30) as response:
            return response.status, response.read().decode()
    except HTTPError as error:
        return error.code, error.read().decode()


READY, LIVE = (200, "ready\n"), (200, "alive\n")


def test_a_server_is_unready_only_while_it_replaces_something_or_stops(tmp_path: Path) -> None:
    bundle = export_model(collection(SUM), tmp_path / "r", "m")
    add_gate(bundle)
    with running(tmp_path / "r") as server, LookupClient(server.grpc, "m", 60) as client:
        assert (status_of(server.operations, "/readyz"), status_of(server.operations, "/livez")) == (READY, LIVE)

        for process in stubs(server.triton, "m"):
            process.kill()
        died = (503, "not ready: model 'm': a backend process died; reloading\n")
        until(lambda: status_of(server.operations, "/readyz") == died, "it is not ready")
        assert status_of(server.operations, "/livez") == LIVE
        until(lambda: status_of(server.operations, "/readyz") == READY, "it is ready")
        assert client.lookup({"x": [[1]]})["x"].shape == (1, 8)

        server.triton.kill()
        until(lambda: status_of(server.operations, "/readyz")[0] == 503, "it is not ready")
        assert status_of(server.operations, "/readyz")[1].startswith(
            ("not ready: tritonserver died", "not ready: model")
        )
        assert status_of(server.operations, "/livez") == LIVE
        until(lambda: status_of(server.operations, "/readyz") == READY, "it is ready")
        assert client.lookup({"x": [[1]]})["x"].shape == (1, 8)
        assert metric(server, "tbe_requests_total", model="m") >= 0  # metrics come from the new tritonserver

        answers: list[Array] = []
        with gate_closed(bundle):
            waiting = threading.Thread(target=lambda: answers.append(client.lookup({"x": [[1]]})["x"]))
            waiting.start()
            wait_for_execution(bundle)
            server.process.send_signal(signal.SIGTERM)
            until(
                lambda: status_of(server.operations, "/readyz") == (503, "not ready: stopping\n"),
                "it says that it stops",
            )
            assert status_of(server.operations, "/livez") == LIVE
        waiting.join(60)
        assert [answer.shape for answer in answers] == [(1, 8)]
        assert server.process.wait(60) == 0


def test_a_loading_server_is_alive_and_not_ready(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    slow_start(export_model(collection(SUM), tmp_path / "r", "m"), gate)
    # An address of its own, so that nobody else takes the port.
    host = str(ip_address("127.2.0.0") + os.getpid())
    ports = (*FREE_PORTS[:4], "--operations-port", "8002", "--operations-host", host)
    with start_tbe_serve(str(tmp_path / "r"), *ports, "--json") as process:
        url = f"http://{host}:8002"
        try:
            until(lambda: listens(host, 8002), "it listens")
            assert status_of(url, "/readyz") == (503, "not ready: starting\n")
            assert status_of(url, "/livez") == LIVE
            gate.unlink()
            assert process.stdout is not None
            assert json.loads(process.stdout.readline())["operations"] == url
            assert status_of(url, "/readyz") == READY
        finally:
            process.terminate()
