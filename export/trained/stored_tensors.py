"""The places of a table's rows: in memory, or in a file. Rows that are read from a file do not stay in memory."""

from dataclasses import dataclass
from math import prod
from typing import NoReturn, Protocol

import torch
from torch import Tensor

from export.errors import CheckpointError
from export.trained.checkpoint_files import CheckpointFile

# Bytes of a file that are read at once although not all are needed: a view of a larger tensor.
_SPAN_BYTES = 1 << 22


class StoredTensor(Protocol):
    """A tensor [rows, …] in a module or a file, such as a matrix [rows, dim]. A single number is a vector [1]."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(rows, …)."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its elements."""

    def read(self, start: int, stop: int) -> Tensor:
        """Rows [start, stop) on the CPU, [stop − start, …]."""


@dataclass(frozen=True, slots=True)
class InFile:
    """A tensor in a file: element (i, j, …) is at byte `offset` + i·strides[0] + j·strides[1] + …"""

    file: CheckpointFile
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def read(self, start: int, stop: int) -> Tensor:
        """Rows [start, stop): a copy [stop − start, …]. Nothing of the file stays in memory.

        Raises:
            CheckpointError: the file has become shorter.
        """
        return self._read(self.offset + start * self.strides[0], (stop - start, *self.shape[1:]), self.strides)

    def _read(self, begin: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
        if 0 in shape:
            return torch.empty(shape, dtype=self.dtype)
        size = self.dtype.itemsize
        span = size + sum((count - 1) * stride for count, stride in zip(shape, strides, strict=True))
        # A file is not mapped: a process that reads a mapped file which was cut dies by a signal.
        if span <= max(_SPAN_BYTES, 2 * size * prod(shape)):
            numbers = self.file.read(begin, span).view(self.dtype)
            return numbers.as_strided(shape, [stride // size for stride in strides]).contiguous()
        axis = max((axis for axis, count in enumerate(shape) if count > 1), key=lambda axis: strides[axis])
        slices = [
            self._read(begin + number * strides[axis], _without(shape, axis), _without(strides, axis))
            for number in range(shape[axis])
        ]
        return torch.stack(slices, axis)


def _without(numbers: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return (*numbers[:axis], *numbers[axis + 1 :])


@dataclass(frozen=True, slots=True)
class UnreadableTensor:
    """A tensor of a checkpoint that is no plain one: it is only in the way if a model needs it.

    Attributes:
        where: the file.
        key: its key.
        kind: what it is, such as "a DTensor".
        instead: what to do.
    """

    where: str
    key: str
    kind: str
    instead: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Raises CheckpointError."""
        self._refuse()

    @property
    def dtype(self) -> torch.dtype:
        """Raises CheckpointError."""
        self._refuse()

    def read(self, start: int, stop: int) -> Tensor:  # noqa: ARG002  as every stored table
        """Raises CheckpointError."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise CheckpointError(
            f"{self.where}: {self.key!r}: expected a plain tensor, found {self.kind}: {self.instead}"
        )
