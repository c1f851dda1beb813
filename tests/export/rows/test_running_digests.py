"""Digests that are computed during the writes match the published files, however tables are cut."""

import hashlib
from collections import Counter
from pathlib import Path

import pytest
import torch

from export import ExportConfig, Sharding, WeightDtype, export_model
from export.errors import QuantizeError
from export.plan.sharding import CHOICES
from export.rows import rank_files
from export.rows.rank_files import RunningDigests
from export.trained import checkpoint
from serving.bundle.load import open_bundle
from serving.bundle.plan import path_of
from tests.support.models import collection

DTYPES = {"user": WeightDtype.INT8, "item": WeightDtype.FP32, "genre": WeightDtype.INT2, "word": WeightDtype.INT4}


def config_of(sharding: Sharding) -> ExportConfig:
    return ExportConfig(dtype=DTYPES, sharding=sharding)


def assert_digests_are_of_the_files(bundle: Path) -> None:
    for name, digest in open_bundle(bundle).manifest.files.items():
        content = (bundle / name).read_bytes()
        assert (digest.size_bytes, digest.sha256) == (len(content), hashlib.sha256(content).hexdigest()), name


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks of every table but the smallest, and several reads of a block."""
    monkeypatch.setattr(checkpoint, "_BLOCK_BYTES", 3000)
    monkeypatch.setattr(rank_files, "_READ_BYTES", 1000)


@pytest.mark.parametrize(("sharding_type", "ranks"), [(CHOICES[0], 1), *((choice, 4) for choice in CHOICES)])
def test_digests_are_of_the_published_files(tmp_path: Path, sharding_type: str, ranks: int) -> None:
    sharding = Sharding(ranks=ranks, ranks_per_host=ranks // 2 or None, types={"*": sharding_type})
    assert_digests_are_of_the_files(export_model(collection(), tmp_path / "r", "m", config_of(sharding)))


def test_digests_of_consecutive_column_shards(tmp_path: Path) -> None:
    """They are written at once: the first rows of the second block of columns long before it is its turn."""
    sharding = Sharding(ranks=2, types={"*": "column_wise"}, min_partition={"*": 8})
    bundle = export_model(collection(), tmp_path / "r", "m", config_of(sharding))
    shards = Counter((shard.table, shard.rank) for shard in open_bundle(bundle).manifest.plan.shards)
    assert max(shards.values()) > 1
    assert_digests_are_of_the_files(bundle)


def test_digests_of_hosts_are_those_of_the_published_files(tmp_path: Path) -> None:
    sharding = Sharding(
        ranks=3, ranks_per_host=1, memory_bytes=1 << 20, types={"*": "row_wise"}, hosts_as_models=True
    )
    router = export_model(collection(), tmp_path / "r", "m", config_of(sharding))
    assert_digests_are_of_the_files(router)
    hosts = open_bundle(router).manifest.hosts
    assert len(hosts) == 3
    for host in hosts:
        assert_digests_are_of_the_files(path_of(router, host))


def test_files_are_hashed_while_they_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stops: list[int] = []
    hash_to = RunningDigests._hash_to

    def watched(digests: RunningDigests, rank: int, stop: int) -> None:
        stops.append(stop)
        hash_to(digests, rank, stop)

    monkeypatch.setattr(RunningDigests, "_hash_to", watched)
    bundle = export_model(collection(), tmp_path / "r", "m")
    size = (bundle / "weights.0.bin").stat().st_size
    assert stops == sorted(stops)
    assert len(stops) > 10
    assert stops[-2:] == [size, size]  # nothing was left when all rows were stored


def test_a_failure_half_way_leaves_nothing(tmp_path: Path) -> None:
    module = collection()
    with torch.no_grad():
        module.embedding_bags["word"].weight[900, 2] = float("nan")
    with pytest.raises(QuantizeError, match="table 'word': row 900 holds NaN"):
        export_model(module, tmp_path / "r", "m")
    assert list((tmp_path / "r").iterdir()) == []
    assert [path.name for path in tmp_path.iterdir()] == ["r"]
