"""The bytes that requests move to and from the shards of a plan."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from export.plan.sharding import Sharding
from serving.bundle.manifest import Manifest
from serving.bundle.plan import Shard
from serving.bundle.tables import OutputDtype, Table

# Bytes that travel: for an id, a bag's length, an id's weight, and an element of a sum.
ID_BYTES = 8
LENGTH_BYTES = 8
WEIGHT_BYTES = 4
SUM_BYTES = 4
# The same of a request to a host: INT32, where no shard of the host has more rows.
HOST_ID_BYTES = 4
HOST_LENGTH_BYTES = 4
_HOST_SUM_BYTES = {OutputDtype.FP32: 4, OutputDtype.FP16: 2}
_MOST_INT32_ROWS = 2**31 - 1

ALL_TO_ALL = "all-to-all"
REDUCE_SCATTER = "reduce-scatter"


class HostTraffic(NamedTuple):
    """The bytes of tensors that travel between a router and a host, by table. What gRPC adds is not counted.

    Attributes:
        to_host: ids, lengths and weights.
        to_router: partial sums.
    """

    to_host: dict[str, float]
    to_router: dict[str, float]


def shard_traffic(manifest: Manifest, sharding: Sharding, samples: float) -> Iterator[tuple[Shard, float, float]]:
    """The traffic of each shard that answers; copies of a table that do not answer move nothing.

    Args:
        manifest: tables, features and plan.
        sharding: how many ids a bag has. Ids are taken to be spread evenly over rows.
        samples: the samples that are looked up, in all features.

    Yields:
        A shard; the bytes of ids, lengths and weights that it is sent; the bytes of FP32 sums that it answers with.
    """
    id_bytes = ID_BYTES + (WEIGHT_BYTES if manifest.weighted else 0)
    for table, shard, ids, bags in _asked(manifest, sharding, samples):
        yield shard, ids * shard.height / table.rows * id_bytes + bags * LENGTH_BYTES, bags * shard.width * SUM_BYTES


def host_traffic(
    manifest: Manifest, sharding: Sharding, samples: float, sums_dtype: OutputDtype = OutputDtype.FP32
) -> dict[int, HostTraffic]:
    """The traffic between a router and each of its hosts. What the router holds does not travel.

    A host gets one call, with a segment for each feature and shard: `values` INT32 (INT64 where a shard has 2³¹ rows
    or more), `lengths` INT32 [segments, B], `weights` FP32 if the host holds a weighted table. It answers
    `sums_dtype` [B, columns of the segments].

    Args:
        manifest: a router's tables, features and plan.
        sharding: how many ids a bag has, as given or as measured. Ids are taken to be spread evenly over rows.
        samples: the samples of the request, B.
        sums_dtype: dtype of the partial sums that hosts answer.

    Returns:
        By the number of the host; nothing for a plan without a router.
    """
    rank_of_host = manifest.plan.rank_of_host
    held: dict[int, list[tuple[Table, Shard, float, float]]] = {number: [] for number in rank_of_host.values()}
    for asked in _asked(manifest, sharding.measured(manifest.features), samples):
        held.get(asked[1].rank, []).append(asked)
    return {host: _host_traffic(held[rank], _HOST_SUM_BYTES[sums_dtype]) for host, rank in rank_of_host.items()}


def _host_traffic(held: Sequence[tuple[Table, Shard, float, float]], sum_bytes: int) -> HostTraffic:
    """The traffic of a host, from what `_asked` yields of its shards. An element of a sum takes `sum_bytes`."""
    is_long = any(shard.height > _MOST_INT32_ROWS for _, shard, _, _ in held)
    is_weighted = any(table.weighted for table, _, _, _ in held)
    id_bytes = HOST_ID_BYTES * (2 if is_long else 1) + (WEIGHT_BYTES if is_weighted else 0)
    to_host: dict[str, float] = {}
    to_router: dict[str, float] = {}
    for table, shard, ids, bags in held:
        sent = ids * shard.height / table.rows * id_bytes + bags * HOST_LENGTH_BYTES
        to_host[table.name] = to_host.get(table.name, 0) + sent
        to_router[table.name] = to_router.get(table.name, 0) + bags * shard.width * sum_bytes
    return HostTraffic(to_host, to_router)


def _asked(manifest: Manifest, sharding: Sharding, samples: float) -> Iterator[tuple[Table, Shard, float, float]]:
    """Each shard that answers, behind its table; and the ids and bags that a request has for the whole table."""
    pieces = manifest.plan.pieces_by_table
    for table in manifest.tables:
        readers = sum(feature.table == table.name for feature in manifest.features)
        ids = samples * sum(sharding.pooling_factors_of(table.name, readers))
        for shard in pieces[table.name]:
            yield table, shard, ids, ids if table.is_sequence else readers * samples


def sums_pattern(shards: Sequence[Shard]) -> str:
    """How the sums of a table come together, in TorchRec's words.

    Returns:
        `REDUCE_SCATTER`: blocks of rows are on several ranks, whose sums are added. Otherwise `ALL_TO_ALL`: each rank
        answers whole columns.
    """
    ranks: Mapping[tuple[int, int], set[int]] = {shard.columns: set() for shard in shards}
    for shard in shards:
        ranks[shard.columns].add(shard.rank)
    return REDUCE_SCATTER if any(len(each) > 1 for each in ranks.values()) else ALL_TO_ALL
