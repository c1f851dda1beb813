"""A torch.distributed.checkpoint folder, read by one process whatever the world size it was saved from.

The format is that of `torch.distributed.checkpoint.FileSystemWriter` (torch 2.13): `.metadata` says which chunk
of which tensor lies at which bytes of which file, and each chunk is an archive of `torch.save`. Nothing here
needs a process group, and no chunk is read whole.
"""

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from export.archive import locate_tensors
from export.errors import CheckpointError
from export.stored import InFile

METADATA = ".metadata"

# All that a FileSystemWriter's metadata is made of. It is a pickle: anything else might be code.
_METADATA_NAMES = {
    ("collections", "OrderedDict"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("torch", "Size"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
}


@dataclass(frozen=True, slots=True)
class Chunk:
    """A rectangle of a table, its first row and column, and where its numbers lie."""

    row: int
    column: int
    numbers: InFile


@dataclass(frozen=True, slots=True)
class InChunks:
    """A table in chunks that cover it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]

    def read(self, start: int, stop: int) -> Tensor:
        """Rows [start, stop), put together from the chunks that have them."""
        rows = torch.empty((stop - start, self.shape[1]), dtype=self.dtype)
        for chunk in self.chunks:
            height, width = chunk.numbers.shape
            first, last = max(start, chunk.row), min(stop, chunk.row + height)
            if first < last:
                columns = slice(chunk.column, chunk.column + width)
                rows[first - start : last - start, columns] = chunk.numbers.read(first - chunk.row, last - chunk.row)
        return rows


def open_folder(path: Path) -> dict[str, InChunks]:
    """The matrices of the checkpoint in the folder `path`, by state-dict key; what else it holds is left alone.

    Raises:
        CheckpointError: the metadata cannot be read, or does not fit the files beside it.
    """
    metadata = _read_metadata(path / METADATA)
    places = {(index.fqn, tuple(index.offset or ())): info for index, info in (metadata.storage_data or {}).items()}
    return {
        key: _table(path, key, stored, places)
        for key, stored in metadata.state_dict_metadata.items()
        if isinstance(stored, TensorStorageMetadata) and len(stored.size) == 2
    }


def _table(path: Path, key: str, stored: TensorStorageMetadata, places: dict[Any, Any]) -> InChunks:
    chunks = []
    for chunk in stored.chunks:
        if 0 in chunk.sizes:
            continue  # a rank without rows
        place = places.get((key, tuple(chunk.offsets)))
        if place is None or place.transform_descriptors:
            raise CheckpointError(f"{path}: {key}: expected a plain chunk at {tuple(chunk.offsets)}, found {place}")
        tensor = locate_tensors(path / place.relative_path, place.offset, place.length).get("")
        if tensor is None or tensor.shape != tuple(chunk.sizes) or tensor.dtype != stored.properties.dtype:
            raise CheckpointError(
                f"{path / place.relative_path}: {key}: expected {stored.properties.dtype} {list(chunk.sizes)} "
                f"at byte {place.offset}, found {tensor}"
            )
        chunks.append(Chunk(chunk.offsets[0], chunk.offsets[1], tensor))
    # Chunks of one tensor never overlap, so their areas tell whether a part is missing.
    area = sum(chunk.numbers.shape[0] * chunk.numbers.shape[1] for chunk in chunks)
    if area != stored.size.numel():
        raise CheckpointError(
            f"{path}: {key}: expected chunks of {stored.size.numel()} elements in all, found {area}"
        )
    return InChunks(tuple(stored.size), stored.properties.dtype, tuple(chunks))


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        allowed = (module, name) in _METADATA_NAMES or module == "torch.distributed.checkpoint.metadata"
        if not allowed and not (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            raise pickle.UnpicklingError(f"{module}.{name} is no part of a checkpoint's metadata")
        return super().find_class(module, name)


def _read_metadata(path: Path) -> Metadata:
    try:
        with path.open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointError(f"{path}: expected the metadata of torch.distributed.checkpoint: {error}") from error
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"{path}: expected Metadata, found {type(metadata).__name__}")
    return metadata
