"""Fresh rows: how soon a delta is served, what lookups pay for it, how many rows a second, and a start with many.

One table of INT8 rows of dim 64, served live by one instance. A process of its own asks for 16 samples of 20 ids, one
after another. Meanwhile 1 % of the rows a minute change, in a delta each second; each has a row whose numbers are the
delta's, which another client asks for until it is there. The same through a store, without lookups beside it.
"""

import json
import math
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

from benchmarks.measure import Result, ratio, ratio_of
from benchmarks.scores_model import dlrm_dcn
from export import ExportConfig, WeightDtype, export_model, export_next, publish_delta, squash
from export.trained.generated_checkpoint import generated_checkpoint
from export.trained.tables import collect_tables
from serving.bundle.lineage import deltas_folder
from serving.client import LookupClient
from serving.model.settings import ServingSettings
from serving.server import Ports, Server, run_server
from serving.tables.mutable_tables import LIVE_PREFIX
from tests.support.s3 import BUCKET, s3_server

NAME, TABLE, ROWS, DIM = "fresh", "item", 4_000_000, 64
PERIOD_S, SHARE_A_MINUTE = 1.0, 0.01
CHANGED = int(ROWS * SHARE_A_MINUTE / 60 * PERIOD_S)
# Seconds of lookups with deltas, and then without; and how often.
SECONDS, REPEATS = 15.0, 5
BULK_ROWS = 2_000_000
FILES = 1000
# Deltas through a store.
STORED = 40
SAMPLES, IDS = 16, 20
_FREE = Ports(grpc=0, http=0, operations=0)


def run(folder: Path) -> Iterator[Result]:
    """All of it, against one server; then a start beside many deltas."""
    repository = folder / "repository"
    module = _collection("meta")
    weights = generated_checkpoint(collect_tables(module).tables)
    config = ExportConfig(serving=ServingSettings(weights_memory="live"))
    export_model(module, repository, NAME, config, checkpoint=weights)
    yield from _through_a_store(repository, folder)
    deltas = _Deltas(repository)
    with run_server(repository, _FREE, log=folder / "log") as server:
        before = _private_bytes(server)
        yield from _under_load(server, deltas, _Deltas(repository, str(folder / "elsewhere")))
        yield from _bulk(server, deltas)
        yield from _memory(server, before)
    for _ in range(FILES):
        deltas.publish(CHANGED)
    yield Result(f"delta_start_beside_{FILES}_files_s", _start_s(repository, folder))
    began = time.monotonic()
    squash(repository, NAME)
    yield Result(f"delta_squash_of_{FILES}_files_s", time.monotonic() - began)
    yield Result("delta_start_squashed_s", _start_s(repository, folder))
    for path in deltas_folder(repository).rglob("*.safetensors"):
        path.unlink()
    yield Result("delta_start_without_s", _start_s(repository, folder))
    yield from _same_lineage(folder / "same lineage")


def _same_lineage(repository: Path) -> Iterator[Result]:
    """A dense part that was trained further, beside the rows of the version before: its export, and its bytes."""
    model = dlrm_dcn(_collection("cpu")).eval()
    config = ExportConfig(scores=True, serving=ServingSettings(weights_memory="live"))
    began = time.monotonic()
    first = export_model(model, repository, NAME, config)
    yield Result("delta_first_export_s", time.monotonic() - began)
    with torch.no_grad():
        for parameter in model.over_arch.parameters():
            parameter += 0.01
    began = time.monotonic()
    second = export_next(model, repository, NAME, config)
    yield Result("delta_same_lineage_export_s", time.monotonic() - began)
    yield Result("delta_version_bytes", _own_bytes(first) + _own_bytes(second, links=2))
    yield Result("delta_same_lineage_version_bytes", _own_bytes(second))


def _own_bytes(bundle: Path, links: int = 1) -> int:
    """The bytes of a version's files that have so many names on this disk."""
    return sum(status.st_size for status in map(Path.stat, bundle.iterdir()) if status.st_nlink == links)


def _collection(device: str) -> EmbeddingBagCollection:
    tables = [EmbeddingBagConfig(name=TABLE, num_embeddings=ROWS, embedding_dim=DIM, feature_names=["item_id"])]
    return EmbeddingBagCollection(tables=tables, device=torch.device(device))


def _start_s(repository: Path, folder: Path) -> float:
    began = time.monotonic()
    with run_server(repository, _FREE, log=folder / "log"):
        return time.monotonic() - began


def _through_a_store(repository: Path, folder: Path) -> Iterator[Result]:
    """From published to answered, where the server and the publisher, each with a cache of its own, share a store."""
    visible = []
    with s3_server(folder) as s3, ExitStack() as stack:
        before = {name: os.environ.get(name) for name in (*s3.environment, "XDG_CACHE_HOME")}
        stack.callback(_set, before)
        deltas = _Deltas(repository, f"s3://{BUCKET}/models.deltas")
        _set(s3.environment | {"XDG_CACHE_HOME": str(folder / "server")})
        server = stack.enter_context(run_server(repository, _FREE, deltas=deltas.url, log=folder / "log"))
        _set({"XDG_CACHE_HOME": str(folder / "publisher")})
        for _ in range(STORED):
            began = time.monotonic()
            deltas.publish(CHANGED)
            visible.append(_until_served(server.grpc, deltas.number))
            time.sleep(max(0.0, began + PERIOD_S - time.monotonic()))
    yield Result("delta_visible_through_a_store_p50_s", float(np.percentile(visible, 50)))
    yield Result("delta_visible_through_a_store_p99_s", float(np.percentile(visible, 99)))


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


