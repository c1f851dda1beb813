"""A request of a peer: arrays [B, width] by name, `ids` and, of a whole model, `dense`. There is no torch here."""

from collections.abc import Mapping

import numpy as np

Arrays = dict[str, np.ndarray]
# Dtype and width of each.
Inputs = Mapping[str, tuple[type, int]]


def pack(arrays: Arrays) -> bytes:
    """As raw bytes: one array behind the other."""
    return b"".join(array.tobytes() for array in arrays.values())


def unpack(data: bytes, inputs: Inputs) -> Arrays:
    """What `pack` made."""
    sizes = {name: np.dtype(dtype).itemsize * width for name, (dtype, width) in inputs.items()}
    samples = len(data) // sum(sizes.values())
    arrays, start = {}, 0
    for name, (dtype, width) in inputs.items():
        arrays[name] = np.frombuffer(data, dtype, samples * width, start).reshape(samples, width)
        start += samples * sizes[name]
    return arrays
