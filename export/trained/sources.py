"""The places of a table's rows: in memory, or in a file. Rows that are read from a file do not stay in memory."""

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.utils import _create_file_view

from export.errors import CheckpointError
from serving.files import open_file

# numpy has no bfloat16: its numbers are read as the integers with their bits.
_READ_AS = {torch.bfloat16: torch.int16}


class StoredTable(Protocol):
    """A matrix [rows, dim] in a module or a file, or a vector [rows]. A single number is a vector [1]."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(rows, dim)."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its elements."""

    def read(self, start: int, stop: int) -> Tensor:
        """Rows [start, stop) on the CPU, [stop − start, dim]."""


@dataclass(frozen=True, slots=True)
class InFile:
    """A table in a file: element (r, c) is at byte `offset` + r·strides[0] + c·strides[1]."""

    path: Path
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def read(self, start: int, stop: int) -> Tensor:
        """Rows [start, stop): a copy [stop − start, dim]. Nothing of the file stays in memory."""
        kind = torch.empty(0, dtype=_READ_AS.get(self.dtype, self.dtype)).numpy().dtype
        begin = self.offset + start * self.strides[0]
        shape = (stop - start, *self.shape[1:])
        if self.strides == (prod(self.shape[1:]) * kind.itemsize, kind.itemsize)[-len(shape) :]:
            numbers = np.fromfile(self.path, kind, prod(shape), offset=begin)
            return torch.from_numpy(numbers.reshape(shape)).view(self.dtype)
        # The table is a view of a larger tensor: the file is mapped while its rows are copied.
        mapped = np.memmap(self.path, np.uint8, mode="r")
        rows: np.ndarray[tuple[int, ...], np.dtype[np.generic]] = np.ndarray(shape, kind, mapped, begin, self.strides)
        return torch.from_numpy(rows.copy()).view(self.dtype)


def locate_tensors(path: Path, start: int = 0, length: int | None = None) -> dict[str, InFile]:
    """Find the tensors of the archive at bytes [start, start + length) of `path`.

    Only tensors and plain containers are unpickled (`weights_only`).

    Args:
        path: the file.
        start: the archive's first byte.
        length: the archive's bytes. None: up to the end of the file.

    Returns:
        Tensors by key. A key in nested dicts is "outer.inner". If the archive is one tensor, its key is "".

    Raises:
        CheckpointError: there is no such archive, or it has something else.
    """
    length = path.stat().st_size - start if length is None else length
    try:
        # A fake tensor has a shape, and knows where in the archive its storage lies. It has no numbers.
        with open_file(path, follow=True) as file, FakeTensorMode():
            archive: Any = _create_file_view(file, start, length)
            loaded = torch.load(archive, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:  # torch's own message advises to run the file's code
        raise CheckpointError(
            f"{path}: expected tensors and plain containers alone at byte {start}, found what only running code "
            "could read: save a state dict, torch.save(module.state_dict(), …)"
        ) from error
    except Exception as error:  # zip, pickle and torch raise errors of their own; none names the file
        why = str(error).partition("\n")[0]
        raise CheckpointError(f"{path}: expected an archive of torch.save at byte {start}: {why}") from error
    return {key: _locate(path, start, tensor) for key, tensor in _flatten(loaded).items()}


def _locate(path: Path, start: int, tensor: Tensor) -> InFile:
    size = tensor.element_size()
    archived = tensor.untyped_storage()._checkpoint_offset
    if archived is None:
        raise CheckpointError(f"{path}: holds a tensor whose numbers are not in it: save it with torch.save")
    return InFile(
        path=path,
        offset=start + archived + int(tensor.storage_offset()) * size,
        shape=tuple(tensor.shape) or (1,),
        strides=tuple(stride * size for stride in tensor.stride()) or (size,),
        dtype=tensor.dtype,
    )


def _flatten(loaded: object, prefix: str = "") -> dict[str, Tensor]:
    if isinstance(loaded, Tensor):
        return {prefix: loaded}
    if not isinstance(loaded, Mapping):
        return {}
    return {
        name: tensor
        for key, value in loaded.items()
        for name, tensor in _flatten(value, f"{prefix}.{key}" if prefix else str(key)).items()
    }
