"""The pages that are asked for are those that rows lie in: found again by reading the files' bytes around them."""

import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from export import ExportConfig, Sharding, WeightDtype, export_model
from serving.bundle import open_bundle
from serving.engine import Engine
from serving.requests.accept import accept
from serving.requests.batches import Batch
from serving.requests.encoding import encode
from serving.requests.merge import merge_all
from serving.requests.validate import validate
from serving.tables import memory_budget
from serving.tables.pages import cached
from serving.tables.read_ahead import ReadAhead
from tests.support.long_cases import one_in
from tests.support.models import Spec, collection

SPECS = (
    Spec("a", 3000, 64, "SUM", ("x", "y")),
    Spec("b", 70, 3000, "MEAN", ("z",)),
    Spec("c", 900, 8, "SUM", ("w",)),
)
FEATURES = {"x": [[1, 2999], []], "y": [[5], [1500]], "z": [[69], [0, 33]], "w": [[899, 7], [450]]}
# Rows that are read: of each table.
ROWS = {"a": [1, 2999, 5, 1500], "b": [69, 0, 33], "c": [899, 7, 450]}
SHARDED = {
    "one rank": Sharding(),
    "row-wise": Sharding(ranks=2, types={"*": "row_wise"}),
    "column-wise": Sharding(ranks=2, types={"*": "column_wise"}),
    "grid": Sharding(ranks=4, ranks_per_host=2, types={"*": "grid_shard"}),
    "copies": Sharding(ranks=2, types={"*": "data_parallel"}),
}


def batch_of(engine: Engine, features: dict[str, list[list[int]]]) -> Batch:
    (batch,) = merge_all(engine.schema, validate([accept(engine.schema, encode(features, ()))]))
    return batch


@pytest.mark.parametrize("how", one_in(2, SHARDED))
@pytest.mark.parametrize("dtype", [WeightDtype.FP32, WeightDtype.INT4])
def test_exactly_the_pages_of_the_rows_are_requested(how: str, dtype: WeightDtype, tmp_path: Path) -> None:
    config = ExportConfig(dtype={"*": dtype}, sharding=SHARDED[how])
    bundle = open_bundle(export_model(collection(SPECS), tmp_path / "r", "m", config))
    expected = set()
    for shard in (piece for pieces in bundle.manifest.plan.pieces_by_table.values() for piece in pieces):
        table = next(table for table in bundle.manifest.tables if table.name == shard.table)
        size = table.dtype.row_bytes(shard.columns[1] - shard.columns[0])
        for row in ROWS[shard.table]:
            if shard.rows[0] <= row < shard.rows[1]:
                start = shard.offset_bytes + (row - shard.rows[0]) * size
                name = bundle.manifest.plan.ranks[shard.rank].weights_file
                expected |= {(name, number // mmap.PAGESIZE) for number in range(start, start + size)}
    with Engine.open(bundle.path) as engine:
        batch = batch_of(engine, FEATURES)
        files = {name: bundle.path / name for name in bundle.manifest.weights_files}
        ahead = ReadAhead(bundle.manifest, files)
        by_file = ahead.pages_of(batch)
        names = {Path(f"/proc/self/fd/{file}").readlink().name: pages for file, pages in by_file.items()}
        assert {(name, page) for name, pages in names.items() for page in pages.tolist()} == expected
        assert ahead.pages_of(batch_of(engine, {"x": [[], []]})) == {}
        assert ReadAhead(bundle.manifest, {}).pages_of(batch) == {}


def test_a_bundle_larger_than_memory_is_read_ahead_with_equal_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = export_model(collection((Spec("t", 200_000, 64, "SUM", ("x",)),)), tmp_path / "r", "m")
    with Engine.open(path) as engine:
        expected = engine.lookup({"x": [[3, 199_999], [100_000]]})["x"]
    monkeypatch.setattr(memory_budget, "memory_limit", lambda: 1000)
    advised: list[tuple[int, int, int]] = []
    fadvise = os.posix_fadvise

    def watched(file: int, start: int, size: int, advice: int) -> None:
        advised.append((start, size, advice))
        fadvise(file, start, size, advice)

    with Engine.open(path) as engine:
        file = path / "weights.0.bin"
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        monkeypatch.setattr(os, "posix_fadvise", watched)
        np.testing.assert_array_equal(engine.lookup({"x": [[3, 199_999], [100_000]]})["x"], expected)
        pages = {row * 68 // 4096 * 4096 for row in (3, 100_000, 199_999)}
        assert {call[0] for call in advised} >= pages
        assert {call[1:] for call in advised} == {(mmap.PAGESIZE, os.POSIX_FADV_WILLNEED)}
        # Of what is brought into memory whole nothing is asked for.
        advised.clear()
        ahead = engine.table_files.ahead
        assert ahead is not None
        ahead.leave_out(file.name, 100_000 * 68 + 1)
        np.testing.assert_array_equal(engine.lookup({"x": [[3, 199_999], [100_000]]})["x"], expected)
        assert {call[0] for call in advised} == {199_999 * 68 // 4096 * 4096}
        resident = cached(file)
        assert resident is None or resident.size < 100 * mmap.PAGESIZE
