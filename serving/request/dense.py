"""The dense inputs of a request: what its scores need beside ids."""

import math
import operator
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from serving.bundle.scores import DenseInput, DensePart
from serving.errors import InvalidRequest, Reason
from serving.request.tensors import Array, Dense

# By the name of the input, [B, width].
DenseFeatures = Mapping[str, npt.ArrayLike]
NO_DENSE: DenseFeatures = MappingProxyType({})
# float32 has all integers up to here, and few beyond.
_LAST_INTEGER = 2**24


def encode_dense(dense: DenseFeatures) -> dict[str, Array]:
    """Dense inputs as float32 arrays.

    Raises:
        InvalidRequest: naming the input that is no array of numbers, or has one that FP32 has not: an integer that it
            would round, or a number that is too large.
    """
    if not isinstance(dense, Mapping):
        raise InvalidRequest(
            f"dense: expected arrays by name, {{name: [B, width]}}, got {type(dense).__name__}", Reason.DENSE
        )
    found: dict[str, Array] = {}
    for name, given in dense.items():
        try:
            array = np.asarray(given)
        except (TypeError, ValueError, RuntimeError) as error:  # torch's are RuntimeErrors
            raise InvalidRequest(f"dense input {name!r}: expected numbers: {error}", Reason.DENSE) from error
        if array.dtype.kind not in "fiub":
            raise InvalidRequest(
                f"dense input {name!r}: expected numbers of one dtype that numpy has, got {array.dtype}", Reason.DENSE
            )
        if array.dtype != np.float32:
            _check_fits(name, array, given)
        found[name] = np.ascontiguousarray(array, np.float32)
    return found


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


def wants_scores(part: DensePart | None, outputs: Collection[str]) -> bool:
    """Whether one of `outputs` is a score."""
    return part is not None and any(each.name in outputs for each in part.outputs)


def accept_dense(
    inputs: Sequence[DenseInput], given: Mapping[str, Array], samples: int, once: Collection[str] = ()
) -> Dense:
    """Take the dense inputs of one request, if they are of the right kind and size.

    Args:
        inputs: those that are expected.
        given: by name. Anything may be in it.
        samples: of the request.
        once: names of those that have one row, which counts for all samples.

    Returns:
        In the manifest's order, float32 [B, width] each.

    Raises:
        InvalidRequest: naming the input, what was expected and what came.
    """
    for name in given:
        if all(name != each.name for each in inputs):
            expected = ", ".join(repr(each.name) for each in inputs) or "none"
            raise InvalidRequest(f"dense input {name!r}: expected one of {expected}", Reason.DENSE)
    found = []
    for each in inputs:
        is_once = each.name in once
        array, shape = given.get(each.name), (1 if is_once else samples, each.width)
        rows = "a row for all samples" if is_once else "a row for each sample"
        expected = f"dense input {each.name!r}: expected float32 {list(shape)}, {rows}"
        if array is None:
            raise InvalidRequest(
                f"{expected}, got none: scores need it; ask for the output `embeddings` alone to look up without",
                Reason.DENSE,
            )
        if array.dtype != np.float32 or array.shape != shape:
            raise InvalidRequest(f"{expected}, got {array.dtype} {list(array.shape)}", Reason.DENSE)
        found.append(np.broadcast_to(array, (samples, each.width)) if is_once else array)
    return found
