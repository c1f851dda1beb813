"""A torch.distributed.checkpoint folder, saved by any number of processes and read by one.

The format is `torch.distributed.checkpoint.FileSystemWriter`'s (torch 2.13). The file `.metadata` says at which
bytes of which file each chunk of a tensor is. Each chunk is an archive of `torch.save`. Reading needs no process
group, and never reads all of a chunk at once.

The metadata is a pickle, and a pickle is a program. It is read without running its code: only a few opcodes are
allowed. Each name in it is mapped to a harmless class of ours, never to an object of torch or Python. A call of such
a name makes a Part, and a state becomes the attributes of the Part.
"""

import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, ClassVar, cast

import msgspec
import torch
from torch import Tensor

from export.errors import CheckpointError
from export.trained.checkpoint_files import CheckpointFile, CheckpointFiles
from export.trained.stored_tensors import InFile, StoredTensor
from export.trained.torch_save_file import locate_tensors

_METADATA = "torch.distributed.checkpoint.metadata"


class Part:
    """An object of the metadata. It drops its arguments, and keeps its state as attributes.

    A state that is no dict is kept as the attribute `state`.
    """

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        vars(self).update(state if isinstance(state, dict) else {"state": state})


class TensorPart(Part):
    """A TensorStorageMetadata."""


class _Dict(dict[str | Part, object]):
    def __setitem__(self, key: str | Part, value: object) -> None:
        if not isinstance(key, str | Part):  # hashing deeply nested tuples would overflow the stack
            raise pickle.UnpicklingError(f"expected a name or an index of metadata, got {type(key).__name__}")
        super().__setitem__(key, value)


# Every name that a FileSystemWriter's metadata may contain, and its class. Python 3.13 has another name for paths,
# and Python before 3.11.4 calls getattr for a member of an enumeration.
_NAMES: Mapping[tuple[str, str], Any] = {
    (_METADATA, "TensorStorageMetadata"): TensorPart,
    **dict.fromkeys(
        (
            (_METADATA, "BytesStorageMetadata"),
            (_METADATA, "ChunkStorageMetadata"),
            (_METADATA, "Metadata"),
            (_METADATA, "MetadataIndex"),
            (_METADATA, "StorageMeta"),
            (_METADATA, "TensorProperties"),
            (_METADATA, "_MEM_FORMAT_ENCODING"),
            ("builtins", "getattr"),
            ("pathlib", "PosixPath"),
            ("pathlib._local", "PosixPath"),
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
            ("torch.serialization", "_get_layout"),
        ),
        Part,
    ),
    ("torch", "Size"): tuple,
    **{("torch", name): dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)},
}

_OPCODES = (
    *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.MEMOIZE, pickle.BINGET, pickle.LONG_BINGET),
    *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BINFLOAT),
    *(pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1),
    *(pickle.SHORT_BINUNICODE, pickle.BINUNICODE, pickle.STACK_GLOBAL),
    *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
    *(pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS, pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS),
    *(pickle.REDUCE, pickle.NEWOBJ, pickle.BUILD),
)


class _Unpickler(pickle._Unpickler):  # the one written in Python: the one in C allows every opcode
    dispatch: ClassVar[dict[int, Any]] = {code[0]: pickle._Unpickler.dispatch[code[0]] for code in _OPCODES} | {
        pickle.EMPTY_DICT[0]: lambda unpickler: unpickler.append(_Dict())
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _NAMES:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a checkpoint's metadata")
        return _NAMES[module, name]


def read_parts(file: CheckpointFile) -> object:
    """Read metadata as nested parts, which `open_folder` checks.

    Raises:
        CheckpointError: the file cannot be read, or is not such metadata.
    """
    content = file.read_part(0, file.size)
    try:
        return _Unpickler(io.BytesIO(content)).load()
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointError(
            f"{file.path}: expected the metadata of torch.distributed.checkpoint: {error!r}"
        ) from error


METADATA = ".metadata"
# The names of the files of a folder.
FILES = (f"{METADATA}*", "*.distcp")


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor: its first index in each dimension, and its numbers."""

    offsets: tuple[int, ...]
    numbers: InFile


@dataclass(frozen=True, slots=True)
class InChunks:
    """A tensor [rows, …] as chunks that cover it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]

    def read(self, start: int, stop: int) -> Tensor:
        """Read rows [start, stop) from the chunks that have them, into a new tensor [stop − start, …]."""
        rows = torch.empty((stop - start, *self.shape[1:]), dtype=self.dtype)
        for chunk in self.chunks:
            row, *column_offsets = chunk.offsets
            row_count, *sizes = chunk.numbers.shape
            first, last = max(start, row), min(stop, row + row_count)
            if first < last:
                box = [slice(offset, offset + size) for offset, size in zip(column_offsets, sizes, strict=True)]
                rows[(slice(first - start, last - start), *box)] = chunk.numbers.read(first - row, last - row)
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


