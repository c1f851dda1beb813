"""The dense inputs of a request: the inputs of its scores beside ids. They have a row for each sample, or for each id
of a key, such as the times of a history.
"""

import math
import operator
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from serving.bundle.scores import DenseInput, InputDtype
from serving.errors import InvalidRequest, Reason, quoted
from serving.requests.arrow_columns import ArrowStream, DamagedColumn
from serving.requests.columns import WrongItem, WrongType
from serving.requests.encoding import has_boolean
from serving.requests.frames import columns_of, is_frame
from serving.requests.input_forms import Column, Nulls, convert_numbers, convert_rows
from serving.requests.objects import plain
from serving.requests.types import Array, Dense, Lengths

# By the name of the input, [B, *shape]; of one with a row for each id, [n, *shape], or the rows of each bag. Or a
# DataFrame with a column for each input.
DenseFeatures = Mapping[str, npt.ArrayLike | Column] | ArrowStream
NO_DENSE: DenseFeatures = MappingProxyType({})
# float32 can represent all integers up to this one.
_LAST_INTEGER = 2**24


def encode_dense(
    inputs: Sequence[DenseInput],
    dense: DenseFeatures,
    lengths: Mapping[str, Lengths] = MappingProxyType({}),
    *,
    frame: Any = None,
    nulls: Nulls = "refuse",
) -> dict[str, Array]:
    """Dense inputs as arrays of their dtypes.

    Args:
        inputs: the dense inputs of the model.
        dense: by name, arrays or columns [B, *shape]; for one number also [B] or [B, 1]. An input with a row for each
            id of a key is an array [n, *shape], or a list of bags, each with the rows of its ids. `dense` may also be
            a DataFrame with a column for each input. A DataFrame in place of an input has its columns side by side.
        lengths: the lengths of the bags of such keys. The lengths in `dense` must equal them.
        frame: the features; if they are a DataFrame, it has the inputs that are missing in `dense`.
        nulls: how null lists of rows are treated, as in `serving.requests.encoding.encode`. Other nulls are refused.

    Raises:
        InvalidRequest: the model does not have the input, it is not an array of the right kind of numbers, or a
            number does not fit its dtype: an integer that FP32 would round, or a number that is too large.
    """
    names = [dense_input.name for dense_input in inputs]
    if is_frame(dense):
        frame, dense = dense, {}
    if not isinstance(dense, Mapping):
        raise InvalidRequest(
            f"dense: expected arrays by name, {{name: [B, …]}}, or a DataFrame, got {type(dense).__name__}",
            Reason.DENSE,
        )
    _expect_known(inputs, dense)
    if is_frame(frame):
        dense = columns_of(frame, {*names} - dense.keys()) | dict(dense)
    return {
        dense_input.name: _encoded(dense_input, dense[dense_input.name], lengths.get(dense_input.key or ""), nulls)
        for dense_input in inputs
        if dense_input.name in dense
    }


def _encoded(dense_input: DenseInput, numbers: Any, lengths: Lengths | None, nulls: Nulls) -> Array:
    try:
        numbers = plain(numbers)
        if dense_input.key is not None:
            numbers, lengths = _rows(dense_input, numbers, lengths, nulls)
        if is_frame(numbers):  # joined last, because numpy converts integers beside floats to floats
            columns = columns_of(numbers).values()
            array = np.stack([_exact(dense_input, convert_numbers(column), column) for column in columns], axis=1)
        else:
            array = _exact(dense_input, convert_numbers(numbers), numbers)
    except WrongItem as error:
        if dense_input.key is None:
            error = error.moved(error.item, "sample")
        elif lengths is not None:
            error = error.in_bags(lengths)
        raise _refusal(dense_input.name, f"numbers: {error}") from error
    except (DamagedColumn, WrongType) as error:
        raise _refusal(dense_input.name, f"numbers or lists of numbers, got {error}") from error
    except (TypeError, ValueError) as error:
        raise _refusal(dense_input.name, f"numbers: {error}") from error
    return np.ascontiguousarray(_shaped(dense_input, array))


def _exact(dense_input: DenseInput, array: Array, numbers: Any) -> Array:
    """An array in the input's dtype, without changed integers. `numbers`: the input that the array was made of."""
    if array.dtype.kind not in "fiub":
        raise _refusal(dense_input.name, f"real numbers, got {array.dtype}")
    if dense_input.dtype is InputDtype.FP32:
        if array.dtype != np.float32:
            _check_fits(dense_input.name, array, numbers)
    else:
        _check_exact(dense_input, array, numbers)
    return array.astype(dense_input.dtype.numpy, copy=False)


