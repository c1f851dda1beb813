"""Answers through system shared memory: regions that the server writes to and the client's arrays look into."""

import threading
import uuid
import weakref
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np
import numpy.typing as npt

_SMALLEST_BYTES = 64 << 10


class Region:
    """A piece of /dev/shm, registered with the server under the name of its own.

    Attributes:
        registered: whether the server was told of it; the client sets it.
    """

    def __init__(self, size_bytes: int) -> None:
        self._memory = SharedMemory(name=f"tbe-{uuid.uuid4().hex}", create=True, size=size_bytes)
        self.registered = False

    @property
    def name(self) -> str:
        """Its name, with the server and in /dev/shm."""
        return self._memory.name

    @property
    def size_bytes(self) -> int:
        """How much it holds."""
        return self._memory.size

    def array(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """What lies at its start; not a copy."""
        return np.ndarray(shape, dtype, self._memory.buf)

    def remove(self) -> None:
        """Remove the name; the memory goes when nothing looks into it any more."""
        self._memory.unlink()


class Regions:
    """Regions to be used again. One is taken for each call, and given back when nothing of its answer is left."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: list[Region] = []
        self._free: list[Region] = []

    def take(self, size_bytes: int) -> Region:
        """A region of at least `size_bytes` that nobody uses."""
        with self._lock:
            for region in self._free:
                if region.size_bytes >= size_bytes:
                    self._free.remove(region)
                    return region
            region = Region(max(_SMALLEST_BYTES, 1 << (size_bytes - 1).bit_length()))
            self._all.append(region)
            return region

    def give_back(self, region: Region) -> None:
        """Let another call have it."""
        with self._lock:
            self._free.append(region)

    def give_back_after(self, array: npt.NDArray[Any], region: Region) -> None:
        """Give `region` back when `array` and all views of it are gone."""
        weakref.finalize(array, self.give_back, region)

    def close(self) -> list[Region]:
        """Remove all names; returns the regions of which the server was told."""
        with self._lock:
            for region in self._all:
                region.remove()
            return [region for region in self._all if region.registered]
