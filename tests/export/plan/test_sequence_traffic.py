"""What a request moves between a router and its hosts for rows that are not pooled: by hand, and as a router counts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from export import ExportConfig, OutputDtype, Sharding
from export.pipeline import plan_model
from export.plan.report import report_plan
from export.plan.traffic import HostTraffic, host_traffic
from serving.bundle.load import open_bundle
from serving.engine import Engine
from tests.support.hosts import export_hosts, fleet
from tests.support.long_cases import one_in
from tests.support.models import Spec, collection
from tests.support.sequence_models import FP32, sequences

SAMPLES, IDS = 10, 20
POOLED = (Spec("user", 100, 16, "SUM", ("u",)),)
# `film` has two features, of as many ids each.
ROWS = (Spec("film", 100, 32, "NONE", ("seen", "liked")), Spec("shop", 100, 32, "NONE", ("visited",)))
POOLING = {"user": 4, "film": IDS, "shop": IDS}


class Histories(nn.Module):
    """One pooled table beside two that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.pooled, self.rows = collection(POOLED), sequences(ROWS)


def sharding_with(film: str) -> Sharding:
    """Two hosts, with `film` cut as told, and the other tables whole on one of them."""
    return Sharding(
        ranks=2,
        ranks_per_host=1,
        hosts_as_models=True,
        types={"*": "table_wise", "film": film},
        min_partition={"film": 16},
        pooling_factors=POOLING,
        batch_size=SAMPLES,
    )


def total(traffic: HostTraffic) -> tuple[float, float]:
    return sum(traffic.to_host.values()), sum(traffic.to_router.values())


@pytest.mark.parametrize(("sums", "item_bytes"), [(OutputDtype.FP32, 4), (OutputDtype.FP16, 2)])
def test_a_row_travels_for_each_id(sums: OutputDtype, item_bytes: int) -> None:
    """A pooled feature is answered by a row for each sample; one that is not, by one for each id."""
    sharding = sharding_with("table_wise")
    manifest = plan_model(Histories(), ExportConfig(sharding=sharding))
    to_host, to_router = dict[str, float](), dict[str, float]()
    for result in host_traffic(manifest, sharding, SAMPLES, sums).values():
        to_host |= result.to_host
        to_router |= result.to_router
    n = SAMPLES * IDS
    # The number of the row, and the length of a bag of one id.
    assert to_host == {"user": SAMPLES * (4 * 4 + 4), "film": 2 * n * (4 + 4), "shop": n * (4 + 4)}
    assert to_router == {
        "user": SAMPLES * 16 * item_bytes,
        "film": 2 * n * 32 * item_bytes,
        "shop": n * 32 * item_bytes,
    }
    report = report_plan(manifest, sharding, sums)
    assert {transfer.table: transfer.to_router_bytes for transfer in report.transfers} == to_router
    assert sum(rank.bytes_out for rank in report.ranks) == sum(to_router.values())


def test_hosts_of_row_wise_tables_get_all_lengths() -> None:
    """A host answers zeros for ids that another one has, and the router adds."""
    sharding = sharding_with("row_wise")
    result = host_traffic(plan_model(Histories(), ExportConfig(sharding=sharding)), sharding, SAMPLES)
    assert len(result) == 2
    for value in result.values():
        assert value.to_host["film"] == 2 * SAMPLES * IDS * (4 / 2 + 4)
        assert value.to_router["film"] == 2 * SAMPLES * IDS * 32 * 4


@pytest.mark.parametrize(
    ("film", "sums"),
    one_in(
        3,
        [
            pytest.param("row_wise", OutputDtype.FP16, id="rows-fp16"),
            pytest.param("table_wise", OutputDtype.FP32, id="whole"),
            pytest.param("column_wise", OutputDtype.FP32, id="columns"),
        ],
    ),
)
@pytest.mark.long
def test_a_router_receives_what_the_plan_says(tmp_path: Path, film: str, sums: OutputDtype) -> None:
    sharding = sharding_with(film)
    router = export_hosts(tmp_path, Histories(), replace(FP32, sharding=sharding, sums_dtype=sums))
    planned = host_traffic(open_bundle(router).manifest, sharding, SAMPLES, sums)
    # Every row of a table comes as often as any other.
    ids = [[(sample * IDS + index) % 100 for index in range(IDS)] for sample in range(SAMPLES)]
    bags: dict[str, Any] = {"u": [row_id[:4] for row_id in ids], "seen": ids, "liked": ids, "visited": ids}
    with fleet(tmp_path, router) as served, Engine.open(served.bundle, served.hosts) as engine:
        counts = engine.ranks.counts
        before = {host: (count.bytes_out, count.bytes_in, count.calls) for host, count in counts.items()}
        engine.lookup(bags)
        for host, count in counts.items():
            bytes_out, bytes_in, calls = before[host]
            to_host, to_router = total(planned[host])
            assert count.bytes_in - bytes_in == to_router
            # What gRPC's messages add to their tensors.
            assert 0 < count.bytes_out - bytes_out - to_host < 400 * (count.calls - calls)


def test_router_takes_tables_that_save_most_traffic() -> None:
    """As large as one another. 20 rows of a sample are 2,720 bytes; a sum of 30 is 252 bytes, where both are counted by
    bags, the sum would save more."""
    specs = (Spec("pooled", 1000, 32, "SUM", ("p",)),), (Spec("rows", 1000, 32, "NONE", ("r",)),)
    module = nn.ModuleList([collection(specs[0]), sequences(specs[1])])
    sharding = Sharding(
        ranks=2,
        ranks_per_host=1,
        hosts_as_models=True,
        router_bytes=50_000,
        memory_bytes=1 << 30,
        pooling_factors={"pooled": 30, "rows": 20},
    )
    plan = plan_model(module, ExportConfig(sharding=sharding)).plan
    assert {shard.table for shard in plan.shards if shard.rank == 0} == {"rows"}
