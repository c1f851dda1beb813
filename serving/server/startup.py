"""Wait until a started tritonserver is ready, and load the versions that are pinned."""

import shlex
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

from serving.errors import ServingError, TritonserverFailed
from serving.files import is_utf8
from serving.model.config_file import Pins, has_python, other_models
from serving.server.running_server import ServedModel, Server
from serving.server.shared_memory import is_open
from serving.server.versions import switch
from serving.triton.command_line import erase_from_command_line, is_plain, loaded_by, model_options
from serving.triton.control import UNIX
from serving.triton.installation import oldest_secure, triton_release

_POLL_S = 0.05
# The deadline of a call to the control API, in seconds.
CONTROL_TIMEOUT_S = 5.0


class _Killed(TritonserverFailed):
    """A signal ended the tritonserver."""


def make_ready(server: Server, models: Sequence[str], pins: Pins, timeout_s: float) -> None:
    """Wait until `models`, which tritonserver loads at its start, are ready. Then load `pins`.

    Triton 2.51 sometimes aborts while it loads models on a busy machine, because its locks have a deadline of one
    second. It is started once more then.

    Raises:
        TritonserverFailed: tritonserver ended, or its models were not ready in time.
    """
    again = []
    try:
        _wait_until_ready(server, models, timeout_s)
    except _Killed as error:
        server.restart(model_options(models))
        _wait_until_ready(server, models, timeout_s)
        again.append(f"{error}; it was started once more")
    is_erased = erase_from_command_line(server.process, server.key, has_started=True)
    _load_pinned(server, pins, timeout_s)
    server.models = _ready_models(server) or ()
    server.health.server_problem = None
    if server.port_handover is not None and not server.port_handover.can_direct_to(server.process.pid):
        server.port_handover.close()
        server.port_handover = None
    server.warnings = (*again, *_warnings(server, is_erased))


def _warnings(server: Server, is_erased: bool) -> Iterator[str]:
    triton = server.control(CONTROL_TIMEOUT_S).server_version()
    if not triton_release(triton).is_secure:
        secure = oldest_secure()
        yield (
            f"tritonserver {triton} lacks security fixes: allow access from this machine only, or run "
            f"{'.'.join(map(str, secure.version))} ({secure.container}) or later"
        )
    if is_open(server.regions):
        yield "users of this machine can read requests and rows in /dev/shm: a sandbox forbids seccomp(2) here"
    if server.health.tls is not None and (server.port_handover is None or not server.certificates):
        yield "a renewed certificate is served after the next start: HTTP is on, or a sandbox forbids to share a port"
    if server.drain_s and server.port_handover is None:
        yield (
            "--drain-s: new connections cannot be refused, since a sandbox forbids to share a port: a client that "
            "connects again while the server drains may lose calls"
        )
    repository, options = Path(server.run_file.repository), server.launch.command
    yield from left_out(repository, server.private is not None, options)
    if not triton_release(triton).has_numpy_2:
        yield from misread_numpy_2(repository, options)
    if not is_erased:
        yield "the key to what the server keeps closed can be read in its command line by users of this machine"


def left_out(repository: Path, is_signed: bool, options: Sequence[str]) -> Iterator[str]:
    """A line that names the models of a repository that are not loaded because tbe-export did not make them.

    Args:
        repository: the model repository.
        is_signed: only signed bundles are served.
        options: the options of tritonserver, which may load such models.
    """
    loaded = loaded_by(options)
    unserved = [name for name in other_models(repository) if name not in loaded and "*" not in loaded]
    if not unserved:
        return
    unservable = [
        name for name in unserved if not is_utf8(name) or (not is_plain(name) and has_python(repository / name))
    ]
    how = []
    if is_signed:
        how.append("with --trusted-keys only signed bundles are served: serve them by another tritonserver")
    elif named := [name for name in unserved if name not in unservable]:
        options = shlex.join(model_options(named))
        how.append(f"to serve them too: tbe-serve run {shlex.quote(str(repository))} -- {options}")
    if unservable:
        how.append(
            "Triton accepts only UTF-8 names, and no blanks or shell characters in names of Python models: "
            f"rename {', '.join(unservable)}"
        )
    yield f"not served, because tbe-export did not make them: {', '.join(unserved)}; {'; '.join(how)}"


def misread_numpy_2(repository: Path, options: Sequence[str]) -> Iterator[str]:
    """A line that names the Python models that tbe-export did not make, beside numpy 2 and a stub built for numpy 1.

    Args:
        repository: the model repository.
        options: the options of tritonserver, which load such models.
    """
    loaded = loaded_by(options)
    models = [name for name in other_models(repository) if loaded & {name, "*"} and has_python(repository / name)]
    numpy = version("numpy")
    if models and int(numpy.partition(".")[0]) >= 2:
        yield (
            f"{', '.join(models)}: Triton's Python backend was built for numpy 1, and numpy {numpy} is installed: "
            "as_numpy() returns wrong numbers, and Tensor(name, array) is empty: use to_dlpack() and from_dlpack() "
            "in model.py, or `pip install 'numpy<2'`"
        )


def _wait_until_ready(server: Server, models: Sequence[str], timeout_s: float) -> None:
    """Wait until the server listens on all its ports, and `models` are ready."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if (code := server.process.poll()) is not None:
            reason = server.child.output.reason()
            failure = _Killed if code < 0 else TritonserverFailed
            raise failure(f"tritonserver exited with {code} before its models were ready: {reason}")
        ready = _ready_models(server)
        if ready is not None and {model.name for model in ready} >= set(models) and _has_metrics(server):
            return
        time.sleep(_POLL_S)
    reason = server.child.output.reason()
    raise TritonserverFailed(f"tritonserver: {', '.join(models)} not ready within {timeout_s:g} s: {reason}")


def _has_metrics(server: Server) -> bool:
    """Whether the metrics can be read. Triton opens their port last, when models may already be ready."""
    return Path(server.metrics_address.removeprefix(UNIX)).exists()


def _load_pinned(server: Server, pins: Pins, timeout_s: float) -> None:
    """Load these versions. A model with an empty list gets the versions that config.pbtxt names."""
    for model, versions in pins.items():
        try:
            switch(
                server.control(timeout_s),
                model,
                versions,
                private=server.private,
                repository=server.repository,
                hosts=server.run_file.hosts.get(model),
            )
        except ServingError as error:
            what = f" {', '.join(map(str, versions))}" if versions else ""
            raise TritonserverFailed(f"{model}: cannot serve{what}: {error}") from error


def _ready_models(server: Server) -> tuple[ServedModel, ...] | None:
    """The models with a ready version, or None while the server starts."""
    try:
        index = server.control(CONTROL_TIMEOUT_S).index()
    except ServingError:
        return None
    versions: dict[str, list[int]] = {}
    for entry in index:
        if entry.state == "READY":
            versions.setdefault(entry.model, []).append(entry.version)
    return tuple(ServedModel(name, tuple(sorted(numbers))) for name, numbers in sorted(versions.items()))
