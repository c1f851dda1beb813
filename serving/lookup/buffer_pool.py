"""Reusable buffers for answers.

The allocator mostly returns the memory of an answer of some MB to Linux as soon as it is freed. The next answer then
causes a page fault for every 4 KiB, and threads wait for each other in the kernel.
"""

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

# Maximum bytes that a pool keeps. A larger answer gets memory that is freed with it.
MOST = 64 << 20


class BufferPool:
    """Makes arrays. The memory of an array is reused when the array and all views of it are deleted.

    Args:
        dtype: the dtype of the arrays.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._blocks: list[_Block] = []
        # An engine is for one thread at a time. If two threads call it anyway, they must not get the same memory.
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
            # Drop the free blocks, which are all too small, in favour of the new one.
            self._blocks = [used for used in self._blocks if used not in free]
            block = _Block(torch.empty(size, dtype=self._dtype))
            if sum(kept_block.memory.nbytes for kept_block in [*self._blocks, block]) <= MOST:
                self._blocks.append(block)
        return block


@dataclass(eq=False, slots=True)
class _Block:
    """Memory, and a weak reference to the array over it."""

    memory: Tensor
    user: Callable[[], Any] = lambda: None

    def use(self, rows: int, columns: int) -> npt.NDArray[Any]:
        # The base of this array is a tensor instead of an array, so numpy makes the array the base of all its views.
        array: npt.NDArray[Any] = self.memory[: rows * columns].view(rows, columns).numpy()
        self.user = weakref.ref(array)
        return array
