"""The rows that raw ids should read: a map gone through entry by entry. Shares no code with what looks up."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from serving.bundle.id_maps import ID_MAPS_FILE, IdMap
from serving.bundle.tables import Table
from serving.requests.types import Ids, Tensors

_64_BITS = 2**64 - 1


def rows_of_known(directory: Path, id_map: IdMap, request: Tensors) -> dict[int, int]:
    """The rows of the ids of a request that a map knows. All of its entries are looked through; no id is hashed."""
    request_ids = np.unique(request.values.astype(np.int64, copy=False))
    shape = (id_map.capacity, 2)
    stored = np.memmap(directory / ID_MAPS_FILE, np.int64, mode="r", offset=id_map.entries_offset, shape=shape)
    is_requested = np.searchsorted(request_ids, stored[:, 0]) < np.searchsorted(
        request_ids, stored[:, 0], side="right"
    )
    return dict(stored[is_requested & (stored[:, 1] >= 0)].tolist())


def remapped(table: Table, id_map: IdMap, known_rows: Mapping[int, int], ids: Ids) -> Ids:
    """The row that each raw id of a table reads: int64 [n]."""
    rows = (known_rows[id_] if id_ in known_rows else _row_of_other(table, id_map, id_) for id_ in ids.tolist())
    return np.fromiter(rows, np.int64, ids.size)


def _row_of_other(table: Table, id_map: IdMap, id_: int) -> int:
    """The row that an unknown id reads: the last one, or the row of its hash, as FBGEMM's
    `zero_collision_hash` computes it."""
    if id_map.hashed is None:
        return table.rows - 1
    bounds, buckets = id_map.hashed.bounds, len(id_map.hashed.bounds) - 1
    bucket, quotient = id_ % buckets, id_ // buckets
    if (size := id_map.hashed.input_hash_size) is not None:
        bucket, quotient = divmod(id_, (size + buckets - 1) // buckets)
    hashed = _murmur3(quotient if id_map.hashed.divided else id_)
    return bounds[bucket] + hashed % (bounds[bucket + 1] - bounds[bucket])


def _murmur3(number: int) -> int:
    """FBGEMM's `murmur_hash3_2x64(number, 0, 0)`, in whole numbers."""

    def rotated(x: int, bits: int) -> int:
        return (x << bits | x >> 64 - bits) & _64_BITS

    def finished(x: int) -> int:
        for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
            x = (x ^ x >> 33) * factor & _64_BITS
        return x ^ x >> 33

    one = rotated((number & _64_BITS) * 0x87C37B91114253D5 & _64_BITS, 31) * 0x4CF5AD432745937F & _64_BITS
    one = rotated(one, 27) * 5 + 0x52DCE729 & _64_BITS
    two = one * 5 + 0x38495AB5 & _64_BITS
    one = (one ^ 16) + (two ^ 16) & _64_BITS
    two = (two ^ 16) + one & _64_BITS
    one = finished(one) + finished(two) & _64_BITS
    return one ^ (finished(two) + one & _64_BITS)
