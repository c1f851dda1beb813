"""Rows that deltas change all the time: by the thousand, and while the delta writer and models' processes are killed.

Every element of a row shows the number of the delta that changed it last. So a reader sees whether a row is torn, older
than before, or not there yet.
"""

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import numpy.typing as npt
import psutil

from export import ExportConfig, Sharding, WeightDtype, export_model, publish_delta
from serving.client import LookupClient
from serving.errors import ServingError
from serving.model.settings import ServingSettings
from tests.faults.fresh_reader import FEATURES, READ, ROUND, all_rows, read_until_stopped
from tests.faults.tools import PATIENCE_S
from tests.support.hosts import export_hosts
from tests.support.models import Spec, collection
from tests.support.servers import Running, running, stubs

_PERIOD_S = 0.03
# tritonserver dies of some kills of a model's process, too, and `tbe-serve run` bears five deaths within ten minutes.
_MOST_MODELS_KILLED = 4
SIZES = {"int8": (200, 64), "columns": (100, 32), "rows": (100, 16), "int4": (100, 32), "int2": (100, 32)}
SPECS = tuple(Spec(name, *size, "SUM", (FEATURES[name],)) for name, size in SIZES.items())
_DTYPES = {
    "columns": WeightDtype.FP16,
    "rows": WeightDtype.FP32,
    "int4": WeightDtype.INT4,
    "int2": WeightDtype.INT2,
}
_TYPES = {"int8": "table_wise", "columns": "column_wise", "rows": "row_wise", "int4": "data_parallel"}
_SERVING = ServingSettings(weights_memory="live", instances=2)
CONFIG = ExportConfig(dtype=_DTYPES, sharding=Sharding(ranks=2, types=_TYPES), serving=_SERVING)
# Columns that lie on several hosts may be of two deltas for a moment, as docs/fresh-rows.md says.
ON_HOSTS = ExportConfig(
    dtype=_DTYPES,
    sharding=Sharding(ranks=2, ranks_per_host=1, types={"int8": "row_wise", "rows": "row_wise"}),
    serving=_SERVING,
)


@dataclass
class Seen:
    """Figures of what was read. `late` rows had not the number of their last delta in the end."""

    deltas: int = 0
    killed: dict[str, int] = field(default_factory=lambda: {"delta_writer": 0, "model": 0})
    reads: int = 0
    refused: int = 0
    torn: int = 0
    backwards: int = 0
    too_new: int = 0
    late: int = 0

    def line(self) -> str:
        """All in one."""
        killed = ", ".join(f"{what} {times} times" for what, times in self.killed.items())
        return (
            f"{self.deltas:,} deltas while {self.reads:,} lookups read all rows, killed: {killed}: {self.torn} rows "
            f"torn, {self.backwards} older than before, {self.too_new} from nowhere, {self.late} late in the end; "
            f"{self.refused:,} lookups refused"
        )


def changed(folder: Path, seconds: float, seed: int = 0) -> Seen:
    """Publish, read and kill for so many seconds, and compare the end."""
    bundle = export_model(collection(SPECS), folder / "r", "m", CONFIG)
    random = np.random.default_rng(seed)
    published = _Published(bundle, random)
    with running(folder / "r") as server, _reading(server.grpc, "m", published, 3):
        end, next_kill = time.monotonic() + seconds, time.monotonic() + 1.0
        while time.monotonic() < end:
            published.publish()
            if time.monotonic() > next_kill:
                _kill(server, published.result, random)
                next_kill = time.monotonic() + 1.5
            time.sleep(_PERIOD_S)
        published.wait(server.grpc, "m")
    return published.result


