"""What a request moves between a router and its hosts, counted by hand."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from export import ExportConfig, Sharding
from export.hosts import part_manifest
from export.pipeline import plan_model
from export.plan.report import report_plan
from export.plan.traffic import HostTraffic, host_traffic, shard_traffic, sums_pattern
from serving.bundle.manifest import Manifest
from serving.bundle.plan import IdDtype, Shard
from serving.bundle.tables import OutputDtype
from serving.requests.captured import CapturedRequest
from tests.support.models import Spec, collection

SAMPLES = 10
# One feature of each table but `two`, which has two.
SPECS = (
    Spec("rows", 100, 16, "SUM", ("r",)),
    Spec("columns", 100, 32, "MEAN", ("c",)),
    Spec("whole", 100, 8, "SUM", ("w",)),
    Spec("two", 100, 12, "SUM", ("x", "y")),
    Spec("own", 100, 64, "SUM", ("o",)),
)
POOLING = {"rows": 8, "columns": 3, "whole": 5, "two": 2, "own": 100}
# Rows 0 to 25 and 25 to 100; columns 0 to 8 and 8 to 32.
PLAN: Any = {
    "ranks": [{"host": -1}, {"host": 0}, {"host": 1}],
    "tables": {
        "rows": ("row_wise", [(1, [0, 25], [0, 16]), (2, [25, 100], [0, 16])]),
        "columns": ("column_wise", [(1, [0, 100], [0, 8]), (2, [0, 100], [8, 32])]),
        "whole": ("table_wise", [(1, [0, 100], [0, 8])]),
        "two": ("table_wise", [(2, [0, 100], [0, 12])]),
        "own": ("table_wise", [(0, [0, 100], [0, 64])]),
    },
}


def sharding_by(tmp_path: Path, plan: Any = PLAN, **settings: Any) -> Sharding:
    tables = {
        name: {
            "sharding_type": kind,
            "shards": [{"rank": rank, "rows": rows, "columns": columns} for rank, rows, columns in shards],
        }
        for name, (kind, shards) in plan["tables"].items()
    }
    path = tmp_path / "plan.json"
    path.write_bytes(msgspec.json.encode({"ranks": plan["ranks"], "tables": tables}))
    return Sharding(plan=path, hosts_as_models=True, **({"pooling_factors": POOLING} | settings))


def manifest_of(sharding: Sharding, *, weighted: bool = False) -> Manifest:
    return plan_model(collection(SPECS, weighted=weighted), ExportConfig(sharding=sharding))


# By table: ids · 4 bytes + 4 bytes for the length of each bag; 4 bytes for each column of each bag.
EXPECTED = {
    0: HostTraffic(
        {"rows": 10 * 8 * 0.25 * 4 + 10 * 4, "columns": 10 * 3 * 4 + 10 * 4, "whole": 10 * 5 * 4 + 10 * 4},
        {"rows": 10 * 16 * 4, "columns": 10 * 8 * 4, "whole": 10 * 8 * 4},
    ),
    1: HostTraffic(
        {"rows": 10 * 8 * 0.75 * 4 + 10 * 4, "columns": 10 * 3 * 4 + 10 * 4, "two": 2 * (10 * 2 * 4 + 10 * 4)},
        {"rows": 10 * 16 * 4, "columns": 10 * 24 * 4, "two": 2 * 10 * 12 * 4},
    ),
}


def test_each_host_is_sent_ids_and_answers_sums(tmp_path: Path) -> None:
    sharding = sharding_by(tmp_path)
    assert host_traffic(manifest_of(sharding), sharding, SAMPLES) == EXPECTED


def test_weights_travel_with_each_id(tmp_path: Path) -> None:
    sharding = sharding_by(tmp_path)
    plain = host_traffic(manifest_of(sharding), sharding, SAMPLES)
    weighted = host_traffic(manifest_of(sharding, weighted=True), sharding, SAMPLES)
    assert weighted[0].to_router == plain[0].to_router
    assert weighted[0].to_host["rows"] - plain[0].to_host["rows"] == 10 * 8 * 0.25 * 4


def test_one_weighted_table_adds_weights_to_all_ids(tmp_path: Path) -> None:
    sharding = sharding_by(tmp_path)
    manifest = manifest_of(sharding)
    tables = [msgspec.structs.replace(table, weighted=table.name == "whole") for table in manifest.tables]
    result = host_traffic(msgspec.structs.replace(manifest, tables=tuple(tables)), sharding, SAMPLES)
    assert result[0].to_host["columns"] == 10 * 3 * 8 + 10 * 4
    assert result[1] == EXPECTED[1]


@pytest.mark.parametrize(("rows", "id_bytes"), [(2**31 - 1, 4), (2**31, 8)])
def test_row_numbers_beyond_int32_take_eight_bytes(tmp_path: Path, rows: int, id_bytes: int) -> None:
    sharding = sharding_by(tmp_path)
    manifest = manifest_of(sharding)
    tables = tuple(
        msgspec.structs.replace(table, rows=rows) if table.name == "whole" else table for table in manifest.tables
    )
    shards = tuple(
        msgspec.structs.replace(shard, rows=(0, rows)) if shard.table == "whole" else shard
        for shard in manifest.plan.shards
    )
    plan = msgspec.structs.replace(manifest.plan, shards=shards)
    result = host_traffic(msgspec.structs.replace(manifest, tables=tables, plan=plan), sharding, SAMPLES)
    assert result[0].to_host["columns"] == 10 * 3 * id_bytes + 10 * 4
    assert result[1] == EXPECTED[1]


def test_sums_in_fp16_take_half(tmp_path: Path) -> None:
    sharding = sharding_by(tmp_path, batch_size=SAMPLES)
    for host, result in host_traffic(manifest_of(sharding), sharding, SAMPLES, OutputDtype.FP16).items():
        assert result.to_host == EXPECTED[host].to_host
        assert result.to_router == {table: size / 2 for table, size in EXPECTED[host].to_router.items()}
    report = report_plan(manifest_of(sharding), sharding, OutputDtype.FP16)
    assert report.transfers[0].to_router_bytes == EXPECTED[0].to_router["rows"] / 2


def test_measured_pooling_factors_give_the_same_traffic_as_given_ones(tmp_path: Path) -> None:
    """10 samples of each feature: 8, 3, 5, 2, 2 and 100 ids in each bag."""
    sizes = [8, 3, 5, 2, 2, 100]
    lengths = [size for size in sizes for _ in range(10)]
    line = CapturedRequest(at="", why="slow: 9 ms", values=[0] * sum(lengths), lengths=lengths)
    (tmp_path / "captured.jsonl").write_bytes(msgspec.json.encode(line) + b"\n")
    sharding = sharding_by(tmp_path, pooling_factors={}, traffic=tmp_path / "captured.jsonl")
    assert host_traffic(manifest_of(sharding), sharding, SAMPLES) == EXPECTED


def test_the_report_shows_traffic_between_the_router_and_its_hosts(tmp_path: Path) -> None:
    sharding = sharding_by(tmp_path, batch_size=SAMPLES)
    report = report_plan(manifest_of(sharding), sharding)
    assert [(transfer.host, transfer.table, transfer.pattern) for transfer in report.transfers] == [
        (0, "rows", "reduce-scatter"),
        (0, "columns", "all-to-all"),
        (0, "whole", "all-to-all"),
        (1, "rows", "reduce-scatter"),
        (1, "columns", "all-to-all"),
        (1, "two", "all-to-all"),
    ]
    for transfer in report.transfers:
        result = EXPECTED[transfer.host]
        assert (transfer.to_host_bytes, transfer.to_router_bytes) == (
            result.to_host[transfer.table],
            result.to_router[transfer.table],
        )
    assert [(rank.bytes_in, rank.bytes_out) for rank in report.ranks] == [
        (0, 0),
        *((sum(value.to_host.values()), sum(value.to_router.values())) for value in EXPECTED.values()),
    ]
    assert report.names == ["router", "host 0", "host 1"]


def test_without_hosts_as_models_nothing_travels_to_hosts(tmp_path: Path) -> None:
    path = sharding_by(tmp_path).plan
    sharding = Sharding(plan=path, pooling_factors=POOLING, batch_size=SAMPLES)
    manifest = manifest_of(sharding)
    assert host_traffic(manifest, sharding, SAMPLES) == {}
    report = report_plan(manifest, sharding)
    assert (report.transfers, report.names, report.router_bytes) == ([], ["0", "1", "2"], None)
    assert report.ranks[0].bytes_out == 10 * 64 * 4  # of the ranks of one process, as ever


@pytest.mark.parametrize(
    ("shards", "pattern"),
    [
        pytest.param([(1, (0, 9), (0, 8))], "all-to-all", id="whole"),
        pytest.param([(1, (0, 9), (0, 4)), (2, (0, 9), (4, 8))], "all-to-all", id="columns"),
        pytest.param([(1, (0, 5), (0, 8)), (2, (5, 9), (0, 8))], "reduce-scatter", id="rows"),
        pytest.param([(0, (0, 5), (0, 8)), (1, (5, 9), (0, 8))], "reduce-scatter", id="rows-with-the-router"),
        pytest.param(
            [(1, (0, 5), (0, 4)), (1, (5, 9), (0, 4)), (1, (0, 5), (4, 8)), (2, (5, 9), (4, 8))],
            "reduce-scatter",
            id="rows-of-some-columns",
        ),
    ],
)
def test_sums_are_added_where_rows_are_cut_over_hosts(shards: Any, pattern: str) -> None:
    placed = [Shard(table="t", rank=rank, rows=r, columns=c, offset_bytes=0) for rank, r, c in shards]
    assert sums_pattern(placed) == pattern


def test_requests_and_answers_of_each_host_have_the_predicted_bytes(tmp_path: Path) -> None:
    sharding = sharding_by(tmp_path)
    router = manifest_of(sharding, weighted=True)
    for host, result in host_traffic(router, sharding, SAMPLES).items():
        part = part_manifest(router, host + 1, "m", OutputDtype.FP32)
        columns = sum(table.dim for table in part.feature_tables)
        assert sum(result.to_router.values()) == SAMPLES * columns * 4
        no_ids = Sharding(plan=sharding.plan, hosts_as_models=True, pooling_factors={"*": 0})
        lengths = sum(host_traffic(router, no_ids, SAMPLES)[host].to_host.values())
        assert lengths == SAMPLES * len(part.features) * 4
        assert (part.weighted, part.id_dtype) == (True, IdDtype.INT32)


@pytest.mark.parametrize("weighted", [False, True])
def test_a_shard_receives_its_part_of_the_ids_and_all_lengths(weighted: bool) -> None:
    """In one process ids and lengths are int64, weights and sums FP32. Ids are spread evenly over 100 rows."""
    sharding = Sharding(ranks=4, types={"*": "row_wise"}, pooling_factors={"*": 5.0})
    manifest = plan_model(
        collection((Spec("t", 100, 16, "SUM", ("a", "b")),), weighted=weighted), ExportConfig(sharding=sharding)
    )
    result = [*shard_traffic(manifest, sharding, 10)]
    assert len(result) == 4
    for shard, sent, answered in result:
        assert sent == 2 * 10 * 5 * shard.row_count / 100 * (12 if weighted else 8) + 2 * 10 * 8
        assert answered == 2 * 10 * 16 * 4
