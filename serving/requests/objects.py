"""Inputs that hold Python objects, as numpy reads them: torch tensors, pandas' NA, and integers of several dtypes.

Neither torch nor pandas is imported.
"""

import sys
from collections.abc import Iterator, Mapping
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

# The types of integers, without bool.
INTEGERS = {int, *(np.dtype(code).type for code in np.typecodes["AllInteger"])}
_LISTS = (list, tuple)
# The maximum dimensions of a numpy array.
_DEEPEST = 64


def plain(numbers: Any, deepest: int = _DEEPEST) -> Any:
    """An input without torch tensors, arrays of objects and pandas' NA.

    A tensor becomes an array; without dimensions, it becomes a numpy number. An array of objects becomes a list, and
    NA becomes None. Lists without any of these are returned unchanged.

    Args:
        numbers: an input in any form, or a list or dict of inputs.
        deepest: the number of levels of lists to inspect.

    Raises:
        ValueError: a tensor is not a dense CPU tensor of numbers.
    """
    if isinstance(numbers, np.ndarray):
        is_of_objects = numbers.dtype == np.object_ and not isinstance(numbers, np.ma.MaskedArray)
        return plain(numbers.tolist(), deepest) if is_of_objects else numbers
    if isinstance(numbers, Mapping):
        return {key: plain(item, deepest) for key, item in numbers.items()}
    if isinstance(numbers, _LISTS):
        if not _is_to_be_replaced(numbers, deepest):
            return numbers
        items = (plain(item, deepest - 1) for item in numbers)
        return tuple(items) if isinstance(numbers, tuple) else [*items]
    tensor_type, null_type = _foreign_types()
    if isinstance(numbers, tensor_type):
        return _array_of_tensor(numbers)
    return None if isinstance(numbers, null_type) else numbers


def array_of(numbers: Any) -> npt.NDArray[Any]:
    """`numbers` as an array with exact integers: numpy would convert a list of int64 and uint64 to floats.

    Raises:
        TypeError: `numbers` is a masked array, whose masked items numpy would include; or it is not an array.
        ValueError: rows have different lengths, a tensor cannot be converted, or no dtype holds all integers.
    """
    if isinstance(numbers, np.ma.MaskedArray):
        raise TypeError("a masked array: a request has no mask; fill it, or leave out what is masked")
    numbers = plain(numbers)
    array = np.asarray(numbers)
    if array.dtype.kind not in "fO" or not array.size or not isinstance(numbers, _LISTS):
        return array
    if not all(type(leaf) in INTEGERS for leaf in leaves(numbers)):
        return array
    integers = [*map(int, leaves(numbers))]
    smallest, largest = min(integers), max(integers)
    dtype = np.int64 if largest < 2**63 else np.uint64
    if smallest < np.iinfo(dtype).min or largest > np.iinfo(dtype).max:
        wrong = " and ".join(map(str, sorted({smallest, largest})))
        raise ValueError(f"got {wrong}, which no 64-bit dtype holds")
    return np.array(integers, dtype).reshape(array.shape)


def leaves(numbers: Any, deepest: int = _DEEPEST) -> Iterator[Any]:
    """The items of nested lists and arrays, in order, down to the level `deepest`."""
    for item in numbers:
        if deepest and (isinstance(item, _LISTS) or (isinstance(item, np.ndarray) and item.ndim)):
            yield from leaves(item, deepest - 1)
        else:
            yield item


def _foreign_types() -> tuple[Any, Any]:
    """The types of torch tensors and of pandas' NA; () if the library is not imported."""
    torch: Any = sys.modules.get("torch")
    pandas: Any = sys.modules.get("pandas")
    # A library that is just being imported may lack the attribute.
    return getattr(torch, "Tensor", ()), type(pandas.NA) if hasattr(pandas, "NA") else ()


def _is_to_be_replaced(level: Any, deepest: int) -> bool:
    """Whether lists have items that `plain` replaces. No Python code runs for single numbers."""
    foreign_types = _foreign_types()
    for depth in range(deepest):
        kinds = {*map(type, level)}
        if any(issubclass(kind, foreign_types) for kind in kinds):
            return True
        if np.ndarray in kinds:
            arrays = level if len(kinds) == 1 else (item for item in level if isinstance(item, np.ndarray))
            if np.dtype(np.object_) in {*map(attrgetter("dtype"), arrays)}:
                return True
        lists = {kind for kind in kinds if issubclass(kind, _LISTS)}
        if not lists or depth + 1 == deepest:
            return False
        level = [*chain.from_iterable(level if lists == kinds else (item for item in level if type(item) in lists))]
    return False


def _array_of_tensor(tensor: Any) -> Any:
    """The numbers of a tensor, as a view if numpy has their dtype. Floats of fewer than 32 bits become float32.

    Raises:
        ValueError: the tensor is not a dense CPU tensor of numbers.
    """
    if tensor.is_nested:
        raise ValueError(
            "got a nested tensor: give its values and lengths, tensor.values() and tensor.offsets().diff()"
        )
    if tensor.is_quantized:
        raise ValueError(f"got a quantized tensor of {tensor.dtype}: give its numbers, tensor.dequantize()")
    if str(tensor.layout) != "torch.strided":
        raise ValueError(f"got a tensor of the layout {tensor.layout}: give all its numbers, tensor.to_dense()")
    if tensor.device.type == "meta":
        raise ValueError("got a tensor on the device meta, which holds no numbers")
    if tensor.device.type != "cpu":
        raise ValueError(f"got a tensor on the device {tensor.device}: copy it, tensor.cpu()")
    try:
        tensor = tensor.detach().resolve_conj().resolve_neg()
        if tensor.dtype.is_floating_point and tensor.dtype.itemsize < 4:
            tensor = tensor.float()  # numpy lacks bfloat16 and the 8-bit floats; float32 has all their numbers
        return tensor.numpy()[()]
    except (TypeError, RuntimeError) as error:
        raise ValueError(f"got a {type(tensor).__name__} of {tensor.dtype} without an array: {error}") from error
