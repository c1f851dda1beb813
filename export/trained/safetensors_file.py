"""A safetensors file: a JSON header with the offsets of each tensor, then the numbers.

The format: https://huggingface.co/docs/safetensors#format. A sharded set also has an index, which Hugging Face's
tools write: {"weight_map": {key: file name}}.
"""

import json
from itertools import pairwise
from math import prod
from typing import Annotated, Any

import msgspec
import torch

from export.errors import CheckpointError
from export.trained.checkpoint_files import CheckpointFile, CheckpointFiles
from export.trained.stored_tensors import InFile, StoredTensor, UnreadableTensor
from serving.files import json_tree

INDEX = "*.safetensors.index.json"
# The names of the files of a set.
FILES = ("*.safetensors", INDEX)
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_LENGTH_BYTES = 8
# The most bytes of a header that the format allows.
_LONGEST_HEADER = 100_000_000


class _Tensor(msgspec.Struct):
    dtype: str
    shape: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
    data_offsets: tuple[int, int]


def locate_in_set(files: CheckpointFiles, index: str) -> dict[str, StoredTensor]:
    """The tensors of a sharded set by key.

    Args:
        files: of the set.
        index: the name of its index.

    Raises:
        CheckpointError: the index cannot be read, or does not match the files.
    """
    file = files.open(index)
    try:
        names = msgspec.convert(json.loads(file.read_part(0, file.size))["weight_map"], dict[str, str])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{file.path}: expected an index of safetensors files: {error!r}") from error
    tensors = {name: locate_in_file(files.open(name)) for name in sorted(set(names.values()))}
    for key, name in names.items():
        if key not in tensors[name]:
            raise CheckpointError(f"{file.path}: expected {key!r} in {name}, which does not have it")
    return {key: tensors[name][key] for key, name in names.items()}


def locate_in_file(file: CheckpointFile) -> dict[str, StoredTensor]:
    """The tensors of a file by key.

    Raises:
        CheckpointError: it is no such file, or is truncated.
    """
    try:
        header_bytes = int.from_bytes(file.read_bytes(0, _LENGTH_BYTES), "little")
        if header_bytes > min(_LONGEST_HEADER, file.size - _LENGTH_BYTES):
            raise ValueError(f"a header of {header_bytes} bytes")
        content = file.read_part(_LENGTH_BYTES, header_bytes)
        json_tree(content)  # refuses duplicate keys
        header = json.loads(content)
        header.pop("__metadata__", None)
        tensors = msgspec.convert(header, dict[str, _Tensor])
        first = _LENGTH_BYTES + header_bytes
        _check_offsets(tensors, file.size - first)
    except (ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file.path}: expected a safetensors file: {error}") from error
    file.dated = True  # a header has no checksums of the numbers
    return {key: _located(file, key, tensor, first) for key, tensor in tensors.items()}


def _check_offsets(tensors: dict[str, _Tensor], size: int) -> None:
    """Refuse a header whose tensors do not cover each byte of the file exactly once, as the format requires."""
    spans = sorted(tensor.data_offsets for tensor in tensors.values())
    ends = [(0, 0), *spans, (size, size)]
    if any(before[1] != after[0] or before[0] > before[1] for before, after in pairwise(ends)):
        raise ValueError(f"its tensors do not cover its {size:,} bytes of numbers once each: was it copied whole?")
    for key, tensor in tensors.items():
        dtype = _DTYPES.get(tensor.dtype)
        if dtype is not None and tensor.data_offsets[1] - tensor.data_offsets[0] != dtype.itemsize * prod(
            tensor.shape
        ):
            raise ValueError(f"{key!r} has bytes {list(tensor.data_offsets)} and shape {list(tensor.shape)}")


def _located(file: CheckpointFile, key: str, tensor: _Tensor, first: int) -> StoredTensor:
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        kind = f"a tensor of {tensor.dtype}"
        return UnreadableTensor(str(file.path), key, kind, "save it as float32, float16 or bfloat16")
    shape: Any = tensor.shape or (1,)
    strides = tuple(dtype.itemsize * prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return InFile(file, first + tensor.data_offsets[0], shape, strides, dtype)