def hammered(folder: Path, deltas: int, *, on_hosts: bool) -> Seen:
    """So many deltas, one after another, while eight clients read: of one server, or of a router and its hosts."""
    if on_hosts:
        bundle = export_hosts(folder, collection(SPECS), ON_HOSTS)
    else:
        bundle = export_model(collection(SPECS), folder / "r", "m", CONFIG)
    model = bundle.parent.name
    published = _Published(bundle, np.random.default_rng(0))
    options = ["--local-hosts"] if on_hosts else []
    with running(folder / "r", *options) as server, _reading(server.grpc, model, published, 8):
        while published.result.deltas < deltas:
            published.publish()
        published.wait(server.grpc, model)
    return published.result


class _Published:
    """What is published."""

    def __init__(self, bundle: Path, random: np.random.Generator) -> None:
        self.result = Seen()
        # The number of deltas that are published, or are just being.
        self.newest = multiprocessing.get_context("spawn").Value("q", 0)
        self._bundle, self._random = bundle, random
        self._numbers = {spec.name: np.ones(spec.rows) for spec in SPECS}
        self._write({spec.name: np.arange(spec.rows) for spec in SPECS})

    def publish(self) -> None:
        """Change some rows of a table."""
        spec = SPECS[self._random.integers(len(SPECS))]
        ids = np.sort(self._random.choice(spec.rows, self._random.integers(1, spec.rows), replace=False))
        self._write({spec.name: ids})

    def _write(self, ids: dict[str, npt.NDArray[np.int64]]) -> None:
        self.result.deltas += 1
        self.newest.value = self.result.deltas
        number = self.result.deltas % ROUND
        dims = {spec.name: spec.dim for spec in SPECS}
        rows = {name: (value, np.full((value.size, dims[name]), number, np.float32)) for name, value in ids.items()}
        for name, value in ids.items():
            self._numbers[name][value] = number
        publish_delta(self._bundle.parent.parent, self._bundle.parent.name, rows)

    def wait(self, url: str, model: str) -> None:
        """Until all rows have the number of their last delta; some time at most."""
        deadline = time.monotonic() + PATIENCE_S
        with LookupClient(url, model, 10) as client:
            while (late := self._late(client)) and time.monotonic() < deadline:
                time.sleep(0.1)
        self.result.late = late

    def _late(self, client: LookupClient) -> int:
        try:
            rows_by_table = all_rows(client)
        except ServingError:
            return 1
        return sum(
            int((rows != self._numbers[name][:READ, np.newaxis]).any(axis=1).sum())
            for name, rows in rows_by_table.items()
        )


@contextmanager
def _reading(url: str, model: str, published: _Published, clients: int) -> Iterator[None]:
    """Clients that look at all rows all the time, in the block; in a process of their own."""
    context = multiprocessing.get_context("spawn")
    ready, stopped, figures = context.Event(), context.Event(), context.Queue()
    process = context.Process(
        target=read_until_stopped, args=(url, model, published.newest, clients, ready, stopped, figures)
    )
    process.start()
    assert ready.wait(PATIENCE_S)
    try:
        yield
    finally:
        stopped.set()
        for name, number in figures.get(timeout=PATIENCE_S).items():
            setattr(published.result, name, number)
        process.join()


def _is_ready(server: Running) -> bool:
    with suppress(OSError), urlopen(f"{server.operations}/readyz", timeout=PATIENCE_S):
        return True
    return False


def _kill(server: Running, result: Seen, random: np.random.Generator) -> None:
    kinds = ["delta_writer", "model"] if result.killed["model"] < _MOST_MODELS_KILLED else ["delta_writer"]
    what = random.choice([*kinds, *["delta_writer"] * 4])
    if what == "model" and not _is_ready(server):  # a model that dies while reloading is given up
        return
    with suppress(psutil.Error, ValueError):  # it has just ended, or is started
        if what == "model":
            for stub in stubs(server.triton, "m")[:1]:
                stub.kill()
                result.killed[what] += 1
        else:
            for child in psutil.Process(server.process.pid).children():
                if "serving.tables.delta_writer" in child.cmdline():
                    child.kill()
                    result.killed[what] += 1
