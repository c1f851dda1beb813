"""`tbe-serve run` stops when it is told, whatever was going on."""

import signal
from functools import partial
from pathlib import Path

import grpc
import psutil
import pytest

from serving.client import LookupClient
from tests.faults.clients import message
from tests.fuzz.run import METHOD
from tests.support.long_cases import one_in
from tests.support.models import exported
from tests.support.server_waits import PATIENCE_S, another_answers, ended, stopped, wait_until
from tests.support.servers import (
    add_gate,
    gate_closed,
    replace_model_py,
    running,
    slow_start,
    stubs,
    tbe_serve,
    wait_for_answer,
    wait_for_execution,
)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return exported(tmp_path).parent.parent


@pytest.mark.promise("A stop does not wait for callers that have gone")
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
PATIENT = f"from serving.server import supervise; supervise.LAST_ANSWERS_S = {PATIENCE_S}"


@pytest.mark.parametrize("answers", one_in(2, [False, True]), ids=["idle", "answering"])
def test_a_crash_during_shutdown_is_clean_only_if_all_calls_were_answered(repository: Path, answers: bool) -> None:
    bundle = repository / "m" / "1"
    add_gate(bundle)
    patient = running(repository, first=PATIENT)
    with patient as server, grpc.insecure_channel(server.grpc) as channel, gate_closed(bundle):
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


@pytest.mark.promise("A stop is accepted at any time, also during a reload")
def test_a_stop_is_heard_while_a_model_reloads(repository: Path) -> None:
    gate = repository.with_name("gate")
    slow_start(repository / "m" / "1", gate)
    with running(repository) as server:
        gate.touch()
        killed = stubs(server.triton, "m")
        for stub in killed:
            stub.kill()
        wait_until(lambda: another_answers(server, "m", killed), "it was not loaded anew")
        server.process.terminate()
        code, log = ended(server)
        assert (code, "Traceback" in log) == (0, False), log


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


@pytest.mark.promise("A dead model process leaves no zombie")
def test_dead_processes_leave_no_zombies_and_models_may_have_children(repository: Path) -> None:
    replace_model_py(repository / "m" / "1", SHELL)
    with running(repository) as server, LookupClient(server.grpc, "m", 60) as client:
        for _ in range(2):
            killed = stubs(server.triton, "m")
            for stub in killed:
                stub.kill()
            wait_until(partial(another_answers, server, "m", killed), "it was not loaded anew")
            wait_for_answer(client)
        assert tbe_serve("load", "m", "--url", server.grpc).returncode == 0
        assert not any(map(is_zombie, server.triton.children()))
