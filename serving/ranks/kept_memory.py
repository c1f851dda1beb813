"""Memory for answers, which is used again.

What is allocated for an answer of some MB goes back to Linux as soon as it is free, unless the allocator happens to
keep it. Then each 4 KiB of the next answer has to be asked for anew, and threads wait for each other there.
"""

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

# Most bytes that are kept. An answer that has no place among them has memory of its own.
MOST = 64 << 20


class KeptMemory:
    """Makes arrays. Memory whose array is gone, and all views of it, becomes another one.

    Args:
        dtype: of the arrays.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._blocks: list[_Block] = []
        # Engines are for one thread at a time. Who does otherwise shall not get the memory of another's answer.
        self._lock = threading.Lock()

    def array(self, rows: int, columns: int) -> npt.NDArray[Any]:
        """An array [rows, columns]. What is in it is not known."""
        with self._lock:
            return self._block(rows * columns).use(rows, columns)

    def _block(self, size: int) -> "_Block":
        """A block of `size` numbers or more that nobody uses."""
        free = [block for block in self._blocks if block.user() is None]
        block = next((each for each in free if each.memory.numel() >= size), None)
        if block is None:
            # Too small to be asked for again soon: its place is for the new one.
            self._blocks = [each for each in self._blocks if each not in free]
            block = _Block(torch.empty(size, dtype=self._dtype))
            if sum(each.memory.nbytes for each in [*self._blocks, block]) <= MOST:
                self._blocks.append(block)
        return block


def _nobody() -> None:
    return None


@dataclass(eq=False, slots=True)
class _Block:
    """Memory, and the array that is made of it: a weak reference."""

    memory: Tensor
    user: Callable[[], Any] = _nobody

    def use(self, rows: int, columns: int) -> npt.NDArray[Any]:
        # What an array of torch's memory holds is no array. So all views of it hold the array itself.
        array: npt.NDArray[Any] = self.memory[: rows * columns].view(rows, columns).numpy()
        self.user = weakref.ref(array)
        return array
