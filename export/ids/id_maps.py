"""Build the id maps of a bundle and their file, `ids.bin` (`serving.bundle.id_maps`).

A map is a perfect hash of known ids: each bucket of ids gets a seed, such that no two ids share an entry. The
algorithm is "Hash, displace, and compress" (Belazzougui, Botelho, Dietzfelbinger, 2009): the buckets with most ids
choose first. 10⁷ ids take six seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from export.ids.known_ids import known_ids
from export.trained.checkpoint import Checkpoint
from export.trained.tables import TrainedTable
from serving.bundle.id_maps import ENTRY_BYTES, ID_MAPS_FILE, IdMap, buckets_of, entries_of, hashes_of
from serving.bundle.manifest import Manifest, aligned
from serving.requests.types import Ids

Numbers = npt.NDArray[np.int64]

# Mean number of ids in a bucket, and entries for each id. With these, 256 seeds suffice, and are found quickly.
_IDS_IN_BUCKET = 3
_ENTRIES_PER_ID = 1.5
_SEEDS = 256


@dataclass(frozen=True, slots=True, eq=False)
class PerfectHash:
    """A perfect hash of ids.

    Attributes:
        seeds: the seed of each bucket; uint8 [buckets].
        entries: an id and its row, or (0, -1) for none; int64 [capacity, 2].
    """

    seeds: npt.NDArray[np.uint8]
    entries: Numbers


def perfect_hash(ids: Numbers, rows: Numbers) -> PerfectHash:
    """The perfect hash of `ids`, int64 [n], all different, with the row of each, int64 [n], not negative."""
    capacity = max(1, int(ids.size * _ENTRIES_PER_ID))
    while (built := _placed(ids, rows, capacity)) is None:
        capacity += 1 + capacity // 4  # a small number of ids may need more entries
    return built


def _placed(ids: Numbers, rows: Numbers, capacity: int) -> PerfectHash | None:
    """The perfect hash with `capacity` entries, or None if a bucket has no seed that fits."""
    sizes = np.array([capacity], np.uint64)
    buckets = max(1, -(-ids.size // _IDS_IN_BUCKET))
    hashes = hashes_of(ids)
    bucket_of = buckets_of(hashes, np.array([buckets], np.uint64))
    order = np.argsort(bucket_of, kind="stable")
    hashes = hashes[order]
    counts = np.bincount(bucket_of, minlength=buckets)
    firsts = np.cumsum(counts) - counts
    seeds = np.zeros(buckets, np.uint8)
    positions = np.empty(ids.size, np.int64)
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
            # The last bucket that claims an entry gets it. A bucket is placed if it gets all of its entries.
            claims[chosen[free]] = members[free]
            won = free[(claims[chosen[free]] == members[free]).all(axis=1)]
            is_taken[chosen[won]] = True
            positions[members[won]] = chosen[won]
            seeds[waiting[won]] = seed
            waiting = np.delete(waiting, won)
        if waiting.size:
            return None
    entries = np.empty((capacity, 2), np.int64)
    entries[:] = 0, -1
    entries[positions, 0], entries[positions, 1] = ids[order], rows[order]
    return PerfectHash(seeds, entries)


@dataclass(frozen=True, slots=True, eq=False)
class BuiltMaps:
    """The id maps of a bundle in memory: by table, the map's entry in the manifest, and its perfect hash."""

    by_table: dict[str, tuple[IdMap, PerfectHash]]

    @property
    def known(self) -> dict[str, Ids]:
        """The known ids of each map by table, as `serving.requests.id_maps.IdMaps.known`: int64 [n]."""
        return {name: built.entries[built.entries[:, 1] >= 0, 0] for name, (_, built) in self.by_table.items()}

    def write(self, directory: Path) -> None:
        """Write the file into the folder of a bundle, if there are maps.

        Raises:
            OSError: it cannot be written.
        """
        if not self.by_table:
            return
        with (directory / ID_MAPS_FILE).open("wb") as file:
            for described, built in self.by_table.values():
                for offset, numbers in (
                    (described.seeds_offset, built.seeds),
                    (described.entries_offset, built.entries),
                ):
                    file.seek(offset)
                    file.write(numbers.astype(numbers.dtype.newbyteorder("<"), copy=False).data)

    def differing(self, directory: Path, manifest: Manifest) -> list[str]:
        """The names of the tables whose maps in a bundle differ from these.

        Args:
            directory: of the bundle.
            manifest: of the bundle.
        """
        return [
            table.name
            for table in manifest.tables
            if not _holds(directory / ID_MAPS_FILE, table.id_map, *self.by_table.get(table.name, (None, None)))
        ]

    def described(self, manifest: Manifest) -> Manifest:
        """`manifest` with the maps of its tables."""
        tables = tuple(
            msgspec.structs.replace(table, id_map=self.by_table[table.name][0])
            if table.name in self.by_table
            else table
            for table in manifest.tables
        )
        return msgspec.structs.replace(manifest, tables=tables)


def build_maps(trained: Sequence[TrainedTable], weights: Checkpoint) -> BuiltMaps:
    """The maps of all tables whose ids are remapped.

    Raises:
        CheckpointError: the state of a map is not in `weights` as its table's module describes it.
    """
    by_table: dict[str, tuple[IdMap, PerfectHash]] = {}
    end = 0
    for table in trained:
        if table.id_map is None:
            continue
        table_ids = known_ids(table, weights)
        built = perfect_hash(table_ids.ids, table_ids.rows)
        seeds = aligned(end)
        entries = aligned(seeds + built.seeds.size)
        end = entries + ENTRY_BYTES * len(built.entries)
        described = IdMap(
            known=table_ids.count,
            buckets=built.seeds.size,
            capacity=len(built.entries),
            seeds_offset=seeds,
            entries_offset=entries,
            hashed=table_ids.hashed,
        )
        by_table[table.name] = described, built
    return BuiltMaps(by_table)


def _holds(path: Path, written: IdMap | None, expected: IdMap | None, built: PerfectHash | None) -> bool:
    """Whether the map that a manifest describes is the expected one, and the file has its bytes there."""
    if written != expected:
        return False
    return (
        written is None
        or built is None
        or (
            np.array_equal(np.fromfile(path, np.uint8, written.buckets, offset=written.seeds_offset), built.seeds)
            and np.array_equal(
                np.fromfile(path, "<i8", 2 * written.capacity, offset=written.entries_offset), built.entries.ravel()
            )
        )
    )
