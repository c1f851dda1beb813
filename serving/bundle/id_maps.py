"""Id maps: the row that a raw id reads, for tables whose ids TorchRec remaps before the lookup.

All maps of a bundle are in one file, `ids.bin`, which processes map and share. A map is a perfect hash of its known
ids. It has a *seed* of one byte for each bucket of ids, and *entries*, each with an id and its row. The seed of an
id's bucket chooses the entry of the id, so exactly one entry is read for an id, known or not. docs/bundle.md has the
layout.
"""

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from serving.files import Strict

# The file of a bundle with all its maps.
ID_MAPS_FILE = "ids.bin"
# An id and its row, int64 both. An entry without an id has the row -1.
ENTRY_BYTES = 16
_FIRST_MIX, _SECOND_MIX = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)
_HALF = np.uint64(32)
_SEED_STEP = np.uint64(0x9E3779B97F4A7C15)
_SEED_MIX = np.uint64(0xD6E8FEB86659FD93)
_INT64S = 2**63  # the number of int64 that are not negative
# Largest number of buckets or entries: the upper half of a hash times such a number is below 2⁶⁴.
_MOST = 2**32 - 1

Hashes = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]


class HashedIds(Strict, frozen=True, omit_defaults=True):
    """How an unknown id is hashed to a row: TorchRec's HashZch.

    Attributes:
        bounds: the rows of training's buckets. Bucket b has the rows [bounds[b], bounds[b + 1]).
        divided: whether an id's index among the ids of its bucket is hashed, instead of the id.
        input_hash_size: valid ids are below it, and each bucket has a run of them; the runs have equal lengths,
            rounded up. None: any int64 is a valid id, and the buckets take turns.
    """

    bounds: tuple[int, ...]
    divided: bool = False
    input_hash_size: int | None = None

    @property
    def buckets(self) -> int:
        """Number of training's buckets."""
        return len(self.bounds) - 1

    @property
    def block(self) -> int | None:
        """The length of a run: bucket b has the ids [b · block, (b + 1) · block). None: the buckets take turns."""
        return None if self.input_hash_size is None else -(-self.input_hash_size // self.buckets)

    def parts_of(self, ids: Numbers) -> tuple[Numbers, Numbers]:
        """The bucket of each id, and the number that is hashed for it: int64 [n] both.

        Invalid ids get a bucket that does not exist.
        """
        if self.block is None:
            return ids % self.buckets, ids // self.buckets if self.divided else ids
        return ids // self.block, ids % self.block if self.divided else ids


class IdMap(Strict, frozen=True, omit_defaults=True):
    """The map of one table.

    Attributes:
        known: the number of known ids.
        buckets: the number of seeds.
        capacity: the number of entries.
        seeds_offset: the offset of the seeds in the file, in bytes.
        entries_offset: the offset of the entries in the file, in bytes.
        hashed: how unknown ids are hashed to rows. None: they read the last row.
    """

    known: int
    buckets: int
    capacity: int
    seeds_offset: int
    entries_offset: int
    hashed: HashedIds | None = None

    @property
    def valid_ids(self) -> int | None:
        """Valid ids are in [0, valid_ids). None: any int64 is valid."""
        if self.hashed is None or self.hashed.block is None:
            return None
        return min(self.hashed.block * self.hashed.buckets, _INT64S)

    @property
    def regions(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """The ranges of the seeds and of the entries in the file, in bytes: [start, stop) each."""
        seeds, entries = self.seeds_offset, self.entries_offset
        return (seeds, seeds + self.buckets), (entries, entries + ENTRY_BYTES * self.capacity)

    def contradiction(self, rows: int) -> str | None:
        """A contradiction in the map of a table with `rows` rows, or None."""
        if not 0 <= self.known <= self.capacity or not 0 < self.capacity <= _MOST or not 0 < self.buckets <= _MOST:
            return (
                f"expected up to {_MOST} entries and buckets, and no more known ids than entries, "
                f"got {self.capacity}, {self.buckets} and {self.known}"
            )
        if self.hashed is not None:
            bounds = self.hashed.bounds
            is_rising = all(low < high for low, high in pairwise(bounds))
            if len(bounds) < 2 or (bounds[0], bounds[-1]) != (0, rows) or not is_rising:
                return f"hashed: expected bounds that rise from 0 to {rows}, got {list(bounds[:8])}"
            size = self.hashed.input_hash_size
            if size is not None and not 0 < size < _INT64S:
                return f"hashed: input_hash_size: expected a number from 1 to 2⁶³ − 1, got {size}"
        return None


def hashes_of(ids: Numbers) -> Hashes:
    """The hash of each id: int64 [n] → uint64 [n]. All hashes differ. The upper half of a hash is mixed better."""
    hashes = ids.view(np.uint64) * _FIRST_MIX
    hashes ^= hashes >> _HALF
    hashes *= _SECOND_MIX
    return hashes


def buckets_of(hashes: Hashes, buckets: Hashes) -> Numbers:
    """The bucket of each hash, int64 [n].

    Args:
        hashes: uint64 [n].
        buckets: number of buckets of the map of each id; uint64 [n], or [1] for all.
    """
    return _scaled(hashes, buckets)


def entries_of(hashes: Hashes, seeds: npt.NDArray[np.uint8], capacity: Hashes) -> Numbers:
    """The entry of each hash in its map, int64 [n].

    Args:
        hashes: uint64 [n].
        seeds: the seeds of their buckets; uint8 [n], or [1] for all.
        capacity: number of entries of the map of each id; uint64 [n], or [1] for all.
    """
    mixed = hashes ^ (seeds * _SEED_STEP)
    mixed *= _SEED_MIX
    return _scaled(mixed, capacity)


def _scaled(hashes: Hashes, sizes: Hashes) -> Numbers:
    """The upper half of each hash, scaled to [0, size)."""
    scaled = hashes >> _HALF
    scaled *= sizes
    scaled >>= _HALF
    return scaled.view(np.int64)