def _shaped(dense_input: DenseInput, array: Array) -> Array:
    """An array as [B, *shape] if the input has one number for each row, [B] or [B, 1], or has no rows."""
    if array.shape in ((0,), (0, 0)):
        return array.reshape(0, *dense_input.shape)
    is_one_number = math.prod(dense_input.shape) == 1 and array.shape in ((array.size,), (array.size, 1))
    return array.reshape(array.size, *dense_input.shape) if is_one_number else array


def _rows(dense_input: DenseInput, rows: Any, lengths: Lengths | None, nulls: Nulls) -> tuple[Any, Lengths | None]:
    """The rows of an input with a row for each id, [n, *shape], from any form; and the lengths of their bags."""
    jagged = convert_rows(rows, len(dense_input.shape), nulls)
    if jagged.lengths is None:
        return jagged.values, lengths
    if len(jagged.lengths) and lengths is not None and not np.array_equal(jagged.lengths, lengths):
        got = f"bags of {len(jagged.lengths)} samples for ids of {len(lengths)}"
        if len(jagged.lengths) == len(lengths):
            sample = int(np.argmax(jagged.lengths != lengths))
            got = f"{jagged.lengths[sample]} rows for the {lengths[sample]} ids of sample {sample}"
        raise _refusal(dense_input.name, f"bags with a row for each id of {dense_input.key!r}, got {got}")
    no_rows = np.zeros((0, *dense_input.shape), dense_input.dtype.numpy)
    return jagged.values if len(jagged.values) else no_rows, jagged.lengths


def _check_exact(dense_input: DenseInput, array: Array, numbers: npt.ArrayLike) -> None:
    """Refuse numbers that are not integers or booleans for such an input, and integers out of range."""
    if not array.size:
        return  # numpy says of [] that it is float64
    kinds, what = ("b", "booleans") if dense_input.dtype is InputDtype.BOOL else ("iu", "integers")
    if array.dtype.kind not in kinds:
        raise _refusal(dense_input.name, f"{what}, which travel as {dense_input.dtype.value}, got {array.dtype}")
    if dense_input.dtype is InputDtype.BOOL:
        return
    if has_boolean(_as_objects(numbers)):
        raise _refusal(
            dense_input.name, f"integers, which travel as {dense_input.dtype.value}, got a boolean among them"
        )
    limits = np.iinfo(dense_input.dtype.numpy)
    for number in (int(array.min()), int(array.max())):
        if not limits.min <= number <= limits.max:
            raise _refusal(dense_input.name, f"integers that fit {dense_input.dtype.value}, got {number}")


def _check_fits(name: str, array: Array, numbers: npt.ArrayLike) -> None:
    """Refuse integers that float32 would round, such as large ids, and numbers beyond its range.

    Numbers that are floats already are rounded, as for training.
    """
    large = array[np.abs(array.astype(np.float64)) > _LAST_INTEGER]
    objects = _as_objects(numbers) if large.size and array.dtype.kind == "f" else []
    for number in objects or large.tolist():  # numpy made floats of integers beside floats
        with np.errstate(over="ignore"):
            rounded = float(np.float32(number))
        if math.isinf(rounded) and not math.isinf(number):
            raise _refusal(name, f"numbers of FP32, got {number:g}")
        with suppress(TypeError):  # it is not an integer
            if (integer := operator.index(number)) != rounded:
                raise _refusal(
                    name,
                    f"numbers of FP32, which has all integers up to {_LAST_INTEGER}, got the integer {integer}, "
                    f"which it would round to {rounded:.0f}",
                )


def _as_objects(numbers: Any) -> list[Any]:
    """The numbers of a list, or of an array or column of objects, flat; empty for other dtypes."""
    if isinstance(numbers, Sequence):
        flat: list[Any] = np.asarray(plain(numbers), object).ravel().tolist()
        return flat
    if isinstance(dtype := getattr(numbers, "dtype", None), np.dtype) and dtype == np.object_:
        return _as_objects(np.asarray(numbers).tolist())
    return []


