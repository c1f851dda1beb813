"""Live copies without a server, their readers, and rows that show whether they are torn: every element is a number."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torchrec import EmbeddingBagCollection

from export import ExportConfig, Sharding, WeightDtype, export_model, publish_delta
from export.publish.changes import StoredRows
from export.publish.lineage import Lineage
from serving.bundle.delta import ChangedRows
from serving.bundle.lineage import deltas_folder
from serving.log import LogFormat, close_log, server_log
from serving.model.settings import ServingSettings
from serving.server.delta_service import AppliedDeltas, DeltaService
from tests.support.models import Spec, collection

PATIENCE_S = 60.0
# Of deltas that change nothing: seconds between two, and the most rows of one.
_PERIOD_S, _MOST_ROWS = 0.05, 1000


def published(
    folder: Path,
    rows: int,
    dim: int,
    dtype: WeightDtype,
    sharding: Sharding | None = None,
    signing_key: Path | None = None,
) -> Path:
    """The bundle of a model with the table `t`, to be served live by two instances."""
    config = ExportConfig(
        dtype={"t": dtype},
        sharding=sharding or Sharding(),
        serving=ServingSettings(weights_memory="live", instances=2),
    )
    model = collection((Spec("t", rows, dim, "SUM", ("x",)),))
    return export_model(model, folder / "r", "m", config, signing_key=signing_key)


def publish_number(bundle: Path, number: int, ids: Sequence[int], dim: int) -> None:
    """A delta of the bundle's model whose rows have that number in every element."""
    rows = np.full((len(ids), dim), number, np.float32)
    publish_delta(bundle.parent.parent, bundle.parent.name, {"t": (ids, rows)}, version=int(bundle.name))


def changed_rows(
    module: EmbeddingBagCollection, random: np.random.Generator, how_many: Callable[[int], int]
) -> dict[str, tuple[npt.NDArray[np.int64], torch.Tensor]]:
    """Change some rows of each table of a module, of how many it has, as training does; as `publish_delta` takes them."""
    changed = {}
    with torch.no_grad():
        for name, bags in module.embedding_bags.items():
            ids = random.permutation(bags.num_embeddings)[: how_many(bags.num_embeddings)]
            changed[name] = ids, torch.randn(ids.size, bags.embedding_dim)
            bags.weight[torch.from_numpy(ids)] = changed[name][1]
    return changed


@contextmanager
def changing_nothing(bundle: Path) -> Iterator[None]:
    """In the block, publish deltas all the time whose rows are those that are stored: no answer changes."""
    lineage = Lineage.of(bundle.parent.parent, bundle.parent.name, int(bundle.name), None)
    current = StoredRows(lineage.bundle)
    stored = {
        table.name: current.rows(table, 0, table.rows)
        for table in lineage.bundle.manifest.tables
        if table.id_map is None
    }
    stopping, failed = threading.Event(), []

    def publish() -> None:
        random = np.random.default_rng(0)
        try:
            while not stopping.wait(_PERIOD_S):
                name = random.choice(sorted(stored))
                most = min(len(stored[name]), _MOST_ROWS)
                ids = np.sort(random.choice(len(stored[name]), random.integers(1, most + 1), replace=False))
                lineage.publish({name: ChangedRows(ids, stored[name][ids])}, None)
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()
    assert not failed, failed


@contextmanager
def applying(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, form: LogFormat = LogFormat.TEXT
) -> Iterator[DeltaService]:
    """Keep a delta writer for the engines of this process and its children, as a server does."""
    log = server_log(bundle.parent.parent.parent / "delta_writer.log", form)
    copies = DeltaService(deltas_folder(bundle.parent.parent), {}, log)
    for name, value in copies.environment.items():
        monkeypatch.setenv(name, value)
    with copies.running():
        yield copies
    close_log(log)


def wait_until(copies: DeltaService, holds: Callable[[AppliedDeltas], bool]) -> AppliedDeltas:
    """What the only copy is at, once that holds."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        for copy in filter(holds, copies.applied):
            return copy
        time.sleep(0.01)
    raise AssertionError(copies.applied)


def wait_until_applied(copies: DeltaService, sequence: int) -> AppliedDeltas:
    """What the only copy is at, once that delta is applied."""
    return wait_until(copies, lambda copy: copy.sequence >= sequence)


def readers(bundle: Path, rows: int, last: int, count: int) -> list["subprocess.Popen[str]"]:
    """Processes that read all rows until the number `last` is in them, each ready to."""
    command = [sys.executable, "-m", "tests.support.row_reader", bundle, rows, last]
    started = [
        subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, text=True, env=os.environ)
        for _ in range(count)
    ]
    for process in started:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    return started


def seen_by(reader: "subprocess.Popen[str]") -> Mapping[str, Any]:
    """What a reader saw."""
    out, _ = reader.communicate(timeout=PATIENCE_S)
    report: Mapping[str, Any] = json.loads(out.splitlines()[-1])
    return report
