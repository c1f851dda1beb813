"""Buffers for answers, which are used again.

The allocator mostly returns the memory of an answer of some MB to Linux as soon as it is free. The next answer then
takes a page fault for every 4 KiB, and threads wait for each other in the kernel.
"""

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

# Most bytes that a pool keeps. An answer beyond them gets memory that is freed with it.
MOST = 64 << 20


class BufferPool:
    """Makes arrays. The memory of an array is used again when the array and all views of it are gone.

    Args:
        dtype: of the arrays.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._blocks: list[_Block] = []
        # An engine is for one thread at a time. Should two call it, they must not get the same memory.
        self._lock = threading.Lock()

    def array(self, rows: int, columns: int) -> npt.NDArray[Any]:
        """An array [rows, columns] of the pool's dtype, not initialized."""
        with self._lock:
            return self._block(rows * columns).use(rows, columns)

    def _block(self, size: int) -> "_Block":
        """A free block of at least `size` numbers."""
        free = [block for block in self._blocks if block.user() is None]
        block = next((free_block for free_block in free if free_block.memory.numel() >= size), None)
        if block is None:
            # Drop the free blocks: all are too small. The new one takes their place.
            self._blocks = [used for used in self._blocks if used not in free]
            block = _Block(torch.empty(size, dtype=self._dtype))
            if sum(kept_block.memory.nbytes for kept_block in [*self._blocks, block]) <= MOST:
                self._blocks.append(block)
        return block


def _nobody() -> None:
    return None


@dataclass(eq=False, slots=True)
class _Block:
    """Memory, and a weak reference to the array over it."""

    memory: Tensor
    user: Callable[[], Any] = _nobody

    def use(self, rows: int, columns: int) -> npt.NDArray[Any]:
        # This array's own base is no array but a tensor. So numpy makes the array the base of all its views.
        array: npt.NDArray[Any] = self.memory[: rows * columns].view(rows, columns).numpy()
        self.user = weakref.ref(array)
        return array
