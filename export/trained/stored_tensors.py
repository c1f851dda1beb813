"""Tensors whose rows are read in blocks: of a module in memory, or of a file, without keeping them in memory."""

from dataclasses import dataclass
from math import prod
from typing import NoReturn, Protocol

import torch
from torch import Tensor

from export.errors import CheckpointError
from export.trained.checkpoint_files import CheckpointFile

# A view of a larger tensor is read in one span of up to this many bytes, although not all bytes are needed.
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
        """Rows [start, stop): a copy [stop − start, …]. The file is not mapped into memory.

        Raises:
            CheckpointError: the file was truncated.
        """
        return self._read(self.offset + start * self.strides[0], (stop - start, *self.shape[1:]), self.strides)

    def _read(self, begin: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
        if 0 in shape:
            return torch.empty(shape, dtype=self.dtype)
        size = self.dtype.itemsize
        span = size + sum((count - 1) * stride for count, stride in zip(shape, strides, strict=True))
        # A process that reads a mapped file which was truncated is killed by a signal, so files are not mapped.
        if span <= max(_SPAN_BYTES, 2 * size * prod(shape)):
            numbers = self.file.read(begin, span).view(self.dtype)
            return numbers.as_strided(shape, [stride // size for stride in strides]).contiguous()
        axis = max((axis for axis, count in enumerate(shape) if count > 1), key=lambda axis: strides[axis])
        slices = [
            self._read(begin + index * strides[axis], _without(shape, axis), _without(strides, axis))
            for index in range(shape[axis])
        ]
        return torch.stack(slices, axis)


def _without(numbers: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return (*numbers[:axis], *numbers[axis + 1 :])


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
class Narrowed:
    """A stored tensor, rounded to the shorter floats of a module."""

    stored: StoredTensor
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the stored tensor."""
        return self.stored.shape

    def read(self, start: int, stop: int) -> Tensor:
        """Rows [start, stop), rounded."""
        return self.stored.read(start, stop).to(self.dtype)


@dataclass(frozen=True, slots=True)
class UnreadableTensor:
    """A tensor of a checkpoint that is not plain. It is refused when a model needs it.

    Attributes:
        where: the file.
        key: its key.
        kind: its kind, such as "a DTensor".
        instead: what the user can do.
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
