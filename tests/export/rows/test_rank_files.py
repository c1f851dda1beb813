"""Weights files: rows one after another, whatever blocks they were read in."""

import errno
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from export import ExportConfig, Sharding, export_model
from export.errors import PublishError, QuantizeError
from export.rows import rank_files
from export.rows.quantize import quantize
from export.rows.rank_files import write_rows
from export.trained import checkpoint
from serving.bundle.load import open_bundle
from serving.bundle.plan import Shard
from tests.support.folder_contents import files
from tests.support.models import Spec, collection, int8_table


def test_rows_are_packed_at_alignment_1(tmp_path: Path) -> None:
    bundle = export_model(collection((Spec("t", 1000, 64, "SUM", ("x",)),)), tmp_path / "r", "m")
    assert (bundle / "weights.0.bin").stat().st_size == 1000 * 68


def test_blocks_do_not_change_the_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = export_model(collection(), tmp_path / "r", "m")
    monkeypatch.setattr(checkpoint, "_BLOCK_BYTES", 1000)
    blocks = export_model(collection(), tmp_path / "r", "m")
    assert (whole / "weights.0.bin").read_bytes() == (blocks / "weights.0.bin").read_bytes()
    parity = [open_bundle(bundle).manifest.parity for bundle in (whole, blocks)]
    for one, other in zip(*parity, strict=True):
        for name in ("largest", "worst_row"):
            assert getattr(one.quantized, name) == getattr(other.quantized, name)
        for name in ("mean", "cosine"):
            assert getattr(one.quantized, name) == pytest.approx(getattr(other.quantized, name))
        assert msgspec.structs.replace(one, quantized=other.quantized) == other


def test_sums_do_not_depend_on_which_thread_makes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MKL's sums of squares differ by its number of threads, which each thread has for itself."""
    numbers = torch.randn(24_000, generator=torch.Generator().manual_seed(0))
    store, sums = rank_files._store_block, set()

    def store_block(*arguments: Any) -> Any:
        sums.add(float(torch.dot(numbers, numbers)))
        return store(*arguments)

    monkeypatch.setattr(rank_files, "_store_block", store_block)
    export_model(collection(), tmp_path / "r", "m")
    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        assert sums == {pool.submit(lambda: float(torch.dot(numbers, numbers))).result()}


def test_a_disk_that_is_full_half_way_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_BLOCK_BYTES", 3000)
    write, writes_left = os.pwrite, iter(range(20))

    def full(file: int, data: memoryview, offset: int) -> int:
        if next(writes_left, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(PublishError, match="the draft cannot be written: No space left on device: make room beside"):
        export_model(collection(), tmp_path / "r", "m")
    assert files(tmp_path) == {}
    assert [path.name for path in tmp_path.iterdir()] == ["r"]


def test_first_bad_row_is_named_with_any_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of the next table are begun before the last of a table is done."""
    monkeypatch.setattr(checkpoint, "_BLOCK_BYTES", 3000)
    module = collection()
    with torch.no_grad():
        module.embedding_bags["user"].weight[490, 0] = float("nan")
        module.embedding_bags["item"].weight[3, 0] = float("nan")

    def slowly(table: str, start: int, *arguments: Any) -> torch.Tensor:
        if table == "user":
            time.sleep(0.02)
        return quantize(table, start, *arguments)

    monkeypatch.setattr(rank_files, "quantize", slowly)
    with pytest.raises(QuantizeError, match="table 'user': row 490 holds NaN"):
        export_model(module, tmp_path / "r", "m")


@pytest.mark.parametrize("kind", ["row_wise", "column_wise", "grid_shard"])
def test_blocks_do_not_change_the_bytes_of_shards(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 100 rows, which cuts of shards divide and do not divide."""
    config = ExportConfig(sharding=Sharding(ranks=4, ranks_per_host=2, types={"*": kind}))
    module = collection((Spec("t", 400, 16, "SUM", ("x",)), Spec("u", 230, 16, "SUM", ("y",))))
    whole = export_model(module, tmp_path / "r", "m", config)
    monkeypatch.setattr(checkpoint, "_BLOCK_BYTES", 100 * 16 * 4)
    blocks = export_model(module, tmp_path / "r", "m", config)
    names = open_bundle(whole).manifest.weights_files
    assert len(names) == 4
    for name in names:
        assert (whole / name).read_bytes() == (blocks / name).read_bytes()


def test_a_disk_that_takes_a_part_gets_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = export_model(collection(), tmp_path / "r", "m")
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: write(file, data[:700], offset))
    parts = export_model(collection(), tmp_path / "r", "m")
    assert (whole / "weights.0.bin").read_bytes() == (parts / "weights.0.bin").read_bytes()


def test_rows_over_the_end_of_a_shard_go_to_the_next(tmp_path: Path) -> None:
    table = int8_table("t", 10, 4)
    stored = quantize("t", 0, torch.randn(10, 4, generator=torch.Generator().manual_seed(0)), table.dtype).numpy()
    shards = [
        Shard(table="t", rank=0, rows=rows, columns=(0, 4), offset_bytes=8 * rows[0]) for rows in ((6, 10), (0, 6))
    ]
    with (tmp_path / "w").open("w+b") as file:
        for start, stop in ((4, 8), (8, 10), (0, 4)):
            write_rows({0: file.fileno()}, table, shards, start, stored[start:stop])
    assert (tmp_path / "w").read_bytes() == stored.tobytes()
    with (tmp_path / "w").open("w+b") as file:
        write_rows({0: file.fileno()}, table, shards[1:], 4, stored[4:8])
    assert (tmp_path / "w").read_bytes() == bytes(32) + stored[4:6].tobytes()
