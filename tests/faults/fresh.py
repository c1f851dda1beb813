"""Rows that deltas change all the time, while the applier and models' processes are killed.

Every element of a row is the number of the delta that changed it last. So a reader sees whether a row is torn, older
than before, or not there yet.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import psutil

from export import ExportConfig, Sharding, WeightDtype, export_model, publish_delta
from serving.client import LookupClient
from serving.errors import ServingError
from serving.model.settings import ServingSettings
from tests.faults.tools import PATIENCE_S
from tests.support.models import Spec, collection
from tests.support.servers import Running, running, stubs

# FP16 holds every number up to 2,048, and a scale of 0 every row of equal numbers.
_MOST_DELTAS = 2000
_PERIOD_S, _READERS = 0.03, 3
# tritonserver dies of some kills of a model's process, too, and `tbe-serve run` bears five deaths within ten minutes.
_MOST_MODELS_KILLED = 4
SPECS = (
    Spec("int8", 200, 64, "SUM", ("x",)),
    Spec("columns", 100, 32, "SUM", ("y",)),
    Spec("rows", 100, 16, "SUM", ("z",)),
)
CONFIG = ExportConfig(
    dtype={"columns": WeightDtype.FP16, "rows": WeightDtype.FP32},
    sharding=Sharding(ranks=2, types={"int8": "table_wise", "columns": "column_wise", "rows": "row_wise"}),
    serving=ServingSettings(weights_memory="live", instances=2),
)


@dataclass
class Seen:
    """Figures of `changed`. `late` rows had not the number of their last delta in the end."""

    deltas: int = 0
    killed: dict[str, int] = field(default_factory=dict)
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
            f"{self.deltas} deltas while {self.reads:,} lookups read all rows, killed: {killed}: {self.torn} rows torn, "
            f"{self.backwards} older than before, {self.too_new} from nowhere, {self.late} late in the end; "
            f"{self.refused} lookups refused"
        )


def changed(folder: Path, seconds: float, seed: int = 0) -> Seen:
    """Publish, read and kill for so many seconds, and compare the end."""
    bundle = export_model(collection(SPECS), folder / "r", "m", CONFIG)
    seen, random = Seen(killed={"applier": 0, "model": 0}), np.random.default_rng(seed)
    numbers = {spec.name: np.ones(spec.rows) for spec in SPECS}
    _publish(bundle, {spec.name: np.arange(spec.rows) for spec in SPECS}, 1)
    seen.deltas = 1
    with running(folder / "r") as server, _reading(server.grpc, seen):
        end, next_kill = time.monotonic() + seconds, time.monotonic() + 1.0
        while time.monotonic() < end and seen.deltas < _MOST_DELTAS:
            spec = SPECS[random.integers(len(SPECS))]
            ids = np.sort(random.choice(spec.rows, random.integers(1, spec.rows), replace=False))
            seen.deltas += 1
            numbers[spec.name][ids] = seen.deltas
            _publish(bundle, {spec.name: ids}, seen.deltas)
            if time.monotonic() > next_kill:
                _kill(server, seen, random)
                next_kill = time.monotonic() + 1.5
            time.sleep(_PERIOD_S)
        deadline = time.monotonic() + PATIENCE_S
        with LookupClient(server.grpc, "m", 10) as client:
            while (late := _late(client, numbers)) and time.monotonic() < deadline:
                time.sleep(0.1)
        seen.late = late
    return seen


def _publish(bundle: Path, ids: dict[str, npt.NDArray[np.int64]], number: int) -> None:
    dims = {spec.name: spec.dim for spec in SPECS}
    rows = {name: (each, np.full((each.size, dims[name]), number, np.float32)) for name, each in ids.items()}
    publish_delta(bundle.parent.parent, bundle.parent.name, rows)


def _all_rows(client: LookupClient) -> dict[str, npt.NDArray[np.float32]]:
    """The first 100 rows of each table."""
    found = client.lookup({spec.features[0]: np.arange(100).reshape(-1, 1) for spec in SPECS})
    return {spec.name: np.asarray(found[spec.features[0]], np.float32) for spec in SPECS}


def _late(client: LookupClient, numbers: dict[str, npt.NDArray[np.float64]]) -> int:
    try:
        found = _all_rows(client)
    except ServingError:
        return 1
    return sum(int((rows != numbers[name][:100, np.newaxis]).any(axis=1).sum()) for name, rows in found.items())


@contextmanager
def _reading(url: str, seen: Seen) -> Iterator[None]:
    """Readers that look at all rows all the time, in the block."""
    stopped, one_at_a_time = threading.Event(), threading.Lock()

    def read() -> None:
        before = {spec.name: np.zeros(100, np.float32) for spec in SPECS}
        with LookupClient(url, "m", 2) as client:
            while not stopped.wait(0.01):
                try:
                    found = _all_rows(client)
                except ServingError:
                    with one_at_a_time:
                        seen.refused += 1
                    continue
                newest = seen.deltas
                with one_at_a_time:
                    seen.reads += 1
                    for name, rows in found.items():
                        seen.torn += int((rows != rows[:, :1]).any(axis=1).sum())
                        seen.backwards += int((rows[:, 0] < before[name]).sum())
                        seen.too_new += int((rows[:, 0] > newest).sum())
                before = {name: rows[:, 0] for name, rows in found.items()}

    threads = [threading.Thread(target=read) for _ in range(_READERS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stopped.set()
        for thread in threads:
            thread.join()


def _kill(server: Running, seen: Seen, random: np.random.Generator) -> None:
    kinds = ["applier", "model"] if seen.killed["model"] < _MOST_MODELS_KILLED else ["applier"]
    what = random.choice([*kinds, *["applier"] * 4])
    with suppress(psutil.Error, ValueError):  # it has just ended, or is started
        if what == "model":
            for stub in stubs(server.triton, "m")[:1]:
                stub.kill()
                seen.killed[what] += 1
        else:
            for each in psutil.Process(server.process.pid).children():
                if "serving.tables.applier" in each.cmdline():
                    each.kill()
                    seen.killed[what] += 1
