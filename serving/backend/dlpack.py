"""Tensors of Triton's Python backend as numpy arrays, by DLPack.

The backend's own `as_numpy()` and `Tensor(name, array)` need the numpy that its stub was built for. The stub of
Triton 2.51 was built for numpy 1. Beside numpy 2, the first returns wrong numbers and the second makes an empty
tensor. DLPack works beside both.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from serving.requests.types import Array


def to_array(tensor: Any) -> Array:
    """A copy of an input, aligned and writable. Triton's own memory is unaligned, and free after the request."""
    array: Array = np.from_dlpack(tensor).copy()
    return array


def to_tensor(from_dlpack: Callable[[str, Any], Any], name: str, array: Array) -> Any:
    """An output [1, *shape] over the memory of an array [*shape], which it keeps alive.

    Args:
        from_dlpack: `pb_utils.Tensor.from_dlpack`.
        name: of the output.
        array: of any shape and of a dtype that Triton has. It is copied if it is read-only or not contiguous.
    """
    if not (array.flags.c_contiguous and array.flags.writeable):
        array = array.copy()
    shape = (1, *array.shape)
    # The stub compares strides with these. numpy and torch have others for tensors without numbers.
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    # By torch: the stub renames the capsule, and numpy then complains when it frees one.
    return from_dlpack(name, torch.from_numpy(array).as_strided(shape, strides))
