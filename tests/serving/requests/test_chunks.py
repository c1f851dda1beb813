"""A request that is cut into chunks: each is the request for its samples, and all together have every sample once."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.errors import InvalidRequest
from serving.requests.answers import JaggedRows
from serving.requests.chunks import ChunkLimits, chunk_limits, cut, engine_chunk_limits, joined
from serving.requests.encoding import encode
from serving.requests.types import Tensors

BAGS = st.lists(st.lists(st.integers(0, 9), max_size=5), min_size=0, max_size=12)


def request(bags: dict[str, Any], *, weighted: bool) -> Tensors:
    """With a number for each sample, and one for each id of the last feature."""
    columns: dict[str, Any] = {
        name: (
            np.array([id_ for bag in column for id_ in bag], np.int64),
            np.array([*map(len, column)], np.int32),
            *([np.array([id_ / 2 for bag in column for id_ in bag], np.float32)] if weighted else []),
        )
        for name, column in bags.items()
    }
    last = [*bags.values()][-1]
    dense = {
        "price": np.array([[len(bag)] for bag in last], np.float32).reshape(len(last), 1),
        "times": np.array([10 * id_ for bag in last for id_ in bag], np.float32),
    }
    return encode(columns, [*bags] if weighted else (), dense=dense)


@given(data=st.data(), max_samples=st.integers(1, 12), max_ids=st.integers(1, 30), weighted=st.booleans())
def test_a_chunk_is_the_request_for_its_samples(
    data: st.DataObject, max_samples: int, max_ids: int, weighted: bool
) -> None:
    first = data.draw(BAGS)
    other = data.draw(st.lists(st.lists(st.integers(0, 9), max_size=5), min_size=len(first), max_size=len(first)))
    bags = {"a": first, "b": other}
    chunks = [*cut(request(bags, weighted=weighted), ChunkLimits(max_samples, max_ids), {"times": "b"})]
    bounds = np.cumsum([0, *(chunk.lengths.size // 2 for chunk in chunks)])
    assert bounds[-1] == len(first)
    for chunk, (start, end) in zip(chunks, pairwise(bounds), strict=True):
        expected = request({name: column[start:end] for name, column in bags.items()}, weighted=weighted)
        assert end - start <= max_samples
        assert chunk.values.size <= max_ids or end - start == 1
        for field in ("values", "lengths", "weights"):
            np.testing.assert_array_equal(getattr(chunk, field), getattr(expected, field))
        assert {name: rows.tolist() for name, rows in chunk.dense.items()} == {
            name: rows.tolist() for name, rows in expected.dense.items()
        }


def test_a_request_within_the_limits_is_not_copied() -> None:
    tensors = request({"a": [[1], [2]]}, weighted=False)
    assert [*cut(tensors, ChunkLimits(2, 2), {})] == [tensors]


def test_inconsistent_lengths_are_left_to_the_server() -> None:
    tensors = Tensors(("a",), np.arange(5), np.array([1, 1], np.int32))
    assert [*cut(tensors, ChunkLimits(1, 1), {})] == [tensors]
    with pytest.raises(InvalidRequest, match="lengths: expected a multiple of 2"):
        next(cut(Tensors(("a", "b"), np.arange(3), np.array([1, 1, 1], np.int32)), ChunkLimits(1, 1), {}))


def test_chunk_limits_are_the_lowest_of_all_limits() -> None:
    assert chunk_limits([8, 8]) == ChunkLimits(4096, 128 << 10)
    assert chunk_limits([8, 8], max_samples=10, max_ids=20) == ChunkLimits(10, 20)
    assert chunk_limits([1 << 20] * 4) == ChunkLimits(4, 16)
    assert chunk_limits([1 << 30]) == ChunkLimits(1, 1)
    assert engine_chunk_limits([8, 8], has_sequences=True) == chunk_limits([8, 8])
    assert engine_chunk_limits([8, 8], has_sequences=False) == ChunkLimits(4096, 2 << 20)


def test_answers_are_joined_sample_after_sample() -> None:
    rows = [JaggedRows(np.full((size, 2), size, np.float32), np.array([size], np.int32)) for size in (2, 0, 1)]
    answer = joined([{"x": np.full((1, 3), number), "rows": rows[number]} for number in range(3)])
    assert answer["x"][:, 0].tolist() == [0, 1, 2]
    assert answer["rows"].lengths.tolist() == [2, 0, 1]
    assert answer["rows"].values[:, 0].tolist() == [2, 2, 1]
