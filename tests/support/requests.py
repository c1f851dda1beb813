"""Requests as arrays, over three small tables."""

from typing import Any

import numpy as np
from hypothesis import strategies as st

from serving.requests.accept import accept
from serving.requests.schema import FeatureSet, LookupSchema
from serving.requests.types import Tensors, ValidatedRequests
from serving.requests.validate import validate_each

NAMES = ("a", "b", "c")

ROWS = (10, 5, 100)

DIMS = (2, 3, 1)


def schema(
    *,
    zero: tuple[bool, ...] = (False, False, False),
    default_rows: tuple[int, ...] = (-1, -1, -1),
    modulo: tuple[bool, ...] = (False, False, False),
    weighted: tuple[bool, ...] = (False, False, False),
    sequence: tuple[bool, ...] = (False, False, False),
) -> LookupSchema:
    features = FeatureSet(
        names=NAMES,
        key_of=NAMES,
        tables=("ta", "tb", "tc"),
        positions=np.arange(3),
        rows=np.array(ROWS, np.uint64),
        dims=np.array(DIMS, np.int64),
        zero=np.array(zero),
        default_rows=np.array(default_rows),
        modulo=np.array(modulo),
        id_maps=None,
        maps=np.full(3, -1),
        position_weights=None,
        first_weights=np.full(3, -1),
        longest_bags=np.full(3, 2**63 - 1),
        weighted=np.array(weighted),
        sequence=np.array(sequence),
        default=True,
    )
    return LookupSchema(features, any(weighted))


def ints(*numbers: int) -> Any:
    return np.array(numbers, np.int64)


def lens(*numbers: int) -> Any:
    return np.array(numbers, np.int32)


def tensors(values: Any, lengths: Any, weights: Any = None, features: Any = None) -> Tensors:
    return Tensors(features, values, lengths, weights)


def checked(schema: LookupSchema, *requests: Tensors) -> ValidatedRequests:
    """As the engine does it: all together, and one by one if that fails."""
    accepted, _, errors, _ = validate_each([accept(schema, request) for request in requests])
    for error in errors.values():
        raise error
    return accepted


@st.composite
def requests(draw: st.DrawFn, *, weighted: bool = False) -> Tensors:
    """A request for some features, in any order."""
    return draw(_requests(weighted, draw(_orders()), draw(_SAMPLES)))


@st.composite
def groups(draw: st.DrawFn, *, weighted: bool = False) -> list[Tensors]:
    """Requests to merge: all for the same features and number of samples, or each for its own."""
    if draw(st.booleans()):
        return draw(st.lists(requests(weighted=weighted), min_size=1, max_size=5))
    return draw(st.lists(_requests(weighted, draw(_orders()), draw(_SAMPLES)), min_size=1, max_size=5))


_SAMPLES = st.integers(0, 4)


@st.composite
def _orders(draw: st.DrawFn) -> tuple[str, ...]:
    return tuple(draw(st.permutations(NAMES))[: draw(st.integers(1, 3))])


@st.composite
def _requests(draw: st.DrawFn, weighted: bool, order: tuple[str, ...], samples: int) -> Tensors:
    bags = [
        draw(st.lists(st.lists(st.integers(0, ROWS[NAMES.index(name)] - 1), max_size=4), min_size=samples, max_size=samples))
        for name in order
    ]  # fmt: skip
    values = np.array([id_ for column in bags for bag in column for id_ in bag], np.int64)
    lengths = np.array([len(bag) for column in bags for bag in column], np.int32)
    # Each id has another weight in each request.
    weights = draw(st.integers(0, 9)) + np.arange(values.size, dtype=np.float32) if weighted else None
    return Tensors(order, values, lengths, weights)
