"""The bytes that requests move to and from the shards of a plan."""

from collections.abc import Iterator

from export.plan.sharding import Sharding
from serving.bundle.manifest import Manifest
from serving.bundle.plan import Shard

# Bytes that travel: for an id, a bag's length, an id's weight, and an element of a sum.
ID_BYTES = 8
LENGTH_BYTES = 8
WEIGHT_BYTES = 4
SUM_BYTES = 4


def shard_traffic(manifest: Manifest, sharding: Sharding, samples: float) -> Iterator[tuple[Shard, float, float]]:
    """The traffic of each shard that answers; copies of a table that do not answer move nothing.

    Args:
        manifest: tables, features and plan.
        sharding: how many ids a bag has. Ids are taken to be spread evenly over rows.
        samples: the samples that are looked up, in all features.

    Yields:
        A shard; the bytes of ids, lengths and weights that it is sent; the bytes of FP32 sums that it answers with.
    """
    pieces = manifest.plan.pieces_by_table
    id_bytes = ID_BYTES + (WEIGHT_BYTES if manifest.weighted else 0)
    for table in manifest.tables:
        readers = sum(feature.table == table.name for feature in manifest.features)
        ids = samples * sum(sharding.pooling_factors_of(table.name, readers))
        for shard in pieces[table.name]:
            bytes_in = ids * shard.height / table.rows * id_bytes + readers * samples * LENGTH_BYTES
            yield shard, bytes_in, readers * samples * shard.width * SUM_BYTES
