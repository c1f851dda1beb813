"""Tensors of Triton's Python backend as numpy arrays, by DLPack.

The backend's own `as_numpy()` and `Tensor(name, array)` need the numpy that its stub was built for. The stub of
Triton 2.51 was built for numpy 1. Beside numpy 2, the first returns wrong numbers and the second makes an empty
tensor. DLPack works beside both.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch.utils.dlpack

from serving.requests.types import Array

# torch does not export it to type checkers. `Tensor.__dlpack__` checks more, and takes three times as long.
_capsule: Callable[[torch.Tensor], Any] = torch.utils.dlpack.to_dlpack  # type: ignore[attr-defined]


def to_array(tensor: Any) -> Array:
    """A copy of an input, aligned and writable. Triton's own memory is unaligned, and free after the request."""
    array: Array = np.from_dlpack(_Input(tensor)).copy()
    return array


class _Input:
    """An input of a request, for numpy 2. The stub's `__dlpack__` knows no keywords, and its refusal takes time."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __dlpack__(self, **_: object) -> Any:
        return self._tensor.to_dlpack()

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0  # the CPU


def to_tensor(from_dlpack: Callable[[str, Any], Any], name: str, array: Array) -> Any:
    """An output [1, *shape] over the memory of an array [*shape], which it keeps alive.

    Args:
        from_dlpack: `pb_utils.Tensor.from_dlpack`.
        name: of the output.
        array: of any shape and of a dtype that Triton has. It is copied if it is read-only or not contiguous.
    """
    flags = array.flags
    if not (flags.c_contiguous and flags.writeable):
        array = array.copy()
    tensor = torch.from_numpy(array[np.newaxis])
    if not array.size:  # numpy and torch have other strides for tensors without numbers than the stub expects
        shape = tensor.shape
        tensor = tensor.as_strided(shape, [math.prod(shape[axis + 1 :]) for axis in range(len(shape))])
    # By torch: the stub renames the capsule, and numpy then complains when it frees one.
    return from_dlpack(name, _capsule(tensor))
