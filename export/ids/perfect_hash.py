"""A perfect hash of known ids: a seed for each bucket of ids, such that no two ids share an entry.

"Hash, displace, and compress" (Belazzougui, Botelho, Dietzfelbinger, 2009): the buckets with most ids choose first.
10⁷ ids take six seconds.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from serving.bundle.id_maps import buckets_of, entries_of, hashes_of

Numbers = npt.NDArray[np.int64]

# Ids in a bucket, on average, and entries for each id: so that 256 seeds are enough, and are found soon.
_IDS_IN_BUCKET = 3
_ENTRIES_PER_ID = 1.5
_SEEDS = 256


@dataclass(frozen=True, slots=True, eq=False)
class PerfectHash:
    """Where ids are found.

    Attributes:
        seeds: of each bucket; uint8 [buckets].
        entries: an id and its row each, (0, -1) where there is no id; int64 [capacity, 2].
    """

    seeds: npt.NDArray[np.uint8]
    entries: Numbers


def perfect_hash(ids: Numbers, rows: Numbers) -> PerfectHash:
    """The perfect hash of different `ids`, int64 [n], with the row of each, int64 [n] and not negative."""
    capacity = max(1, int(ids.size * _ENTRIES_PER_ID))
    while (found := _placed(ids, rows, capacity)) is None:
        capacity += 1 + capacity // 4  # few ids may need more room
    return found


def _placed(ids: Numbers, rows: Numbers, capacity: int) -> PerfectHash | None:
    """The perfect hash with so many entries; None where no seed suits some bucket."""
    sizes = np.array([capacity], np.uint64)
    buckets = max(1, -(-ids.size // _IDS_IN_BUCKET))
    hashes = hashes_of(ids)
    bucket_of = buckets_of(hashes, np.array([buckets], np.uint64))
    order = np.argsort(bucket_of, kind="stable")
    hashes = hashes[order]
    counts = np.bincount(bucket_of, minlength=buckets)
    firsts = np.cumsum(counts) - counts
    seeds = np.zeros(buckets, np.uint8)
    places = np.empty(ids.size, np.int64)
    is_taken = np.zeros(capacity, bool)
    claims = np.empty(capacity, np.int64)
    for size in range(int(counts.max()), 0, -1):
        waiting = np.flatnonzero(counts == size)
        for seed in range(_SEEDS):
            if not waiting.size:
                break
            members = firsts[waiting, np.newaxis] + np.arange(size)
            chosen = entries_of(hashes[members], np.array([seed], np.uint8), sizes)
            free = np.flatnonzero(~is_taken[chosen].any(axis=1))
            # Who claims an entry last has it; a bucket needs all of its entries.
            claims[chosen[free]] = members[free]
            won = free[(claims[chosen[free]] == members[free]).all(axis=1)]
            is_taken[chosen[won]] = True
            places[members[won]] = chosen[won]
            seeds[waiting[won]] = seed
            waiting = np.delete(waiting, won)
        if waiting.size:
            return None
    entries = np.empty((capacity, 2), np.int64)
    entries[:] = 0, -1
    entries[places, 0], entries[places, 1] = ids[order], rows[order]
    return PerfectHash(seeds, entries)
