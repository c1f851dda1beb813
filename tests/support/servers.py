"""What tests do to real servers."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import psutil
import tritonclient.grpc as triton
from typer.testing import CliRunner

from serving.__main__ import app
from serving.backend.metrics import Publisher
from serving.bundle.load import digest_file
from serving.bundle.manifest import MANIFEST, MODEL
from serving.client import LookupClient
from serving.errors import ServingError
from serving.server import Ports, Server, Supervisor
from serving.server.running_server import Served
from serving.triton.stubs import living_stubs
from tests.support.deadlines import CALLING, PATIENT_S, check_routers

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")
FREE = Ports(grpc=0, http=0, operations=0)
# Commands that have a process of their own, as they go on or measure it.
APART = ("run", "bench")
FREE_PORTS = ("--grpc-port", "0", "--http-port", "0", "--operations-port", "0")
DTYPES = {"int64": "INT64", "int32": "INT32", "float32": "FP32"}


def scrape(server: "Server | Running") -> str:
    """The metrics page, once all that was counted is published."""
    time.sleep(2 * Publisher.PERIOD_S)
    return page(server, "/metrics")


def page(server: "Server | Running", path: str) -> str:
    """A page of the operations port, such as "/readyz?verbose"."""
    with urllib.request.urlopen(server.operations + path, timeout=PATIENT_S) as response:
        text: str = response.read().decode()
    return text


def metric(server: "Server | Running", name: str, **labels: str) -> float:
    """The sum of a metric over everything with these labels, once all that was counted is published."""
    return _sum(scrape(server), name, **labels)


def _sum(page: str, name: str, **labels: str) -> float:
    wanted_labels = [f'{key}="{value}"' for key, value in labels.items()]
    return sum(
        float(line.split()[-1])
        for line in page.splitlines()
        if line.startswith(name + "{") and all(label in line for label in wanted_labels)
    )


def at_once(calls: list[Callable[[], Any]]) -> list[Any]:
    """Start all calls at the same moment, each on a thread of its own; their results or errors."""
    barrier = threading.Barrier(len(calls))

    def run(call: Callable[[], Any]) -> Any:
        barrier.wait()
        try:
            return call()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))


def stubs(server: psutil.Process, model: str) -> list[psutil.Process]:
    """The processes that answer for a model."""
    processes = []
    for child in server.children():
        with suppress(psutil.NoSuchProcess):  # it has just ended; or Triton does not wait for one that was killed
            processes += [child] if any(f"/{model}/" in part for part in child.cmdline()) else []
    return processes


@contextmanager
def reloading(server: Server) -> Iterator[None]:
    """In the block, load models again whose processes ended: a process that a busy machine pauses ends itself.

    `tbe-serve run` does that, and also asks models whether they hang, which tests that count requests would notice.
    """
    control, served, stopped = server.control(120.0), Served(server.started), threading.Event()
    served.update(control.index(), control)

    def watch() -> None:
        while not stopped.wait(0.5):
            living = {stub.model for stub in living_stubs(server.process.pid)}
            for model in served.configs.keys() - living:
                with suppress(ServingError):
                    control.recover(model, served.configs[model], served.versions[model], served.since)

    thread = threading.Thread(target=watch, name="reloading")
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def listens(host: str, port: int) -> bool:
    """Whether somebody listens there."""
    with socket.socket() as client:
        client.settimeout(10)
        return client.connect_ex((host, port)) == 0


def wait_for_stubs(server: psutil.Process, model: str, count: int) -> None:
    """Wait until so many processes answer for a model: those that others replaced may still be ending."""
    deadline = time.monotonic() + 60
    while (count_now := len(stubs(server, model))) != count:
        assert time.monotonic() < deadline, f"expected {count} processes of {model}, found {count_now}"
        time.sleep(0.1)


def lives(process: psutil.Process) -> bool:
    """Whether it still does anything: one that ended may stay until its parent takes note."""
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def shared_regions(process: psutil.Process) -> list[Path]:
    """The files in /dev/shm that a server shares with its models, as one of them has them mapped."""
    return [path for mapping in process.memory_maps() if (path := Path(mapping.path)).parent == Path("/dev/shm")]


GATE = """
import time
from pathlib import Path
from serving.backend import TritonPythonModel
from serving.engine import Engine

answer, gate = Engine.answer, Path({gate!r})

def answer_when_open(self, requests):
    while gate.exists():
        Path({entered!r}).touch()
        time.sleep(0.01)
    return answer(self, requests)

