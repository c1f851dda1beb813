"""Where the rows of a table can be: in memory, in a file. Reading keeps nothing in memory."""

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

# numpy has no bfloat16: its numbers are read as the integers with their bits.
_READ_AS = {torch.bfloat16: torch.int16}


class StoredTable(Protocol):
    """A matrix [rows, dim] in a module or a file; or a vector [rows]. A single number is a vector of one."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(rows, dim)."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its elements."""

    def read(self, start: int, stop: int) -> Tensor:
        """Rows [start, stop) on the CPU, [stop − start, dim]."""


@dataclass(frozen=True, slots=True)
class InMemory:
    """A tensor that a module holds, on any device."""

    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """(rows, dim)."""
        return tuple(self.tensor.shape) or (1,)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its elements."""
        return self.tensor.dtype

    def read(self, start: int, stop: int) -> Tensor:
        """Rows [start, stop): a view [stop − start, dim], or a copy where the tensor is not on the CPU."""
        return self.tensor.reshape(self.shape)[start:stop].detach().cpu()


@dataclass(frozen=True, slots=True)
class InFile:
    """A table in a file: element (r, c) lies at byte `offset` + r·strides[0] + c·strides[1]."""

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
