"""The dense inputs of a request: what its scores need beside ids. They have a row for each sample; or for each id of
a key, as the times of a history have.
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
from serving.errors import InvalidRequest, Reason
from serving.requests.encoding import array_of, has_boolean
from serving.requests.schema import shortened
from serving.requests.types import Array, Dense, Lengths

# By the name of the input, [B, *shape]; of one with a row for each id, [n, *shape], or the rows of each bag.
DenseFeatures = Mapping[str, npt.ArrayLike]
NO_DENSE: DenseFeatures = MappingProxyType({})
# float32 has all integers up to here, and few beyond.
_LAST_INTEGER = 2**24


def encode_dense(
    inputs: Sequence[DenseInput], dense: DenseFeatures, lengths: Mapping[str, Lengths] = MappingProxyType({})
) -> dict[str, Array]:
    """Dense inputs as arrays of their dtypes.

    Args:
        inputs: those of the model.
        dense: by name. What has a row for each id of a key comes as an array [n, *shape]; or as a list of bags, as
            ids do, each with the rows of its ids.
        lengths: of the bags of such keys, which those of `dense` are compared with.

    Raises:
        InvalidRequest: naming the input that the model does not have, or that is no array of its kind of numbers, or
            has one that its dtype has not: an integer that FP32 would round, or a number that is too large.
    """
    if not isinstance(dense, Mapping):
        raise InvalidRequest(
            f"dense: expected arrays by name, {{name: [B, …]}}, got {type(dense).__name__}", Reason.DENSE
        )
    _expect_known(inputs, dense)
    return {
        each.name: _encoded(each, dense[each.name], lengths.get(each.key or ""))
        for each in inputs
        if each.name in dense
    }


def _encoded(of: DenseInput, given: npt.ArrayLike, lengths: Lengths | None) -> Array:
    try:
        if of.key is not None:
            given = _rows_of_bags(of, given, lengths)
        array = array_of(given)
    except (TypeError, ValueError, RuntimeError) as error:  # torch's are RuntimeErrors
        raise InvalidRequest(f"dense input {of.name!r}: expected numbers: {error}", Reason.DENSE) from error
    if array.dtype.kind not in "fiub":
        raise InvalidRequest(
            f"dense input {of.name!r}: expected numbers of one dtype that numpy has, got {array.dtype}", Reason.DENSE
        )
    if of.dtype is InputDtype.FP32:
        if array.dtype != np.float32:
            _check_fits(of.name, array, given)
    else:
        _check_exact(of, array, given)
    return np.ascontiguousarray(array, of.dtype.numpy)


def _rows_of_bags(of: DenseInput, given: Any, lengths: Lengths | None) -> Any:
    """What was given of an input with a row for each id, without its bags: [n, *shape]."""
    depth = len(of.shape)
    if not isinstance(given, Sequence):
        given = array_of(given)
        if given.ndim != 2 + depth:
            return given
    elif given and not any(np.ndim(each) > depth or not np.size(each) for each in given):
        return given  # a list of rows
    found = [len(bag) for bag in given]
    if found and lengths is not None and found != lengths.tolist():
        expected, got = (shortened(str(each)) for each in (lengths.tolist(), found))
        raise InvalidRequest(
            f"dense input {of.name!r}: expected bags with a row for each id of {of.key!r}, {expected}, got {got}",
            Reason.DENSE,
        )
    rows = [row for bag in given for row in bag]
    return rows or np.zeros((0, *of.shape), of.dtype.numpy)


def _check_exact(of: DenseInput, array: Array, given: npt.ArrayLike) -> None:
    """Refuse what is no integer for an integer, what is no boolean for a boolean, and an integer out of range."""
    if not array.size:
        return  # numpy says of [] that it is float64
    kinds, what = ("b", "booleans") if of.dtype is InputDtype.BOOL else ("iu", "integers")
    if array.dtype.kind not in kinds:
        raise InvalidRequest(
            f"dense input {of.name!r}: expected {what}, which travel as {of.dtype.value}, got {array.dtype}",
            Reason.DENSE,
        )
    if of.dtype is InputDtype.BOOL:
        return
    if isinstance(given, Sequence) and has_boolean(np.asarray(given, object).ravel().tolist()):
        raise InvalidRequest(
            f"dense input {of.name!r}: expected integers, which travel as {of.dtype.value}, got a boolean among them",
            Reason.DENSE,
        )
    limits = np.iinfo(of.dtype.numpy)
    for each in (int(array.min()), int(array.max())):
        if not limits.min <= each <= limits.max:
            raise InvalidRequest(
                f"dense input {of.name!r}: expected integers that fit {of.dtype.value}, got {each}", Reason.DENSE
            )


def _check_fits(name: str, array: Array, given: npt.ArrayLike) -> None:
    """Refuse integers that float32 would round, such as large ids, and numbers beyond it.

    Numbers that were given as floats are measured ones: they are rounded, as they were for training.
    """
    large = array[np.abs(array.astype(np.float64)) > _LAST_INTEGER]
    if large.size and array.dtype.kind == "f" and isinstance(given, Sequence):
        large = np.asarray(given, object).ravel()  # numpy made floats of integers beside floats
    for each in large.tolist():
        with np.errstate(over="ignore"):
            rounded = float(np.float32(each))
        if math.isinf(rounded) and not math.isinf(each):
            raise InvalidRequest(f"dense input {name!r}: expected numbers of FP32, got {each:g}", Reason.DENSE)
        with suppress(TypeError):  # it is no integer
            if (integer := operator.index(each)) != rounded:
                raise InvalidRequest(
                    f"dense input {name!r}: expected numbers of FP32, which has all integers up to {_LAST_INTEGER}, "
                    f"got the integer {integer}, which it would round to {rounded:.0f}",
                    Reason.DENSE,
                )


def accept_dense(
    inputs: Sequence[DenseInput],
    given: Mapping[str, Array],
    samples: int,
    shared: Collection[str] = (),
    ids: Mapping[str, int] = MappingProxyType({}),
) -> Dense:
    """Take the dense inputs of one request, if they are of the right kind and size.

    Args:
        inputs: those that are expected.
        given: by name. Anything may be in it.
        samples: of the request.
        shared: names of those that have one row, which counts for all samples.
        ids: how many of each key there are, where an input has a row for each. Of a key that comes once: in its bag.

    Returns:
        In the manifest's order, [B, *shape], or [n, *shape], each, of their dtypes.

    Raises:
        InvalidRequest: naming the input, what was expected and what came.
    """
    found = []
    for each in inputs:
        is_shared, array = each.name in shared, given.get(each.name)
        if each.key is not None:
            found.append(_accepted_by_id(inputs, each, given, ids[each.key], is_shared=is_shared))
            continue
        shape = (1 if is_shared else samples, *each.shape)
        if array is None or array.dtype != each.dtype.numpy or array.shape != shape or _has_others(each, array):
            _expect_known(inputs, given)
            raise _refusal(each, shape, "all samples" if is_shared else "each sample", array)
        found.append(np.broadcast_to(array, (samples, *each.shape)) if is_shared else array)
    if len(given) > len(found):
        _expect_known(inputs, given)
    return found


def _accepted_by_id(
    inputs: Sequence[DenseInput], of: DenseInput, given: Mapping[str, Array], ids: int, *, is_shared: bool
) -> Array:
    if is_shared:
        raise InvalidRequest(
            f"once: {of.name!r}: has a row for each id of {of.key!r}: name that key, and both come once",
            Reason.FEATURES,
        )
    array, shape = given.get(of.name), (ids, *of.shape)
    if array is None or array.dtype != of.dtype.numpy or array.shape != shape or _has_others(of, array):
        _expect_known(inputs, given)
        raise _refusal(of, shape, f"each id of {of.key!r}", array)
    return array


def _has_others(of: DenseInput, array: Array) -> bool:
    """Whether it has booleans that are neither 0 nor 1, or integers outside [0, rows)."""
    if of.rows is not None:
        return bool(array.size) and (array.min() < 0 or array.max() >= of.rows)
    return array.dtype == np.bool_ and bool((array.view(np.uint8) > 1).any())


def _refusal(of: DenseInput, shape: Sequence[int], samples: str, array: Array | None) -> InvalidRequest:
    if array is None:
        got = "none: scores need it; ask for the output `embeddings` alone to look up without"
    elif array.dtype != of.dtype.numpy or array.shape != shape:
        got = f"{array.dtype} {list(array.shape)}"
    elif of.rows is None:
        got = "a byte that is neither 0 nor 1"
    else:
        outside = np.argwhere((array < 0) | (array >= of.rows))[0]  # type: ignore[operator]
        row = "sample" if of.key is None else "row"
        got = f"{array[tuple(outside)]} in {row} {outside[0]}, which is outside [0, {of.rows})"
    expected = f"{of.dtype.numpy} {list(shape)}, a row for {samples}"
    return InvalidRequest(f"dense input {of.name!r}: expected {expected}, got {got}", Reason.DENSE)


def _expect_known(inputs: Sequence[DenseInput], given: Collection[str]) -> None:
    for name in given:
        if all(name != each.name for each in inputs):
            expected = ", ".join(repr(each.name) for each in inputs) or "none"
            raise InvalidRequest(f"dense input {name!r}: expected one of {expected}", Reason.DENSE)
