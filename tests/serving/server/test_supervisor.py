"""`tbe-serve run` goes on: tritonservers that die, models that hang, requests that are lost, and stops in between."""

import json
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest

from export import export_model
from serving.client import LookupClient, Retries
from serving.errors import ServingError
from serving.server.restarts import MOST
from serving.server.run_file import find_run_file
from tests.faults.clients import message
from tests.fuzz.run import METHOD
from tests.support.models import SUM, collection
from tests.support.servers import (
    FREE_PORTS,
    Running,
    add_gate,
    apart,
    held,
    replace_model_py,
    running,
    stubs,
    tbe_serve,
    tritonserver_of,
    wait_for_answer,
    wait_for_execution,
)

pytestmark = pytest.mark.usefixtures("quick_reload")

PATIENCE_S = 120


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    export_model(collection(SUM), tmp_path / "r", "m")
    return tmp_path / "r"


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def another_answers(server: Running, model: str, than: list[psutil.Process]) -> bool:
    """Whether a model has a process again, and it is another."""
    try:
        now = stubs(tritonserver_of(server.process), model)
    except (ValueError, psutil.Error):  # no tritonserver, or one that has just ended
        return False
    return bool(now) and not set(now) & set(than)


def stopped(server: Running) -> tuple[int, str]:
    """Told to stop: how it ended, and what it said."""
    server.process.terminate()
    return ended(server)


def ended(server: Running) -> tuple[int, str]:
    code = server.process.wait(PATIENCE_S)
    assert server.process.stderr is not None
    return code, server.process.stderr.read()


def listening(process: psutil.Process) -> set[tuple[str, int]]:
    return {each.laddr for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN}


def test_http_is_off_unless_it_is_asked_for(one_model: Path) -> None:
    with running(one_model) as server:
        assert server.http is None
        ports = {int(address.rpartition(":")[2]) for address in (server.grpc, server.metrics)}
        assert {port for _, port in listening(server.triton)} == ports
        run_file = find_run_file(server.grpc)
        assert run_file is not None
        control = Path(run_file.control.removeprefix("unix:"))
        assert control.is_socket()
        assert control.parent.stat().st_mode & 0o077 == 0
        assert tbe_serve("load", "m", "--url", server.grpc).stdout == "m: version 1 → 1\n"
    assert not control.parent.exists()


def test_a_server_is_switched_whatever_becomes_of_one_with_its_port_in_another_network(
    repository: Path, one_model: Path
) -> None:
    """They share the folder for temporary files, as containers may. Each is found where it listens, and no other."""
    export_model(collection(SUM), repository, "m")
    with running(repository) as server:
        port = server.grpc.rpartition(":")[2]
        switched = ("load", "m", "--version", "1", "--url", server.grpc)
        with running(one_model, "--grpc-port", port, within=apart()):
            done = tbe_serve(*switched)
            assert done.stdout == "m: version 2 → 1\n", done.stderr
        done = tbe_serve(*switched)
        assert done.stdout == "m: version 1 → 1\n", done.stderr
        for kept in (Path(tempfile.gettempdir()) / f"tbe-serve-{os.getuid()}").glob(f"{port}*.json"):
            kept.unlink()
        wait_until(lambda: find_run_file(server.grpc) is not None, "its control file was not written again")
        assert tbe_serve(*switched).stdout == "m: version 1 → 1\n"


def test_all_of_ipv4_is_ipv4_alone(one_model: Path) -> None:
    with running(one_model, "--host", "0.0.0.0", "--insecure", "--http") as server:
        assert server.http is not None
        for address in (server.grpc, server.http, server.metrics):
            port = int(address.rpartition(":")[2])
            socket.create_connection(("127.0.0.1", port), timeout=10).close()
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("::1", port), timeout=10)
    with socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))  # there is IPv6 here: it could have been reached


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
def test_a_tritonserver_that_died_is_started_anew_as_it_was(repository: Path, number: signal.Signals) -> None:
    """With the version that it was told to serve, not what config.pbtxt says or what was published since."""
    export_model(collection(SUM), repository, "m")
    with running(repository) as server, LookupClient(server.grpc, "m", 60) as client:
        assert tbe_serve("load", "m", "--version", "1", "--url", server.grpc).stdout == "m: version 2 → 1\n"
        before = client.lookup({"x": [[1, 2]]})
        time.sleep(5)  # the supervisor has seen it
        export_model(collection(SUM), repository, "m")
        died = stubs(server.triton, "m")
        server.triton.send_signal(number)
        wait_until(lambda: another_answers(server, "m", died), "it was not started anew")
        wait_for_answer(client)
        again = client.lookup({"x": [[1, 2]]})
        assert again.version == before.version == 1
        np.testing.assert_array_equal(again["x"], before["x"])
        assert tbe_serve("load", "m", "--url", server.grpc).stdout == "m: version 1 → 3\n"
        run_file = find_run_file(server.grpc)
        assert run_file is not None
        assert run_file.key not in " ".join(server.triton.cmdline())
        code, said = stopped(server)
    assert code == 0
    assert f"tritonserver died ({number.name}); starting it anew, 1 of at most {MOST} times" in said
    assert "model 'm': serves again after" in said


