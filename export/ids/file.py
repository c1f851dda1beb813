"""The file with the maps of a bundle."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from export.ids.known_ids import known_ids
from export.ids.perfect_hash import PerfectHash, perfect_hash
from export.trained.checkpoint import Checkpoint
from export.trained.tables import TrainedTable
from serving.bundle.id_maps import ENTRY_BYTES, IDS, IdMap
from serving.bundle.manifest import SHARD_ALIGNMENT, Manifest, format_version_of
from serving.request.tensors import Ids


@dataclass(frozen=True, slots=True, eq=False)
class BuiltMaps:
    """The maps of a bundle, in memory: by the name of the table, its entry in the manifest and its hash."""

    by_table: dict[str, tuple[IdMap, PerfectHash]]

    @property
    def known(self) -> dict[str, Ids]:
        """The ids that each map has, by table, as `serving.request.id_maps.IdMaps.known`: int64 [n]."""
        return {name: built.entries[built.entries[:, 1] >= 0, 0] for name, (_, built) in self.by_table.items()}

    def write(self, directory: Path) -> None:
        """Write the file into the folder of a bundle; none where there are no maps.

        Raises:
            OSError: it cannot be written.
        """
        if not self.by_table:
            return
        with (directory / IDS).open("wb") as file:
            for described, built in self.by_table.values():
                for offset, numbers in (
                    (described.seeds_offset, built.seeds),
                    (described.entries_offset, built.entries),
                ):
                    file.seek(offset)
                    file.write(numbers.astype(numbers.dtype.newbyteorder("<"), copy=False).data)

    def differing(self, directory: Path, manifest: Manifest) -> list[str]:
        """The tables of a bundle whose maps are not these, by name.

        Args:
            directory: of the bundle.
            manifest: of the bundle.
        """
        return [
            table.name
            for table in manifest.tables
            if not _holds(directory / IDS, table.id_map, *self.by_table.get(table.name, (None, None)))
        ]

    def described(self, manifest: Manifest) -> Manifest:
        """`manifest` with the maps of its tables."""
        tables = tuple(
            msgspec.structs.replace(table, id_map=self.by_table[table.name][0])
            if table.name in self.by_table
            else table
            for table in manifest.tables
        )
        if not self.by_table:
            return manifest
        version = format_version_of(tables, manifest.features, manifest.id_dtype, on_hosts=False)
        return msgspec.structs.replace(manifest, tables=tables, format_version=version)


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
        known = known_ids(table, weights)
        built = perfect_hash(known.ids, known.rows)
        seeds = _aligned(end)
        entries = _aligned(seeds + built.seeds.size)
        end = entries + ENTRY_BYTES * len(built.entries)
        described = IdMap(
            known=known.count,
            buckets=built.seeds.size,
            capacity=len(built.entries),
            seeds_offset=seeds,
            entries_offset=entries,
            hashed=known.hashed,
        )
        by_table[table.name] = described, built
    return BuiltMaps(by_table)


def _holds(path: Path, found: IdMap | None, expected: IdMap | None, built: PerfectHash | None) -> bool:
    """Whether a file holds the map that is expected, where its manifest says that a map is."""
    if found != expected:
        return False
    return (
        found is None
        or built is None
        or (
            np.array_equal(np.fromfile(path, np.uint8, found.buckets, offset=found.seeds_offset), built.seeds)
            and np.array_equal(
                np.fromfile(path, "<i8", 2 * found.capacity, offset=found.entries_offset), built.entries.ravel()
            )
        )
    )


def _aligned(offset: int) -> int:
    return -(-offset // SHARD_ALIGNMENT) * SHARD_ALIGNMENT
