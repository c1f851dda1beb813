"""A server that is told to stop drains first: plain clients lose no call."""

import re
import signal
import threading
import time
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton

from export import export_model
from serving.errors import ConfigurationError
from serving.server.drain import check_drain, connection_age_ms
from serving.triton.command_line import age_options
from tests.support.certificates import write_certificates
from tests.support.long_cases import one_in
from tests.support.models import SUM, collection, exported
from tests.support.relay import Relay
from tests.support.server_waits import PATIENCE_S, ended, wait_until
from tests.support.servers import (
    FREE_PORTS,
    Running,
    add_gate,
    gate_closed,
    page,
    refused_run,
    running,
    tbe_serve,
    wait_for_execution,
)

AGE = "--grpc-max-connection-age"
DRAIN_S = 8
THREADS = 4
# Calls of each kind of client that are answered before the stop, and after the end.
CALLS = 50


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = tmp_path_factory.mktemp("drain") / "r"
    export_model(collection(SUM), repository, "m")
    return repository


@dataclass
class Counted:
    """The calls of a client, of any number of threads: a client that never tries again."""

    answered: int = 0
    lost: list[str] = field(default_factory=list)


def one_call(client: triton.InferenceServerClient) -> None:
    inputs = []
    for name, array, dtype in (
        ("values", np.array([[1]], np.int64), "INT64"),
        ("lengths", np.array([[1, 0, 0]], np.int32), "INT32"),
    ):
        tensor = triton.InferInput(name, list(array.shape), dtype)
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    answer = client.infer("m", inputs, client_timeout=PATIENCE_S).as_numpy("embeddings")
    assert answer is not None
    assert answer.size


@contextmanager
def calling(url: str, authority: Path | None) -> Iterator[Counted]:
    """Call all the time, in threads that share plain tritonclient's one client; its gRPC takes addresses in turn."""
    over, counted, lock = threading.Event(), Counted(), threading.Lock()
    options: list[tuple[str, str | int]] = [
        ("grpc.lb_policy_name", "round_robin"),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    tls = {} if authority is None else {"ssl": True, "root_certificates": str(authority)}
    if authority is not None:
        options.append(("grpc.ssl_target_name_override", "localhost"))

    def call(client: triton.InferenceServerClient) -> None:
        while not over.is_set():
            try:
                one_call(client)
            except triton.InferenceServerException as error:
                with lock:
                    counted.lost.append(str(error))
            else:
                with lock:
                    counted.answered += 1
            time.sleep(0.02)  # the servers have the same cores

    with (
        triton.InferenceServerClient(url, channel_args=options, **tls) as client,
        ThreadPoolExecutor(THREADS) as pool,
    ):
        threads = [pool.submit(call, client) for _ in range(THREADS)]
        try:
            yield counted
        finally:
            over.set()
        for thread in threads:
            thread.result()


def wait_for_more(counted: Counted) -> None:
    least = counted.answered + CALLS
    wait_until(lambda: counted.answered >= least or bool(counted.lost), "no more calls were answered")
    assert counted.lost == []


def is_ready(server: Running) -> bool:
    try:
        return page(server, "/readyz") == "ready\n"
    except urllib.error.HTTPError:
        return False


@pytest.mark.promise("A server that [drains](stopping.md#draining) before a stop loses no call of any gRPC client")
@pytest.mark.parametrize("tls", one_in(2, [False, True]), ids=["plain", "tls"])
def test_a_stop_loses_no_call_of_plain_clients(repository: Path, tmp_path: Path, tls: bool) -> None:
    """One client takes two servers in turn, the other comes by a proxy that leaves a server that is not ready."""
    pems = write_certificates(tmp_path, server="localhost")
    secure = ("--tls-cert", str(pems / "server.pem"), "--tls-key", str(pems / "server.key")) if tls else ()
    authority = pems / "root.pem" if tls else None
    with ExitStack() as stack:
        first = stack.enter_context(running(repository, "--drain-s", str(DRAIN_S), *secure))
        second = stack.enter_context(running(repository, *secure))
        proxy = stack.enter_context(Relay(first.grpc))
        in_turn = stack.enter_context(calling(f"ipv4:{first.grpc},{second.grpc}", authority))
        proxied = stack.enter_context(calling(f"ipv4:{proxy.address}", authority))
        for calls in (in_turn, proxied):
            wait_for_more(calls)
        first.process.terminate()
        wait_until(lambda: not is_ready(first), "it stays ready")
        proxy.target = second.grpc
        code, said = ended(first)
        for calls in (in_turn, proxied):
            wait_for_more(calls)
    assert code == 0
    assert (in_turn.lost, proxied.lost) == ([], [])
    assert [word for word in ("drains for up to", "stopping: ", "stopped") if word not in said] == []


def status_of(server: Running) -> str:
    return tbe_serve("status", server.grpc).stdout


@pytest.mark.promise("A second signal ends a server at once")
def test_a_draining_server_says_so_and_a_second_signal_ends_it(tmp_path: Path) -> None:
    bundle = exported(tmp_path)
    add_gate(bundle)
    options = ("--drain-s", "3600", "--", "--exit-timeout-secs", "3600")
    with ExitStack() as stack:
        server = stack.enter_context(running(bundle.parent.parent, *options))
        client = stack.enter_context(triton.InferenceServerClient(server.grpc))
        pool = stack.enter_context(ThreadPoolExecutor(1))
        with gate_closed(bundle):
            call = pool.submit(one_call, client)
            wait_for_execution(bundle)
            assert "draining" not in status_of(server)
            server.process.send_signal(signal.SIGINT)
            wait_until(lambda: not is_ready(server), "it stays ready")
            with pytest.raises(urllib.error.HTTPError) as answer:
                page(server, "/readyz")
            assert answer.value.read() == b"not ready: draining: requests are still answered\n"
            wait_until(lambda: "draining" in status_of(server), "status does not say that it drains")
            assert "m      1        ready" in status_of(server)
            server.process.send_signal(signal.SIGINT)
            code, said = ended(server)
            with pytest.raises(triton.InferenceServerException):
                call.result()
    assert code == 128 + signal.SIGINT
    assert "stopped at once: what was accepted is lost" in said


@pytest.mark.parametrize(
    ("drain_s", "options", "message"),
    [
        (1, [], "--drain-s 1: expected 0, or 2 to 3600 seconds"),
        (float("nan"), [], "--drain-s nan: expected 0, or 2 to 3600 seconds"),
        (20, [AGE, "10000"], "--drain-s 20: closes connections in its last 10 s, and they last up to 11 s: leave"),
        (20, [f"{AGE}=90", f"{AGE}=10000"], "and they last up to 11 s: leave"),
    ],
)
def test_a_drain_too_short_to_close_connections_is_refused(drain_s: float, options: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        check_drain(drain_s, options)


@pytest.mark.parametrize("drain_s", [0, 2, 20, 3600])
def test_connections_age_within_the_time_to_drain(drain_s: float) -> None:
    check_drain(drain_s, age_options(connection_age_ms(drain_s, renews=True)))


def test_a_drain_shorter_than_the_age_of_connections_is_refused(repository: Path) -> None:
    done = refused_run(str(repository), *FREE_PORTS, "--drain-s", "4", "--", "--grpc-max-connection-age", "9000")
    assert done.returncode == 1
    assert "they last up to 9.9 s: leave --grpc-max-connection-age out" in done.stderr