def test_a_tritonserver_that_served_is_started_anew_at_once_each_time(repository: Path) -> None:
    with running(repository) as server, LookupClient(server.grpc, "m", timeout_s=5) as client:
        assert server.process.stderr is not None
        said = []
        for _ in range(3):
            server.triton.kill()
            for line in server.process.stderr:
                said.append(line)
                if "serves again after" in line:
                    break
            wait_for_answer(client)
            assert tbe_serve("health", "m", "--url", server.grpc).returncode == 0
        assert stopped(server)[0] == 0
    starts = [line for line in said if f"of at most {MOST} times" in line]
    assert len(starts) == 3
    assert [line for line in starts if ", in " in line] == []


def test_a_tritonserver_that_cannot_start_again_is_given_up_with_its_reason(repository: Path) -> None:
    with running(repository) as server:
        shutil.rmtree(repository)
        server.triton.kill()
        code, said = ended(server)
    assert code == 1
    assert said.count("; starting it anew, ") == MOST
    assert [pause for pause in ("1", "3", "7", "15") if f"times, in {pause} s\n" not in said] == []
    reason = f"creating server: Internal - failed to stat file {repository}"
    assert f"tritonserver died again (1: {reason}), after {MOST} starts within 10 minutes" in said


@pytest.mark.parametrize("asked", [True, False], ids=["asked", "idle"])
def test_a_model_whose_process_is_paused_is_replaced(repository: Path, asked: bool) -> None:
    with running(repository) as server, LookupClient(server.grpc, "m", 60, retries=Retries(attempts=1)) as client:
        expected = client.lookup({"x": [[1, 2]]})
        paused = stubs(server.triton, "m")
        for stub in paused:
            stub.suspend()
        if asked:
            with pytest.raises(ServingError):
                client.lookup({"x": [[1]]}, timeout_s=2)
        wait_until(lambda: another_answers(server, "m", paused), "it was not replaced")
        wait_for_answer(client)
        np.testing.assert_array_equal(client.lookup({"x": [[1, 2]]})["x"], expected["x"])
        assert not any(stub.is_running() for stub in paused)
        code, said = stopped(server)
    assert code == 0
    assert "model 'm': a process of its was paused; loading it anew" in said


def test_processes_of_models_end_when_all_who_would_end_them_are_killed(repository: Path) -> None:
    with running(repository) as server:
        triton = server.triton
        left = stubs(triton, "m")
        server.process.kill()
        triton.kill()
        assert left
        assert psutil.wait_procs(left, PATIENCE_S)[1] == []


LOOP = """
from pathlib import Path
from serving.backend import TritonPythonModel
from serving.engine import Engine

run = Engine.run

def run_or_hang(self, batches):
    while Path({loop!r}).exists():
        pass
    return run(self, batches)

Engine.run = run_or_hang
"""


def test_a_model_in_an_endless_loop_is_replaced_though_nobody_asks_any_more(repository: Path) -> None:
    loop = repository.with_name("loop")
    replace_model_py(repository / "m" / "1", LOOP.format(loop=str(loop)))
    with running(repository) as server, LookupClient(server.grpc, "m", 60, retries=Retries(attempts=1)) as client:
        client.lookup({"x": [[1]]})
        hung = stubs(server.triton, "m")
        loop.touch()
        with pytest.raises(ServingError):
            client.lookup({"x": [[1]]}, timeout_s=2)
        wait_until(lambda: not any(stub.is_running() for stub in hung), "it was not replaced")
        loop.unlink()
        wait_for_answer(client)
        code, said = stopped(server)
    assert code == 0
    assert "model 'm': it answered nobody for 25 s; loading it anew" in said


def test_a_model_whose_folder_is_gone_too_ends_the_server_with_the_reason(repository: Path) -> None:
    with running(repository) as server:
        shutil.rmtree(repository / "m")
        for stub in stubs(server.triton, "m"):
            stub.kill()
        code, said = ended(server)
    assert code == 1
    assert "model 'm': a process of its died; loading it anew" in said
    assert "failed to poll from model repository" in said.splitlines()[-1]