class _Storage(msgspec.Struct):
    relative_path: str
    offset: int
    length: int
    transform_descriptors: object = None


class _Metadata(msgspec.Struct):
    state_dict_metadata: dict[str, object]
    storage_data: dict[object, _Storage]


# By key and offsets of a chunk: where its archive is.
_Storages = Mapping[tuple[str, tuple[int, ...]], _Storage]


def open_folder(path: Path, files: CheckpointFiles) -> dict[str, StoredTensor]:
    """The tensors of the checkpoint in the folder `path`, by state-dict key. A number is a vector [1].

    Other objects in the checkpoint are ignored.

    Raises:
        CheckpointError: the metadata cannot be read, or does not match the files of the folder.
    """
    try:
        metadata = msgspec.convert(read_parts(files.open(METADATA)), _Metadata, from_attributes=True)
        storages = {_key(index): storage for index, storage in metadata.storage_data.items()}
        tensors = {
            key: msgspec.convert(part, _Stored, from_attributes=True)
            for key, part in metadata.state_dict_metadata.items()
            if isinstance(part, TensorPart)
        }
    except (msgspec.ValidationError, RecursionError) as error:
        raise CheckpointError(
            f"{path / METADATA}: expected the metadata of torch.distributed.checkpoint: {error}"
        ) from error
    return {key: _table(path, key, stored, storages, files) for key, stored in tensors.items()}


def _key(index: object) -> tuple[str, tuple[int, ...]]:
    parsed = msgspec.convert(index, _Index, from_attributes=True)
    return parsed.fqn, parsed.offset or ()


def _table(path: Path, key: str, stored: _Stored, storages: _Storages, files: CheckpointFiles) -> InChunks:
    dtype = stored.properties.state[0]
    chunks = []
    for chunk in stored.chunks:
        if 0 in chunk.sizes:
            continue  # a rank without rows
        storage = storages.get((key, chunk.offsets))
        if (
            storage is None
            or storage.transform_descriptors
            or Path(storage.relative_path).name != storage.relative_path
        ):
            raise CheckpointError(f"{path}: {key}: expected a plain chunk at {chunk.offsets}, found {storage}")
        tensor = locate_tensors(files.open(storage.relative_path), storage.offset, storage.length).tensors.get("")
        is_plain = isinstance(tensor, InFile) and (tensor.shape, tensor.dtype) == (chunk.sizes or (1,), dtype)
        if not is_plain or len(chunk.offsets) != len(stored.size):
            raise CheckpointError(
                f"{path / storage.relative_path}: {key}: expected {dtype} {list(chunk.sizes)} "
                f"at byte {storage.offset}, found {tensor}"
            )
        chunks.append(Chunk(chunk.offsets or (0,), cast(InFile, tensor)))
    # Chunks of one tensor never overlap, so the sum of their elements shows whether one is missing.
    count = sum(prod(chunk.numbers.shape) for chunk in chunks)
    if count != prod(stored.size):
        raise CheckpointError(f"{path}: {key}: expected chunks of {prod(stored.size)} elements in all, found {count}")
    return InChunks(stored.size or (1,), dtype, tuple(chunks))