Engine.answer = answer_when_open
"""


SLOW_START = """
import time
from pathlib import Path
while Path({gate!r}).exists():
    Path({gate!r} + ".reached").touch()
    time.sleep(0.01)
from serving.backend import TritonPythonModel
"""


def slow_start(bundle: Path, gate: Path) -> None:
    """Have a version's process start only when a file is gone. Until then it touches GATE.reached."""
    replace_model_py(bundle, SLOW_START.format(gate=str(gate)))


def replace_model_py(bundle: Path, text: str) -> None:
    """Change what a published version runs, and have its manifest agree."""
    (bundle / MODEL).write_text(text)
    manifest = json.loads((bundle / MANIFEST).read_text())
    digest = digest_file(bundle / MODEL)
    manifest["files"][MODEL] = {"size_bytes": digest.size_bytes, "sha256": digest.sha256}
    (bundle / MANIFEST).write_text(json.dumps(manifest))


def gate_of(bundle: Path) -> Path:
    """The file that holds a gated version; beside the repository, which is the server's."""
    repository = bundle.parent.parent
    return repository.with_name(f"{repository.name}.{bundle.parent.name}.gate")


def entered(bundle: Path) -> Path:
    """The file that says that a held version was asked for an answer."""
    gate = gate_of(bundle)
    return gate.with_name(f"{gate.name}.entered")


def add_gate(bundle: Path) -> None:
    """Make a version answer only while `held` does not hold it. (Suspending its process makes Triton give it up.)"""
    replace_model_py(bundle, GATE.format(gate=str(gate_of(bundle)), entered=str(entered(bundle))))


@contextmanager
def gate_closed(bundle: Path) -> Iterator[None]:
    """A gated version that answers nothing inside the block: what is sent meanwhile waits."""
    gate = gate_of(bundle)
    entered(bundle).unlink(missing_ok=True)
    gate.touch()
    try:
        yield
    finally:
        gate.unlink()


def wait_for_pending(server: "Server | Running", model: str, least: int) -> None:
    """Until this many requests wait for a model, beside those that are with it."""
    deadline = time.monotonic() + 60
    while _sum(page(server, "/metrics"), "nv_inference_pending_request_count", model=model) < least:
        assert time.monotonic() < deadline, f"{least} requests did not come"
        time.sleep(0.05)


def wait_for_execution(bundle: Path) -> None:
    """Until a request that was sent to a held version is with the model, not in its queue."""
    deadline = time.monotonic() + 60
    while not entered(bundle).exists():
        assert time.monotonic() < deadline, "no request came"
        time.sleep(0.01)


def raw_request(
    server: Server,
    values: npt.NDArray[Any],
    lengths: npt.NDArray[Any],
    features: str | int | None = None,
    model: str = "mixed",
) -> npt.NDArray[Any]:
    """A request as any KServe client may send it: no check of ours before the server's."""
    inputs = []
    for name, array in (("values", values), ("lengths", lengths)):
        tensor = triton.InferInput(name, list(array.shape), DTYPES[str(array.dtype)])
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    with triton.InferenceServerClient(server.grpc) as client:
        parameters = None if features is None else {"features": features}
        result = client.infer(model, inputs, client_timeout=30, parameters=parameters)
        answer: npt.NDArray[Any] = result.as_numpy("embeddings")
        return answer


def row(*numbers: int, dtype: type[np.integer[Any]] = np.int64) -> npt.NDArray[Any]:
    return np.array([numbers], dtype)


def lens(*numbers: int) -> npt.NDArray[Any]:
    return row(*numbers, dtype=np.int32)