class _Deltas:
    """Publishes deltas of random rows. Row 0 of each has the delta's number, which FP16 holds."""

    def __init__(self, repository: Path, url: str | None = None) -> None:
        self._repository = repository
        self.url = url
        self._random = np.random.default_rng(0)
        self.number = 0

    def publish(self, count: int) -> None:
        self.number += 1
        ids = np.concatenate(([0], np.unique(self._random.integers(1, ROWS, count))))
        rows = self._random.standard_normal((ids.size, DIM), np.float32)
        rows[0] = self.number
        publish_delta(self._repository, NAME, {TABLE: (ids, rows)}, deltas=self.url)


def _under_load(server: Server, deltas: _Deltas, elsewhere: _Deltas) -> Iterator[Result]:
    """In turn: deltas are applied; as many are published elsewhere, which takes cores as well; there are none."""
    visible: list[float] = []
    seconds: dict[str, list[Any]] = {"applied": [], "elsewhere": [], "without": []}
    for _ in range(REPEATS):
        for which, of_which in seconds.items():
            asking = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.fresh", server.grpc, f"{SECONDS}"],
                stdout=subprocess.PIPE,
                text=True,
            )
            assert asking.stdout is not None
            asking.stdout.readline()  # it has begun
            end = time.monotonic() + SECONDS - 1
            while which != "without" and time.monotonic() < end:
                began = time.monotonic()
                if which == "applied":
                    deltas.publish(CHANGED)
                    visible.append(_until_served(server.grpc, deltas.number))
                else:
                    elsewhere.publish(CHANGED)
                    _until_served(server.grpc, -1, float(np.median(visible)))
                time.sleep(max(0.0, began + PERIOD_S - time.monotonic()))
            out, _ = asking.communicate()
            of_which.append(np.array(json.loads(out)))
    yield Result("delta_visible_p50_s", float(np.percentile(visible, 50)))
    yield Result("delta_visible_p99_s", float(np.percentile(visible, 99)))
    for percent in (50, 99):
        for name in ("without", "elsewhere"):
            pairs = zip(seconds["applied"], seconds[name], strict=True)
            ratios = (float(np.percentile(a, percent) / np.percentile(b, percent)) for a, b in pairs)
            yield ratio_of(f"lookups_p{percent}_with_deltas_over_{name}", ratios)


def _until_served(url: str, number: int, most_s: float = math.inf) -> float:
    """Seconds until the row of a delta that was just published is answered; or `most_s`."""
    began = time.monotonic()
    with LookupClient(url, NAME, 10) as client:
        while client.lookup({"item_id": [[0]]})["item_id"][0, 0] != number and time.monotonic() - began < most_s:
            time.sleep(0.005)
        return time.monotonic() - began


def _bulk(server: Server, deltas: _Deltas) -> Iterator[Result]:
    deltas.publish(BULK_ROWS)
    began = time.monotonic()
    while _applied(server) < deltas.number:
        time.sleep(0.01)
    yield Result("delta_rows_per_s", BULK_ROWS / (time.monotonic() - began), unit="/s")


def _memory(server: Server, before: int) -> Iterator[Result]:
    """What the copy takes, beside the bytes of the rows; and what deltas left in the memory of all processes."""
    rows_bytes = ROWS * WeightDtype.INT8.row_bytes(DIM)
    (copy,) = {
        Path(file.path) for process in _processes(server) for file in process.memory_maps() if _is_copy(file.path)
    }
    yield ratio("live_copy_over_rows_bytes", copy.stat().st_blocks * 512 / rows_bytes)
    yield Result("live_private_bytes", before, unit="B")
    yield Result("live_private_bytes_of_deltas", _private_bytes(server) - before, unit="B")


def _is_copy(path: str) -> bool:
    return Path(path).name.startswith(LIVE_PREFIX)


def _private_bytes(server: Server) -> int:
    return sum(process.memory_full_info().uss for process in _processes(server))


def _processes(server: Server) -> list[psutil.Process]:
    """tritonserver, its models' processes, and the delta writer."""
    triton = psutil.Process(server.process.pid)
    children = psutil.Process().children()
    writers = [process for process in children if "serving.tables.delta_writer" in process.cmdline()]
    return [triton, *triton.children(recursive=True), *writers]


def _applied(server: Server) -> int:
    with urllib.request.urlopen(f"{server.operations}/metrics") as page:
        lines = page.read().decode().splitlines()
    return int(next(line for line in lines if line.startswith("tbe_delta_sequence{")).rpartition(" ")[2])


def main(url: str, seconds: str) -> None:
    """Ask for so many seconds, and print how long each lookup took, as JSON."""
    random = np.random.default_rng(threading.get_native_id())
    with LookupClient(url, NAME, 10) as client:
        ids = random.integers(0, ROWS, (SAMPLES, IDS))
        client.lookup({"item_id": ids})
        print("began", flush=True)
        steps, end = [], time.monotonic() + float(seconds)
        while (began := time.monotonic()) < end:
            client.lookup({"item_id": random.integers(0, ROWS, (SAMPLES, IDS))})
            steps.append(time.monotonic() - began)
    print(json.dumps(steps))


if __name__ == "__main__":
    main(*sys.argv[1:])
