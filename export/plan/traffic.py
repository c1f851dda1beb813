"""The bytes that requests move to and from the shards of a plan."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from export.plan.sharding import Sharding
from serving.bundle.manifest import Manifest
from serving.bundle.plan import Shard
from serving.bundle.tables import OutputDtype, Table

# Bytes in a request or an answer: of an id, of a bag's length, of a per-id weight, and of an element of a sum.
ID_BYTES = 8
LENGTH_BYTES = 8
WEIGHT_BYTES = 4
SUM_BYTES = 4
# Bytes of an id in a request to a host: INT32, unless a shard of the host has more rows.
HOST_ID_BYTES = 4
HOST_LENGTH_BYTES = 4
_HOST_SUM_BYTES = {OutputDtype.FP32: 4, OutputDtype.FP16: 2}
_MOST_INT32_ROWS = 2**31 - 1

ALL_TO_ALL = "all-to-all"
REDUCE_SCATTER = "reduce-scatter"


class HostTraffic(NamedTuple):
    """The bytes of tensors between a router and a host, by table. What gRPC adds is not counted.

    Attributes:
        to_host: bytes of ids, lengths and per-id weights.
        to_router: bytes of partial sums.
    """

    to_host: dict[str, float]
    to_router: dict[str, float]


def shard_traffic(manifest: Manifest, sharding: Sharding, samples: float) -> Iterator[tuple[Shard, float, float]]:
    """The traffic of each shard that is looked up. Further copies of a table have none.

    Args:
        manifest: tables, features and plan.
        sharding: has the pooling factors. Ids are assumed to be spread evenly over rows.
        samples: the samples that are looked up, in all features.

    Yields:
        A shard, the bytes of ids, lengths and per-id weights that it gets, and the bytes of FP32 sums that it sends.
    """
    id_bytes = ID_BYTES + (WEIGHT_BYTES if manifest.weighted else 0)
    for table, shard, ids, bags in _lookups(manifest, sharding, samples):
        yield (
            shard,
            ids * shard.row_count / table.rows * id_bytes + bags * LENGTH_BYTES,
            bags * shard.width * SUM_BYTES,
        )


def host_traffic(
    manifest: Manifest, sharding: Sharding, samples: float, sums_dtype: OutputDtype = OutputDtype.FP32
) -> dict[int, HostTraffic]:
    """The traffic between a router and each of its hosts. The router's own tables have none.

    A host gets one call, with a segment for each feature and shard: `values` INT32 (INT64 where a shard has 2³¹ rows
    or more), `lengths` INT32 [segments, B], `weights` FP32 if the host holds a weighted table. It answers
    `sums_dtype` [B, columns of the segments].

    Args:
        manifest: a router's tables, features and plan.
        sharding: has the pooling factors, as given or as measured. Ids are assumed to be spread evenly over rows.
        samples: B of the request.
        sums_dtype: dtype of the hosts' partial sums.

    Returns:
        By the number of the host. Empty for a plan without a router.
    """
    rank_of_host = manifest.plan.rank_of_host
    lookups_of_rank: dict[int, list[tuple[Table, Shard, float, float]]] = {
        number: [] for number in rank_of_host.values()
    }
    for lookup in _lookups(manifest, sharding.measured(manifest.features), samples):
        lookups_of_rank.get(lookup[1].rank, []).append(lookup)
    return {
        host: _host_traffic(lookups_of_rank[rank], _HOST_SUM_BYTES[sums_dtype]) for host, rank in rank_of_host.items()
    }


def _host_traffic(lookups: Sequence[tuple[Table, Shard, float, float]], sum_bytes: int) -> HostTraffic:
    """The traffic of a host: of what `_lookups` yields for its shards. An element of a sum takes `sum_bytes`."""
    is_long = any(shard.row_count > _MOST_INT32_ROWS for _, shard, _, _ in lookups)
    is_weighted = any(table.weighted for table, _, _, _ in lookups)
    id_bytes = HOST_ID_BYTES * (2 if is_long else 1) + (WEIGHT_BYTES if is_weighted else 0)
    to_host: dict[str, float] = {}
    to_router: dict[str, float] = {}
    for table, shard, ids, bags in lookups:
        sent = ids * shard.row_count / table.rows * id_bytes + bags * HOST_LENGTH_BYTES
        to_host[table.name] = to_host.get(table.name, 0) + sent
        to_router[table.name] = to_router.get(table.name, 0) + bags * shard.width * sum_bytes
    return HostTraffic(to_host, to_router)


def _lookups(manifest: Manifest, sharding: Sharding, samples: float) -> Iterator[tuple[Table, Shard, float, float]]:
    """Each shard that is looked up, with its table, and the numbers of ids and bags in a request for the table."""
    pieces = manifest.plan.pieces_by_table
    for table in manifest.tables:
        readers = sum(feature.table == table.name for feature in manifest.features)
        ids = samples * sum(sharding.pooling_factors_of(table.name, readers))
        for shard in pieces[table.name]:
            yield table, shard, ids, ids if table.is_sequence else readers * samples


def sums_pattern(shards: Sequence[Shard]) -> str:
    """How the partial sums of a table are merged, in TorchRec's words.

    Returns:
        `REDUCE_SCATTER`: blocks of rows are on several ranks, and their sums are added. `ALL_TO_ALL`: each rank
        answers whole columns.
    """
    ranks: Mapping[tuple[int, int], set[int]] = {shard.columns: set() for shard in shards}
    for shard in shards:
        ranks[shard.columns].add(shard.rank)
    return REDUCE_SCATTER if any(len(ranks_of_shard) > 1 for ranks_of_shard in ranks.values()) else ALL_TO_ALL