def accept_dense(
    inputs: Sequence[DenseInput],
    dense: Mapping[str, Array],
    samples: int,
    shared: Collection[str] = (),
    ids: Mapping[str, int] = MappingProxyType({}),
) -> Dense:
    """Accept the dense inputs of a request if they have the right dtypes, shapes and sizes.

    Args:
        inputs: the expected inputs.
        dense: the inputs by name, which are not trusted.
        samples: the number of samples of the request.
        shared: the names of the inputs with one row for all samples.
        ids: the number of ids of each key that an input has a row for; of a shared key, in its only bag.

    Returns:
        The inputs in the manifest's order and in their dtypes, each [B, *shape] or [n, *shape].

    Raises:
        InvalidRequest: an input is wrong. The message names it, and what was expected.
    """
    accepted = []
    for dense_input in inputs:
        is_shared, array = dense_input.name in shared, dense.get(dense_input.name)
        if dense_input.key is not None:
            accepted.append(_accepted_by_id(inputs, dense_input, dense, ids[dense_input.key], is_shared=is_shared))
            continue
        shape = (1 if is_shared else samples, *dense_input.shape)
        if array is None or not _is_valid(dense_input, array, shape):
            _expect_known(inputs, dense)
            raise _unacceptable(dense_input, shape, "all samples" if is_shared else "each sample", array)
        accepted.append(np.broadcast_to(array, (samples, *dense_input.shape)) if is_shared else array)
    if len(dense) > len(accepted):
        _expect_known(inputs, dense)
    return accepted


def _accepted_by_id(
    inputs: Sequence[DenseInput], dense_input: DenseInput, dense: Mapping[str, Array], ids: int, *, is_shared: bool
) -> Array:
    if is_shared:
        raise InvalidRequest(
            f"once: {dense_input.name!r}: has a row for each id of {dense_input.key!r}: name that key, and both come "
            "once",
            Reason.FEATURES,
        )
    array, shape = dense.get(dense_input.name), (ids, *dense_input.shape)
    if array is None or not _is_valid(dense_input, array, shape):
        _expect_known(inputs, dense)
        raise _unacceptable(dense_input, shape, f"each id of {dense_input.key!r}", array)
    return array


def _is_valid(dense_input: DenseInput, array: Array, shape: Sequence[int]) -> bool:
    """Whether an array has the right dtype and shape, booleans that are 0 or 1, and integers in [0, rows)."""
    if array.dtype != dense_input.dtype.numpy or array.shape != shape:
        return False
    if dense_input.rows is not None:
        return not array.size or bool(array.min() >= 0 and array.max() < dense_input.rows)
    return array.dtype != np.bool_ or not (array.view(np.uint8) > 1).any()


def _refusal(name: str, expected: str) -> InvalidRequest:
    """The error for a dense input. `expected`: what was expected, and what came."""
    return InvalidRequest(f"dense input {name!r}: expected {expected}", Reason.DENSE)


def _unacceptable(dense_input: DenseInput, shape: Sequence[int], samples: str, array: Array | None) -> InvalidRequest:
    if array is None:
        got = "none: scores need it; without it, request the output `embeddings` alone, as `lookup` does"
    elif array.dtype != dense_input.dtype.numpy or array.shape != shape:
        got = f"{array.dtype} {list(array.shape)}"
    elif dense_input.rows is None:
        got = "a byte that is neither 0 nor 1"
    else:
        outside = np.argwhere((array < 0) | (array >= dense_input.rows))[0]  # type: ignore[operator]
        row = "sample" if dense_input.key is None else "row"
        got = f"{array[tuple(outside)]} in {row} {outside[0]}, which is outside [0, {dense_input.rows})"
    return _refusal(dense_input.name, f"{dense_input.dtype.numpy} {list(shape)}, a row for {samples}, got {got}")


def expect_all_keys(keys: Collection[str], requested: Collection[str]) -> None:
    """Refuse a request for scores without ids of a key.

    Args:
        keys: the keys of the model.
        requested: the keys that the request has ids for.

    Raises:
        InvalidRequest: keys have no ids. The message names them.
    """
    if lacking := [key for key in keys if key not in requested]:
        raise InvalidRequest(
            f"feature {lacking[0]!r}: expected all features, which scores need: {quoted(keys)}, got no ids of "
            f"{quoted(lacking)}: send empty bags for samples without ids, or request the output `embeddings` alone, "
            "as `lookup` does",
            Reason.FEATURES,
        )


def _expect_known(inputs: Sequence[DenseInput], names: Collection[str]) -> None:
    for name in names:
        if all(name != dense_input.name for dense_input in inputs):
            expected = ", ".join(repr(dense_input.name) for dense_input in inputs) or "none"
            raise _refusal(name, f"one of {expected}")
