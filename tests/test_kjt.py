"""Requests as arrays: what is refused, and that merging and splitting change nothing."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving import kjt
from serving.errors import InvalidRequest
from serving.kjt import KjtRequest, Schema

NAMES = ("a", "b", "c")
ROWS = (10, 5, 100)
DIMS = (2, 3, 1)


def schema(
    *, zero: tuple[bool, ...] = (False, False, False), weighted: tuple[bool, ...] = (False, False, False)
) -> Schema:
    return Schema(
        names=NAMES,
        tables=("ta", "tb", "tc"),
        rows=np.array(ROWS, np.uint64),
        dims=np.array(DIMS, np.int64),
        zero=np.array(zero),
        feature_weighted=np.array(weighted),
        weighted=any(weighted),
        positions={name: position for position, name in enumerate(NAMES)},
    )


def ints(*numbers: int) -> Any:
    return np.array(numbers, np.int64)


def lens(*numbers: int) -> Any:
    return np.array(numbers, np.int32)


def test_a_good_request_is_taken_as_it_is() -> None:
    values = ints(0, 9, 4, 99, 0)
    request = kjt.check(schema(), values, lens(2, 0, 0, 1, 1, 1))
    assert request.features == (0, 1, 2)
    assert request.samples == 2
    assert request.offsets.tolist() == [0, 2, 2, 2, 3, 4, 5]
    assert request.bounds.tolist() == [0, 2, 3, 5]
    assert request.values is values
    assert request.dropped is None


@pytest.mark.parametrize(
    ("values", "lengths", "features", "message"),
    [
        pytest.param(ints(10), lens(1, 0, 0), None, r"feature 'a': expected an id in \[0, 10\), got 10 for sample 0", id="id = rows"),
        pytest.param(ints(0, -1), lens(1, 1, 0), None, r"feature 'b': expected an id in \[0, 5\), got -1", id="id = -1"),
        pytest.param(ints(2**32 + 5), lens(1, 0, 0), None, r"feature 'a': .* got 4294967301", id="id past int32"),
        pytest.param(ints(-(2**63)), lens(0, 0, 1), None, r"feature 'c': .* got -9223372036854775808", id="smallest id"),
        pytest.param(ints(1, 1), lens(1, 0, 0), None, r"feature 'c': .* got 2 ids for lengths that sum to 1", id="ids left over"),
        pytest.param(ints(1), lens(1, 1, 0), None, r"feature 'b': expected its bags to take ids \[1, 2\)", id="ids missing"),
        pytest.param(ints(1), lens(2, -1, 0), None, r"feature 'b': expected lengths >= 0, got -1 for sample 0", id="negative length"),
        pytest.param(ints(), lens(2**31 - 1, 2**31 - 1, 2), None, r"feature 'a': .* got 0 ids for lengths that sum to 4294967296", id="lengths that would wrap"),
        pytest.param(ints(1), lens(1, 0), None, r"lengths: expected a multiple of 3, .*'a', 'b', 'c'.* got 2", id="not divisible"),
        pytest.param(ints(1), lens(1), ("d",), r"feature 'd': expected one of 'a', 'b', 'c'", id="unknown feature"),
        pytest.param(ints(1), lens(1), ("d" * 10**6,), r"^feature 'd{64}…': expected one of 'a', 'b', 'c'$", id="endless feature"),
        pytest.param(ints(1, 1), lens(1, 1), ("b", "b"), r"feature 'b': expected each feature once", id="feature twice"),
        pytest.param(ints(), lens(), (), r"features: expected at least one", id="no feature"),
        pytest.param(np.array([1], np.int32), lens(1, 0, 0), None, r"values: expected dtype int64, got int32", id="values dtype"),
        pytest.param(ints(1), np.array([1, 0, 0], np.int64), None, r"lengths: expected dtype int32, got int64", id="lengths dtype"),
        pytest.param(ints(1).reshape(1, 1), lens(1, 0, 0), None, r"values: expected 1 dimension, got shape \[1, 1\]", id="values shape"),
    ],
)  # fmt: skip
def test_a_bad_request_is_refused_by_name(values: Any, lengths: Any, features: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        kjt.check(schema(), values, lengths, None, features)


@pytest.mark.parametrize(
    ("weighted", "weights", "message"),
    [
        pytest.param(False, np.ones(1, np.float32), "weights: expected none", id="not weighted"),
        pytest.param(True, None, "weights: expected one for each id, got none", id="missing"),
        pytest.param(True, np.ones(2, np.float32), "weights: expected 1, one for each id, got 2", id="count"),
        pytest.param(True, np.ones(1, np.float64), "weights: expected dtype float32, got float64", id="dtype"),
    ],
)
def test_bad_weights_are_refused(weighted: bool, weights: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        kjt.check(schema(weighted=(weighted,) * 3), ints(1), lens(1, 0, 0), weights)


def test_an_unweighted_table_in_a_weighted_model_counts_each_id_once() -> None:
    weights = np.array([2.0, 3.0], np.float32)
    request = kjt.check(schema(weighted=(True, False, True)), ints(1, 1), lens(1, 1, 0), weights)
    assert request.weights is not None
    assert request.weights.tolist() == [2.0, 1.0]
    assert weights.tolist() == [2.0, 3.0]


def test_policy_zero_leaves_ids_out_and_counts_them() -> None:
    values = ints(3, 10, -1, 4, 2**40)
    request = kjt.check(schema(zero=(True, False, True)), values, lens(2, 1, 0, 1, 1, 0))
    assert request.values.tolist() == [3, 4]
    assert request.lengths.tolist() == [[1, 0], [0, 1], [0, 0]]
    assert request.bounds.tolist() == [0, 1, 2, 2]
    assert request.dropped is not None
    assert request.dropped.tolist() == [2, 0, 1]
    assert values.tolist() == [3, 10, -1, 4, 2**40]


def test_policy_zero_does_not_excuse_another_table() -> None:
    with pytest.raises(InvalidRequest, match="feature 'b'"):
        kjt.check(schema(zero=(True, False, True)), ints(10, 5), lens(1, 1, 0))


@st.composite
def requests(draw: st.DrawFn, *, weighted: bool = False) -> KjtRequest:
    order = tuple(draw(st.permutations(NAMES))[: draw(st.integers(1, 3))])
    samples = draw(st.integers(0, 4))
    bags = [
        draw(st.lists(st.lists(st.integers(0, ROWS[NAMES.index(name)] - 1), max_size=4), min_size=samples, max_size=samples))
        for name in order
    ]  # fmt: skip
    values = np.array([id_ for column in bags for bag in column for id_ in bag], np.int64)
    lengths = np.array([len(bag) for column in bags for bag in column], np.int32)
    weights = np.arange(values.size, dtype=np.float32) if weighted else None
    return kjt.check(schema(weighted=(weighted,) * 3), values, lengths, weights, order)


def bags_of(request: KjtRequest) -> dict[int, list[list[tuple[int, float]]]]:
    """{feature: [[(id, weight), ...] for each sample]}."""
    ids = iter(request.values.tolist())
    weights = iter([1.0] * request.values.size if request.weights is None else request.weights.tolist())
    return {
        feature: [[(next(ids), next(weights)) for _ in range(length)] for length in row]
        for feature, row in zip(request.features, request.lengths.tolist(), strict=True)
    }


@given(
    st.one_of(st.lists(requests(), min_size=1, max_size=5), st.lists(requests(weighted=True), min_size=1, max_size=5))
)
def test_merging_keeps_every_bag(every: list[KjtRequest]) -> None:
    merged = kjt.merge(every)
    together = bags_of(merged)
    sizes = [sum(map(len, together[feature])) for feature in merged.features]
    assert np.diff(merged.bounds).tolist() == sizes
    assert set(merged.features) == {feature for request in every for feature in request.features}
    start = 0
    for request in every:
        alone = bags_of(request)
        for feature, bags in together.items():
            here = bags[start : start + request.samples]
            assert here == alone.get(feature, [[]] * request.samples)
        start += request.samples
    assert start == merged.samples


@given(st.lists(requests(), min_size=1, max_size=5))
def test_splitting_gives_each_request_its_samples_and_columns(every: list[KjtRequest]) -> None:
    merged = kjt.merge(every)
    # Each number tells its sample, feature and column.
    columns = [100 * feature + column for feature in merged.features for column in range(DIMS[feature])]
    embeddings = (1000 * np.arange(merged.samples)[:, np.newaxis] + np.array(columns)).astype(np.float32)
    answers = kjt.split(embeddings, merged, every, schema())
    start = 0
    for request, answer in zip(every, answers, strict=True):
        for sample in range(request.samples):
            assert answer[sample].tolist() == [
                1000 * (start + sample) + 100 * feature + column
                for feature in request.features
                for column in range(DIMS[feature])
            ]
        start += request.samples


def test_one_request_is_merged_and_split_without_a_copy() -> None:
    request = kjt.check(schema(), ints(1), lens(1, 0, 0))
    embeddings = np.zeros((1, 6), np.float32)
    assert kjt.merge([request]) is request
    assert np.shares_memory(kjt.split(embeddings, request, [request], schema())[0], embeddings)


def test_requests_of_the_default_order_are_split_into_views() -> None:
    request = kjt.check(schema(), ints(1), lens(1, 0, 0))
    other = dataclasses.replace(request)
    embeddings = np.zeros((2, 6), np.float32)
    for answer in kjt.split(embeddings, kjt.merge([request, other]), [request, other], schema()):
        assert np.shares_memory(answer, embeddings)