def test_a_stop_does_not_wait_for_requests_that_triton_lost(repository: Path) -> None:
    """A first dimension of 0 is one that it never answers; those whose callers give up may become such."""
    with running(repository, "--", "--exit-timeout-secs", "600") as server:
        with grpc.insecure_channel(server.grpc) as channel:
            lost = message().replace(b"\x1a\x02\x01\x01", b"\x1a\x02\x00\x01")
            with pytest.raises(grpc.RpcError):
                channel.unary_unary(METHOD)(lost, timeout=2)
        assert stopped(server)[0] == 0


def is_told_to_stop(process: psutil.Process) -> bool:
    """Whether SIGTERM waits for a suspended process."""
    status = (Path("/proc") / str(process.pid) / "status").read_text()
    pending = next(line.split()[1] for line in status.splitlines() if line.startswith("ShdPnd:"))
    return bool(int(pending, 16) >> (signal.SIGTERM - 1) & 1)


# A server whose models are idle is killed soon after it was told to stop. On a busy machine that is before it crashes.
PATIENT = f"from serving.server import supervisor; supervisor._LAST_ANSWERS_S = {PATIENCE_S}"


@pytest.mark.parametrize("answers", [False, True], ids=["idle", "answering"])
def test_a_crash_while_it_stops_is_a_clean_stop_only_if_nothing_was_left_to_answer(
    repository: Path, answers: bool
) -> None:
    bundle = repository / "m" / "1"
    add_gate(bundle)
    patient = running(repository, first=PATIENT)
    with patient as server, grpc.insecure_channel(server.grpc) as channel, held(bundle):
        if answers:
            call = channel.unary_unary(METHOD).future(message(), timeout=PATIENCE_S)
            wait_for_execution(bundle)
        triton = server.triton
        triton.suspend()  # so that it cannot end before it crashes
        # One of its threads could still take what comes next.
        wait_until(lambda: triton.status() == psutil.STATUS_STOPPED, "it was not suspended")
        server.process.terminate()
        wait_until(lambda: is_told_to_stop(triton), "the stop was not passed on")
        triton.send_signal(signal.SIGABRT)
        triton.resume()
        code, said = ended(server)
        if answers:
            assert call.code() is grpc.StatusCode.UNAVAILABLE
    assert (code == 0) is not answers
    assert ("tritonserver ended with SIGABRT while it stopped, with nothing left to answer" in said) is not answers


SLOW_START = """
import time
from pathlib import Path
while Path({gate!r}).exists():
    time.sleep(0.01)
from serving.backend import TritonPythonModel
"""


def test_a_stop_is_heard_while_a_model_is_loaded_anew(repository: Path) -> None:
    gate = repository.with_name("gate")
    replace_model_py(repository / "m" / "1", SLOW_START.format(gate=str(gate)))
    with running(repository) as server:
        gate.touch()
        killed = stubs(server.triton, "m")
        for stub in killed:
            stub.kill()
        wait_until(lambda: another_answers(server, "m", killed), "it was not loaded anew")
        server.process.terminate()
        ended(server)


SHELL = """
import subprocess
from serving.backend import TritonPythonModel as Ours

class TritonPythonModel(Ours):
    def initialize(self, args):
        super().initialize(args)
        assert subprocess.run(["false"]).returncode == 1, "how a child ended is lost"
"""


def is_zombie(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False  # it has ended since it was listed, as that of a version that was loaded anew


def test_processes_that_died_are_no_zombies_and_models_may_have_children(repository: Path) -> None:
    replace_model_py(repository / "m" / "1", SHELL)
    with running(repository) as server, LookupClient(server.grpc, "m", 60) as client:
        for _ in range(3):
            killed = stubs(server.triton, "m")
            for stub in killed:
                stub.kill()
            wait_until(partial(another_answers, server, "m", killed), "it was not loaded anew")
            wait_for_answer(client)
        assert tbe_serve("load", "m", "--url", server.grpc).returncode == 0
        assert not any(map(is_zombie, server.triton.children()))


def test_an_option_that_triton_does_not_know_is_named_in_one_line(one_model: Path) -> None:
    done = tbe_serve("run", str(one_model), *FREE_PORTS, "--", "--no-such-option")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) < 10
    last = done.stderr.splitlines()[-1]
    assert last.startswith("tbe-serve: tritonserver exited with 1 before its models were ready: ")
    assert last.endswith("unrecognized option '--no-such-option'")


def test_a_model_that_does_not_load_is_the_last_line_of_the_command(repository: Path) -> None:
    os.truncate(repository / "m" / "1" / "weights.0.bin", 100)
    done = tbe_serve("run", str(repository), *FREE_PORTS)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "failed to load 'm' version 1" in last
    assert last.endswith("weights.0.bin: expected 800 bytes, got 100: publish the bundle again")
    assert json.loads((repository / "m" / "1" / "manifest.json").read_text())
