"""A torch.distributed.checkpoint folder, saved by any number of processes and read by one.

The format is that of `torch.distributed.checkpoint.FileSystemWriter` (torch 2.13). The file `.metadata` says which
chunk of which tensor lies at which bytes of which file. Each chunk is an archive of `torch.save`. Reading needs no
process group, and never reads all of a chunk at once.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from export.errors import CheckpointError
from export.trained.archive import locate_tensors
from export.trained.dcp_metadata import TensorPart, read_parts
from export.trained.sources import InFile

METADATA = ".metadata"


@dataclass(frozen=True, slots=True)
class Chunk:
    """A rectangle of a table: its first row, its first column, and where its numbers lie."""

    row: int
    column: int
    numbers: InFile


@dataclass(frozen=True, slots=True)
class InChunks:
    """A table as chunks that cover it. `shape` is (rows, dim)."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]

    def read(self, start: int, stop: int) -> Tensor:
        """Rows [start, stop) as a new tensor [stop − start, dim], put together from the chunks that have them."""
        rows = torch.empty((stop - start, self.shape[1]), dtype=self.dtype)
        for chunk in self.chunks:
            height, width = chunk.numbers.shape
            first, last = max(start, chunk.row), min(stop, chunk.row + height)
            if first < last:
                columns = slice(chunk.column, chunk.column + width)
                rows[first - start : last - start, columns] = chunk.numbers.read(first - chunk.row, last - chunk.row)
        return rows


class _Chunk(msgspec.Struct):
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class _Properties(msgspec.Struct):
    state: tuple[torch.dtype, object, bool, object, bool]


class _Stored(msgspec.Struct):
    properties: _Properties
    size: tuple[int, ...]
    chunks: list[_Chunk]


class _Index(msgspec.Struct):
    fqn: str
    offset: tuple[int, ...] | None = None


class _Place(msgspec.Struct):
    relative_path: str
    offset: int
    length: int
    transform_descriptors: object = None


class _Metadata(msgspec.Struct):
    state_dict_metadata: dict[str, object]
    storage_data: dict[object, _Place]


Places = Mapping[tuple[str, tuple[int, ...]], _Place]


def open_folder(path: Path) -> dict[str, InChunks]:
    """The matrices of the checkpoint in the folder `path`, by state-dict key; a vector [n] is a matrix [n, 1], and a
    number [1, 1].
    Anything else in it is left alone.

    Raises:
        CheckpointError: the metadata cannot be read, or does not fit the files beside it.
    """
    try:
        metadata = msgspec.convert(read_parts(path / METADATA), _Metadata, from_attributes=True)
        places = {_key(index): place for index, place in metadata.storage_data.items()}
        matrices = dict(_matrices(metadata))
    except (msgspec.ValidationError, RecursionError) as error:
        raise CheckpointError(
            f"{path / METADATA}: expected the metadata of torch.distributed.checkpoint: {error}"
        ) from error
    return {key: _table(path, key, stored, places) for key, stored in matrices.items()}


def _key(index: object) -> tuple[str, tuple[int, ...]]:
    found = msgspec.convert(index, _Index, from_attributes=True)
    return found.fqn, found.offset or ()


def _matrices(metadata: _Metadata) -> Iterator[tuple[str, _Stored]]:
    for key, part in metadata.state_dict_metadata.items():
        if isinstance(part, TensorPart):
            stored = msgspec.convert(part, _Stored, from_attributes=True)
            if len(stored.size) <= 2:
                yield key, stored


def _table(path: Path, key: str, stored: _Stored, places: Places) -> InChunks:
    dtype, dimensions = stored.properties.state[0], len(stored.size)
    chunks = []
    for chunk in stored.chunks:
        if 0 in chunk.sizes:
            continue  # a rank without rows
        place = places.get((key, chunk.offsets))
        if place is None or place.transform_descriptors or Path(place.relative_path).name != place.relative_path:
            raise CheckpointError(f"{path}: {key}: expected a plain chunk at {chunk.offsets}, found {place}")
        tensor = locate_tensors(path / place.relative_path, place.offset, place.length).get("")
        sizes = chunk.sizes or (1,)
        if tensor is None or tensor.shape != sizes or tensor.dtype != dtype or len(chunk.offsets) != dimensions:
            raise CheckpointError(
                f"{path / place.relative_path}: {key}: expected {dtype} {list(chunk.sizes)} "
                f"at byte {place.offset}, found {tensor}"
            )
        if dimensions < 2:
            tensor = replace(tensor, shape=(*tensor.shape, 1), strides=2 * tensor.strides)
        row, column = (*chunk.offsets, 0, 0)[:2]
        chunks.append(Chunk(row, column, tensor))
    # Chunks of one tensor never overlap, so the sum of their areas shows whether one is missing.
    area = sum(chunk.numbers.shape[0] * chunk.numbers.shape[1] for chunk in chunks)
    rows, columns = (*stored.size, 1, 1)[:2]
    if area != rows * columns:
        raise CheckpointError(f"{path}: {key}: expected chunks of {rows * columns} elements in all, found {area}")
    return InChunks((rows, columns), dtype, tuple(chunks))