def tbe_serve(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command to its end. Its calls may take their time, if `arguments` do not say how long.

    Most run in this process: to start Python and import what they need takes longer than they do.
    """
    if arguments[0] in CALLING and "--timeout-s" not in arguments:
        arguments += ("--timeout-s", str(PATIENT_S))
    if arguments[0] not in APART:
        done = CliRunner().invoke(app, arguments, stdin, catch_exceptions=False)
        return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, done.stderr)
    command = [sys.executable, "-m", "serving", *arguments]
    environment = os.environ | {"COLUMNS": "200"}
    return subprocess.run(
        command, input=stdin, capture_output=True, text=True, timeout=120, check=False, env=environment
    )


def refused_run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """What `tbe-serve run` says of what it refuses before it starts a server, in this process."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        done = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["run", *arguments], catch_exceptions=False)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, done.stderr)


def start_tbe_serve(*arguments: str, within: tuple[str, ...] = (), first: str = "") -> subprocess.Popen[str]:
    """Start `tbe-serve run`, as what the command `within` executes. Its process runs the Python `first` before."""
    check_routers(Path(arguments[0]))
    program = f"{first}\nimport runpy; runpy.run_module('serving', run_name='__main__', alter_sys=True)"
    command = [*within, sys.executable, *(["-c", program] if first else ["-m", "serving"]), "run", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def hurried(module: str, times: int = 4) -> str:
    """What has a module of `serving.server` take a second for `times` seconds, as `first` of `running`."""
    return (
        f"import time, types\nfrom serving.server import {module}\nstart = time.monotonic()\n{module}.time = "
        f"types.SimpleNamespace(monotonic=lambda: start + {times} * (time.monotonic() - start), sleep=time.sleep)"
    )


def read_only(folder: Path) -> tuple[str, ...]:
    """The command within which nobody can write to a folder, not even root."""
    mount = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && ! touch "$0/x" 2>/dev/null && exec "$@"'
    return ("unshare", "--mount", *(() if os.getuid() == 0 else ("--map-root-user",)), "sh", "-c", mount, str(folder))


def wait_for_answer(client: LookupClient) -> None:
    """Until the model answers again. Triton may lose a request to a model that died: then another is sent."""
    waits_s = chain((1.0, 2.0, 4.0, 8.0), repeat(16.0))
    until_answered(lambda request: client.lookup(request, timeout_s=next(waits_s)), {"x": [[1]]})


def until_answered(ask: Callable[[Asked], Answer], request: Asked) -> Answer:
    """The answer, as soon as there is one."""
    deadline = time.monotonic() + 120
    while True:
        try:
            return ask(request)
        except ServingError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


@dataclass(frozen=True)
class Running:
    """`tbe-serve run`, ready; with the gRPC addresses of its hosts, by number, where it has `--local-hosts`."""

    process: "subprocess.Popen[str]"
    grpc: str
    http: str | None
    operations: str
    hosts: tuple[str, ...]

    @property
    def triton(self) -> psutil.Process:
        """Its tritonserver."""
        return tritonserver_of(self.process)


def lose(server: Server) -> None:
    """Kill all processes of a server that nobody supervises, as if its machine were gone."""
    os.killpg(server.process.pid, signal.SIGKILL)
    server.wait()


@contextmanager
def supervised(server: Server) -> Iterator[None]:
    """Start a server anew that dies inside the block, which ends with it."""
    supervisor = Supervisor(server, True)
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(supervisor.wait)
        try:
            yield
        finally:
            supervisor.stop(signal.SIGTERM)
            ended.result()


def apart() -> tuple[str, ...]:
    """The command within which there is another network, of which a process has addresses of its own."""
    mine = () if os.getuid() == 0 else ("--user", "--map-root-user")
    return ("unshare", "--net", *mine, "sh", "-c", 'ip link set lo up && exec "$0" "$@"')


@contextmanager
def running(
    repository: Path | str, *options: str, within: tuple[str, ...] = (), first: str = ""
) -> Iterator[Running]:
    """`tbe-serve run`, until the end of the block; on free ports, unless `options` name others."""
    pairs = zip(FREE_PORTS[::2], FREE_PORTS[1::2], strict=True)
    free = [word for option, port in pairs if option not in options for word in (option, port)]
    with start_tbe_serve(str(repository), *free, "--json", *options, within=within, first=first) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            line = process.stdout.readline()
            assert line, f"it did not start: {process.stderr.read()}"
            said = json.loads(line)
            hosts = tuple(host["grpc"] for host in said.get("hosts", ()))
            yield Running(process, said["grpc"], said["http"], said["operations"], hosts)
        finally:
            process.terminate()
            process.wait()


def tritonserver_of(process: subprocess.Popen[str]) -> psutil.Process:
    """The server that `tbe-serve run` started. It may have started a delta writer, too."""
    (server,) = tritonservers_of(process)
    return server


def tritonservers_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """All servers of `tbe-serve run`, of which there are two while certificates are renewed."""
    processes = []
    for child in psutil.Process(process.pid).children():
        with suppress(psutil.NoSuchProcess):  # it may end meanwhile
            if child.name() == "tritonserver":
                processes.append(child)
    return processes
