"""Bytes that move between ranks, where every rank also takes requests: an equal part of the samples."""

import numpy as np
import numpy.typing as npt

from export.plan.sharding import Sharding
from export.plan.traffic import shard_traffic
from serving.bundle.manifest import Manifest
from serving.bundle.plan import ShardingType


def traffic_between(manifest: Manifest, sharding: Sharding) -> npt.NDArray[np.float64]:
    """Bytes from each rank to each other for one batch of `sharding.batch_size` samples.

    A rank sends the ids, lengths and weights of its samples to the ranks that hold the rows, and gets FP32 sums back.
    Ids are taken to be spread evenly over rows. Bytes that stay on a rank are not counted: a table with a copy on
    every rank moves nothing.

    Returns:
        float64 [W, W]; element (r, s) is sent from rank r to rank s.
    """
    ranks = len(manifest.plan.ranks)
    moved = np.zeros((ranks, ranks))
    for shard, bytes_in, bytes_out in shard_traffic(manifest, sharding, sharding.batch_size / ranks):
        if manifest.plan.sharding[shard.table] is not ShardingType.DATA_PARALLEL:
            moved[:, shard.rank] += bytes_in
            moved[shard.rank, :] += bytes_out
    np.fill_diagonal(moved, 0)
    return moved
