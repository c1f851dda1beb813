"""What moves between ranks, where every rank also receives an equal part of the samples."""

import numpy as np
import numpy.typing as npt

from export.plan_report import ID_BYTES, LENGTH_BYTES, SUM_BYTES, WEIGHT_BYTES
from export.sharding import Sharding
from serving.bundle import Manifest
from serving.plan import ShardingType


def traffic_between(manifest: Manifest, sharding: Sharding) -> npt.NDArray[np.float64]:
    """Bytes from each rank to each other for one batch of `sharding.batch_size` samples [W, W].

    A rank sends the ids, lengths and weights of its samples to the ranks that hold their rows, on average over ids
    spread evenly over rows, and gets FP32 sums back. What stays on a rank is not counted, so a table that every rank
    has a copy of moves nothing.
    """
    plan = manifest.plan
    ranks = len(plan.ranks)
    moved = np.zeros((ranks, ranks))
    samples = sharding.batch_size / ranks
    id_bytes = ID_BYTES + (WEIGHT_BYTES if manifest.weighted else 0)
    for table in manifest.tables:
        if plan.sharding[table.name] is ShardingType.DATA_PARALLEL:
            continue
        readers = sum(feature.table == table.name for feature in manifest.features)
        ids = samples * sum(sharding.pooling_factors_of(table.name, readers))
        for shard in plan.shards_by_table[table.name]:
            moved[:, shard.rank] += ids * shard.height / table.rows * id_bytes + readers * samples * LENGTH_BYTES
            moved[shard.rank, :] += readers * samples * shard.width * SUM_BYTES
    np.fill_diagonal(moved, 0)
    return moved
