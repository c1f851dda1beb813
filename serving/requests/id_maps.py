"""Map raw ids to row numbers, as TorchRec's managed collision modules do in eval mode: all ids of a call at once."""

import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from serving.bundle.id_maps import ID_MAPS_FILE, HashedIds, buckets_of, entries_of, hashes_of
from serving.bundle.manifest import Manifest
from serving.bundle.tables import ANY_INT64, Table
from serving.errors import BundleError

Ids = npt.NDArray[np.int64]
# Of MurmurHash3, as FBGEMM's `zero_collision_hash` has it.
_C1, _C2 = np.uint64(0x87C37B91114253D5), np.uint64(0x4CF5AD432745937F)
_FINISH = (np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53))


class IdMaps:
    """The maps of a bundle over its mapped file. Processes share the pages.

    Attributes:
        last_ids: the last valid id of each map, as an unsigned number: uint64 [n]. 2⁶⁴ − 1: any int64 is valid.

    Args:
        directory: the folder of the bundle.
        tables: its tables with a map.

    Raises:
        BundleError: the file cannot be mapped.
    """

    def __init__(self, directory: Path, tables: Sequence[Table]) -> None:
        maps = {table.name: table.id_map for table in tables if table.id_map is not None}
        content = _mapped(directory / ID_MAPS_FILE)
        self._seeds = content
        # An entry is read as one number of 16 bytes.
        self._entries = content[: content.size // 16 * 16].view(np.complex128)
        self._index = {name: number for number, name in enumerate(maps)}
        every = list(maps.values())
        self._buckets = np.array([id_map.buckets for id_map in every], np.uint64)
        self._capacity = np.array([id_map.capacity for id_map in every], np.uint64)
        self._first_seed = np.array([id_map.seeds_offset for id_map in every])
        self._first_entry = np.array([id_map.entries_offset // 16 for id_map in every])
        self._last_row = np.array([table.rows - 1 for table in tables])
        self.last_ids = np.array([table.valid_ids - 1 for table in tables], np.uint64)
        self._hashed = {number: id_map.hashed for number, id_map in enumerate(every) if id_map.hashed is not None}

    @classmethod
    def of(cls, directory: Path, manifest: Manifest) -> Self | None:
        """The maps of a bundle, or None if it has no maps. Errors as for the class."""
        tables = [table for table in manifest.tables if table.id_map is not None]
        return cls(directory, tables) if tables else None

    def numbers_of(self, tables: Sequence[str]) -> npt.NDArray[np.int64]:
        """The number of each table's map, -1 for a table without one: int64 [n]."""
        return np.array([self._index.get(name, -1) for name in tables])

    @property
    def known(self) -> dict[str, Ids]:
        """The ids that each map has, by table, in the order of its entries: int64 [n]. It reads all maps."""
        known_ids = {}
        for name, number in self._index.items():
            first = self._first_entry[number]
            entries = self._entries[first : first + int(self._capacity[number])].view(np.int64)
            known_ids[name] = entries[::2][entries[1::2] >= 0]
        return known_ids

    def rows_of(self, ids: Ids, maps: npt.NDArray[np.int64]) -> Ids:
        """The row that each id reads.

        Args:
            ids: any numbers; int64 [n].
            maps: the number of the map of each; int64 [n].

        Returns:
            int64 [n], each in [0, rows) of its table, unless the file was damaged; -1 for an id that is not valid.
        """
        # A single map is the same for all ids: numpy repeats it.
        of = slice(None) if self._last_row.size == 1 else maps
        hashes = hashes_of(ids)
        places = buckets_of(hashes, self._buckets[of])
        places += self._first_seed[of]
        places = entries_of(hashes, self._seeds.take(places), self._capacity[of])
        places += self._first_entry[of]
        entries = self._entries.take(places).view(np.int64)
        is_known = entries[::2] == ids
        is_known &= entries[1::2] >= 0
        rows: Ids = np.where(is_known, entries[1::2], self._last_row[of])
        for number, hashed in self._hashed.items():
            in_hash_table = np.flatnonzero(~is_known & (maps == number))
            rows[in_hash_table] = _hashed_rows(ids[in_hash_table], hashed)
        return rows


def known_of_keys(known: Mapping[str, Ids], manifest: Manifest) -> dict[str, Ids]:
    """Ids for each key whose tables all have maps: the ids in the map of the first table, int64 [n].

    They are valid ids of all these tables.

    Args:
        known: the known ids of each table with a map.
        manifest: the manifest of the bundle.
    """
    valid = manifest.rows_of_keys
    return {
        key: _valid(known[features[0].table], valid[key])
        for key, features in manifest.keys.items()
        if known.keys() >= {feature.table for feature in features}
    }


def _valid(ids: Ids, count: int) -> Ids:
    """The valid ids among `ids`, if `count` ids are valid."""
    return ids if count == ANY_INT64 else ids[ids.view(np.uint64) < np.uint64(count)]


def _hashed_rows(ids: Ids, hashed: HashedIds) -> Ids:
    """The result of `zero_collision_hash` for unknown ids: int64 [n]; -1 for an id without a bucket."""
    bounds = np.array(hashed.bounds)
    of, numbers = hashed.parts_of(ids)
    has_none = None if hashed.block is None else (of < 0) | (of >= hashed.buckets)
    if has_none is not None:
        of[has_none] = 0
    rows: Ids = (_murmur(numbers) % np.diff(bounds).astype(np.uint64)[of]).astype(np.int64) + bounds[of]
    if has_none is not None:
        rows[has_none] = -1
    return rows


def _murmur(ids: Ids) -> npt.NDArray[np.uint64]:
    """`murmur_hash3_2x64(id, 0, 0)` of FBGEMM: uint64 [n]."""
    one = ids.view(np.uint64) * _C1
    one = _rotated(one, 31) * _C2
    one = _rotated(one, 27) * np.uint64(5) + np.uint64(0x52DCE729)
    two = one * np.uint64(5) + np.uint64(0x38495AB5)
    one ^= np.uint64(16)
    two ^= np.uint64(16)
    one += two
    two += one
    one, two = _finished(one), _finished(two)
    one += two
    two += one
    one ^= two
    return one


def _finished(hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    for factor in _FINISH:
        hashes = (hashes ^ (hashes >> np.uint64(33))) * factor
    return hashes ^ (hashes >> np.uint64(33))


def _rotated(numbers: npt.NDArray[np.uint64], bits: int) -> npt.NDArray[np.uint64]:
    return (numbers << np.uint64(bits)) | (numbers >> np.uint64(64 - bits))


def _mapped(path: Path) -> npt.NDArray[np.uint8]:
    try:
        with path.open("rb") as file:
            return np.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), np.uint8)
    except (OSError, ValueError) as error:  # ValueError: it is empty
        raise BundleError(f"{path}: cannot be mapped: {error}: publish the bundle again") from error
