"""A file for libraries that seek, over a source that is read in ranges: an object in a store, a part of a file."""

import io
import os
from collections.abc import Callable
from typing import Any


class RangeFile(io.RawIOBase):
    """A readable file over a range reader.

    Args:
        size_bytes: the size of the file.
        read_range: returns the bytes [start, start + length) of the file. It is called within the file, for at least
            one byte.
    """

    def __init__(self, size_bytes: int, read_range: Callable[[int, int], bytes]) -> None:
        self._size_bytes, self._read_range = size_bytes, read_range
        self._position = 0

    def readable(self) -> bool:
        """As `io.IOBase`."""
        return True

    def seekable(self) -> bool:
        """As `io.IOBase`."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """As `io.IOBase`. A position before the start is the start."""
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size_bytes}[whence]
        self._position = max(0, origin + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        """As `io.RawIOBase`."""
        length = min(len(buffer), self._size_bytes - self._position)
        if length <= 0:
            return 0
        buffer[:length] = self._read_range(self._position, length)
        self._position += length
        return length
