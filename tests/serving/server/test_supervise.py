"""`tbe-serve run` goes on: tritonservers that die, models that hang, and what cannot be served."""

import json
import os
import shutil
import signal
import socket
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from export import export_model
from serving.client import LookupClient, Retries
from serving.errors import ServingError
from serving.server.run_file import find_run_file
from serving.server.supervise import MOST
from tests.support.long_cases import one_in
from tests.support.models import SUM, collection
from tests.support.server_waits import PATIENCE_S, another_answers, ended, listening, stopped, wait_until
from tests.support.servers import (
    FREE_PORTS,
    apart,
    hurried,
    replace_model_py,
    running,
    stubs,
    tbe_serve,
    wait_for_answer,
)


@pytest.mark.promise("HTTP is closed unless the operator opens it")
def test_http_is_off_unless_it_is_asked_for(one_model: Path) -> None:
    with running(one_model) as server:
        assert server.http is None
        ours = psutil.Process(server.process.pid)
        for process, address in ((server.triton, server.grpc), (ours, server.operations)):
            assert {port for _, port in listening(process)} == {int(address.rpartition(":")[2])}
        run_file = find_run_file(server.grpc)
        assert run_file is not None
        control = Path(run_file.control.removeprefix("unix:"))
        assert control.is_socket()
        assert control.parent.stat().st_mode & 0o077 == 0
        assert tbe_serve("load", "m", "--url", server.grpc).stdout == "m: version 1 → 1\n"
    assert not control.parent.exists()


@pytest.mark.promise(
    "`tbe-serve load` reaches a server although servers in other network namespaces share its port and temporary folder"
)
def test_a_server_is_switched_beside_one_in_another_network_with_its_port(repository: Path, one_model: Path) -> None:
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
        for run_file in (Path(tempfile.gettempdir()) / f"tbe-serve-{os.getuid()}").glob(f"{port}*.json"):
            run_file.unlink()
        wait_until(lambda: find_run_file(server.grpc) is not None, "its control file was not written again")
        assert tbe_serve(*switched).stdout == "m: version 1 → 1\n"


@pytest.mark.promise("A server on 0.0.0.0 listens on IPv4 alone")
def test_a_server_on_0_0_0_0_does_not_listen_on_ipv6(one_model: Path) -> None:
    with running(one_model, "--host", "0.0.0.0", "--insecure", "--http") as server:
        assert server.http is not None
        for address in (server.grpc, server.http, server.operations):
            port = int(address.rpartition(":")[2])
            socket.create_connection(("127.0.0.1", port), timeout=10).close()
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("::1", port), timeout=10)
    with socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))  # there is IPv6 here: it could have been reached


@pytest.mark.promise("A tritonserver that died is restarted on the same ports with the same versions")
@pytest.mark.parametrize("number", one_in(2, [signal.SIGKILL, signal.SIGABRT]))
def test_a_tritonserver_that_died_is_restarted_with_its_options(repository: Path, number: signal.Signals) -> None:
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
    assert f"tritonserver died ({number.name}); restarting, 1 of at most {MOST} times" in said
    assert "model 'm': serves again after" in said


@pytest.mark.long
@pytest.mark.promise("A tritonserver that died is restarted on the same ports with the same versions")
def test_a_tritonserver_that_served_is_restarted_at_once_each_time(repository: Path) -> None:
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


@pytest.mark.promise("A tritonserver that cannot start again ends the server with the reason")
def test_a_tritonserver_that_cannot_restart_ends_with_its_reason(repository: Path) -> None:
    with running(repository, first=hurried("supervise")) as server:
        shutil.rmtree(repository)
        server.triton.kill()
        code, said = ended(server)
    assert code == 1
    assert said.count("; restarting, ") == MOST
    assert [pause for pause in ("1", "3", "7", "15") if f"times, in {pause} s\n" not in said] == []
    reason = f"creating server: Internal - failed to stat file {repository}"
    assert f"tritonserver died again (1: {reason}), after {MOST} starts within 10 minutes" in said


