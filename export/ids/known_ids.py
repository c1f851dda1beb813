"""The known ids of a managed collision module, and the rows that they read in eval."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from export.errors import CheckpointError
from export.trained.checkpoint import Checkpoint
from export.trained.managed_collision import HashZch, SortedIds
from export.trained.tables import TrainedTable
from serving.bundle.id_maps import HashedIds

Numbers = npt.NDArray[np.int64]

# MCHManagedCollisionModule's mark for a slot without an id. Sent as an id, it reads the row of the first such slot.
_NO_ID = 2**63 - 1
# HashZch's mark for a row without an id. Sent as an id, it reads such a row.
_EMPTY = -1


@dataclass(frozen=True, slots=True, eq=False)
class KnownIds:
    """The ids that read, or may read, another row than unknown ids.

    Attributes:
        ids: int64 [n], all different.
        rows: the row of each; int64 [n].
        count: the number of ids from training.
        hashed: how unknown ids are hashed to rows. None: they read the last row.
    """

    ids: Numbers
    rows: Numbers
    count: int
    hashed: HashedIds | None = None


def known_ids(table: TrainedTable, weights: Checkpoint) -> KnownIds:
    """The known ids of a table that has them.

    Raises:
        CheckpointError: they are missing, ambiguous, of another shape or dtype, or read rows outside the table.
    """
    if isinstance(table.id_map, SortedIds):
        return _mch_ids(table, table.id_map, weights)
    assert table.id_map is not None  # noqa: S101  it has a map
    return _hash_zch_ids(table, table.id_map, weights)


def _mch_ids(table: TrainedTable, state: SortedIds, weights: Checkpoint) -> KnownIds:
    """The known ids of MCH, as `_mch_remap` of torchrec 1.8 finds them: the first of equal ids counts."""
    raw_ids = weights.integers(f"raw ids of table {table.name!r}", state.raw_ids, table.rows)
    slots = weights.integers(f"rows of raw ids of table {table.name!r}", state.slots, table.rows)
    if slots.min() < 0 or slots.max() >= table.rows:
        raise CheckpointError(
            f"rows of raw ids of table {table.name!r}: expected them in [0, {table.rows}), got {slots.min()} to "
            f"{slots.max()}"
        )
    # Loading a module sorts its ids by a stable sort. In a checkpoint, each shard is sorted by itself.
    order = np.argsort(raw_ids, kind="stable")
    ids, firsts = np.unique(raw_ids[order], return_index=True)
    return KnownIds(ids, slots[order][firsts], int((ids != _NO_ID).sum()))


def _hash_zch_ids(table: TrainedTable, state: HashZch, weights: Checkpoint) -> KnownIds:
    """The known ids of HashZch, from FBGEMM's `zero_collision_hash`, which is called with every id in the table."""
    identities = weights.integers(f"identities of table {table.name!r}", state.identities, table.rows)
    buckets = len(state.bounds) - 1
    if weights.has(state.bucket_count):
        (trained_with,) = weights.integers(f"buckets of table {table.name!r}", state.bucket_count, 1).tolist()
        if trained_with != buckets:
            raise CheckpointError(
                f"table {table.name!r}: expected a checkpoint of {buckets} buckets, as the module has, got one of "
                f"{trained_with}: make the module with total_num_buckets={trained_with}"
            )
    bounds = np.array(state.bounds)
    hashed = HashedIds(bounds=state.bounds, divided=state.divided, input_hash_size=state.input_hash_size or None)
    ids = np.unique(_undivided(identities, np.repeat(np.arange(buckets), np.diff(bounds)), hashed))
    count = ids.size if hashed.block else int((identities != _EMPTY).sum())
    bucket_of_id, numbers = hashed.parts_of(ids)
    rows, _ = torch.ops.fbgemm.zero_collision_hash(
        input=torch.from_numpy(numbers),
        identities=torch.from_numpy(identities[:, np.newaxis]),
        max_probe=state.max_probe,
        circular_probe=True,
        readonly=True,
        local_sizes=torch.from_numpy(np.diff(bounds)[bucket_of_id]),
        offsets=torch.from_numpy(bounds[bucket_of_id]),
    )
    return KnownIds(ids, rows.numpy(), count, hashed)


def _undivided(identities: Numbers, buckets: Numbers, hashed: HashedIds) -> Numbers:
    """The ids of `identities`, int64 [rows], in the buckets `buckets`, int64 [rows].

    With an `input_hash_size`, identities that are no ids of their bucket, such as marks, are left out: no id finds
    them.
    """
    if hashed.block is None:
        return identities * hashed.buckets + buckets if hashed.divided else identities
    ids = identities + buckets * hashed.block if hashed.divided else identities
    valid: Numbers = ids[hashed.parts_of(ids)[0] == buckets]
    return valid
