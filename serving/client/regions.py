"""Shared memory for answers: regions of /dev/shm that the server writes to and that the client's arrays view."""

import threading
import uuid
import weakref
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np
import numpy.typing as npt

_SMALLEST_BYTES = 64 << 10


class Region:
    """A file in /dev/shm, registered with the server under its own name.

    Attributes:
        registered: whether the server knows it. The client sets this.
    """

    def __init__(self, size_bytes: int) -> None:
        self._memory = SharedMemory(name=f"tbe-{uuid.uuid4().hex}", create=True, size=size_bytes)
        self.registered = False

    @property
    def name(self) -> str:
        """Its name, for the server and in /dev/shm."""
        return self._memory.name

    @property
    def size_bytes(self) -> int:
        """Its size in bytes."""
        return self._memory.size

    def array(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """The array at its start: a view, not a copy."""
        return np.ndarray(shape, dtype, self._memory.buf)

    def remove(self) -> None:
        """Remove its name. The memory is freed when no array looks into it any more."""
        self._memory.unlink()


class Regions:
    """Regions that are used again. A call takes one, and gives it back when its answer is gone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: list[Region] = []
        self._free: list[Region] = []

    def take(self, size_bytes: int) -> Region:
        """A free region of at least `size_bytes`; a new one if there is none."""
        with self._lock:
            for region in self._free:
                if region.size_bytes >= size_bytes:
                    self._free.remove(region)
                    return region
            region = Region(max(_SMALLEST_BYTES, 1 << (size_bytes - 1).bit_length()))
            self._all.append(region)
            return region

    def give_back(self, region: Region) -> None:
        """Make `region` free for another call."""
        with self._lock:
            self._free.append(region)

    def give_back_after(self, array: npt.NDArray[Any], region: Region) -> None:
        """Make `region` free when `array` and all views of it are gone."""
        weakref.finalize(array, self.give_back, region)

    def close(self) -> list[Region]:
        """Remove the names of all regions. Returns those that the server knows."""
        with self._lock:
            for region in self._all:
                region.remove()
            return [region for region in self._all if region.registered]