@pytest.mark.promise("A model whose process is paused is replaced, with or without requests")
@pytest.mark.parametrize("with_lookup", one_in(2, [True, False]), ids=["asked", "idle"])
def test_a_model_whose_process_is_paused_is_replaced(repository: Path, with_lookup: bool) -> None:
    with running(repository) as server, LookupClient(server.grpc, "m", 60, retries=Retries(attempts=1)) as client:
        expected = client.lookup({"x": [[1, 2]]})
        paused = stubs(server.triton, "m")
        for stub in paused:
            stub.suspend()
        if with_lookup:
            with pytest.raises(ServingError):
                client.lookup({"x": [[1]]}, timeout_s=2)
        wait_until(lambda: another_answers(server, "m", paused), "it was not replaced")
        wait_for_answer(client)
        np.testing.assert_array_equal(client.lookup({"x": [[1, 2]]})["x"], expected["x"])
        assert not any(stub.is_running() for stub in paused)
        code, said = stopped(server)
    assert code == 0
    assert "model 'm': a backend process was paused; reloading" in said


@pytest.mark.promise("A killed server leaves no process behind, even if `tbe-serve run` is killed with it")
def test_model_processes_end_after_all_their_parents_are_killed(repository: Path) -> None:
    with running(repository) as server:
        triton = server.triton
        processes = stubs(triton, "m")
        server.process.kill()
        triton.kill()
        assert processes
        assert psutil.wait_procs(processes, PATIENCE_S)[1] == []


LOOP = """
import time
from pathlib import Path
from serving.backend import TritonPythonModel
from serving.engine import Engine

answer = Engine.answer

def answer_or_hang(self, requests):
    while Path({loop!r}).exists():
        time.sleep(0.01)
    return answer(self, requests)

Engine.answer = answer_or_hang
"""


@pytest.mark.promise("A model in an endless loop is replaced, with or without requests")
def test_a_model_in_an_endless_loop_is_replaced_without_requests(repository: Path) -> None:
    loop = repository.with_name("loop")
    replace_model_py(repository / "m" / "1", LOOP.format(loop=str(loop)))
    with (
        running(repository, first=hurried("hang_check")) as server,
        LookupClient(server.grpc, "m", 60, retries=Retries(attempts=1)) as client,
    ):
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
    assert "model 'm': it answered no request for 25 s; reloading" in said


@pytest.mark.promise("A model that cannot be reloaded because its folder was deleted ends the server with the reason")
def test_a_model_whose_folder_disappeared_ends_the_server_with_the_reason(repository: Path) -> None:
    with running(repository) as server:
        shutil.rmtree(repository / "m")
        for stub in stubs(server.triton, "m"):
            stub.kill()
        code, said = ended(server)
    assert code == 1
    assert "model 'm': a backend process died; reloading" in said
    assert "failed to poll from model repository" in said.splitlines()[-1]


def test_an_option_unknown_to_triton_is_named_in_one_line(one_model: Path) -> None:
    done = tbe_serve("run", str(one_model), *FREE_PORTS, "--", "--no-such-option")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) < 10
    last = done.stderr.splitlines()[-1]
    assert last.startswith("tbe-serve: tritonserver exited with 1 before its models were ready: ")
    assert last.endswith("unrecognized option '--no-such-option'")


@pytest.mark.long
def test_a_model_that_does_not_load_is_the_last_line_of_the_command(repository: Path) -> None:
    os.truncate(repository / "m" / "1" / "weights.0.bin", 100)
    done = tbe_serve("run", str(repository), *FREE_PORTS)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "failed to load 'm' version 1" in last
    assert last.endswith("weights.0.bin: expected 800 bytes, got 100: publish the bundle again")
    assert json.loads((repository / "m" / "1" / "manifest.json").read_text())
