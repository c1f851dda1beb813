"""Merging the pooled features of requests and splitting their answer changes nothing."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from serving.model.settings import ServingSettings
from serving.requests.accept import accept
from serving.requests.batches import PooledBatch
from serving.requests.limits import grouped
from serving.requests.merge import merge
from serving.requests.schema import LookupSchema
from serving.requests.types import Tensors
from tests.support.requests import DIMS, NAMES, checked, groups, ints, lens, schema, tensors


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=30))
def test_groups_keep_the_order_and_the_limits(sizes: list[tuple[int, int]]) -> None:
    limits = ServingSettings(max_call_ids=40, max_call_samples=50)
    requests = [
        accept(schema(), tensors(np.zeros(ids, np.int64), np.zeros(3 * samples, np.int32))) for ids, samples in sizes
    ]
    groups = list(grouped(requests, limits))
    assert [position for group in groups for position in group] == list(range(len(sizes)))
    for group, following in itertools.pairwise([*groups, []]):
        assert sum(sizes[position][0] for position in group) <= 40
        assert sum(sizes[position][1] for position in group) <= 50
        for position in following[:1]:  # no group could have taken one more
            ids, samples = (sum(sizes[member][axis] for member in [*group, position]) for axis in (0, 1))
            assert ids > 40 or samples > 50


def test_a_request_larger_than_a_call_is_answered_alone() -> None:
    limits = ServingSettings(max_call_ids=2)
    sizes = [1, 5, 1, 1]
    requests = [accept(schema(), tensors(np.zeros(size, np.int64), lens(size, 0, 0))) for size in sizes]
    assert list(grouped(requests, limits)) == [[0], [1], [2, 3]]


def bags_of(features: Sequence[str], request: Any, lengths: Any) -> dict[str, list[list[tuple[int, float]]]]:
    """{feature: [[(id, weight), ...] for each sample]}."""
    ids = iter(request.values.tolist())
    weights = iter([1.0] * request.values.size if request.weights is None else request.weights.tolist())
    rows = np.asarray(lengths).reshape(len(features), -1).tolist()
    return {
        feature: [[(next(ids), next(weights)) for _ in range(length)] for length in row]
        for feature, row in zip(features, rows, strict=True)
    }


def batch_of(schema: LookupSchema, every: Sequence[Tensors]) -> PooledBatch:
    return merge(schema, checked(schema, *every))


@given(st.booleans().flatmap(lambda weighted: groups(weighted=weighted)))
def test_merging_keeps_every_bag(every: list[Tensors]) -> None:
    weighted = every[0].weights is not None
    batch = batch_of(schema(weighted=(weighted,) * 3), every)
    together = bags_of(batch.feature_set.names, batch, np.diff(batch.offsets))
    assert set(together) == {feature for request in every for feature in request.features or ()}
    start = 0
    for request, accepted in zip(every, batch.members, strict=True):
        alone = bags_of(request.features or (), request, request.lengths)
        for feature, bags in together.items():
            merged_bags = bags[start : start + accepted.samples]
            assert merged_bags == alone.get(feature, [[]] * accepted.samples)
        start += accepted.samples
    assert all(len(bags) == start for bags in together.values())


def test_very_many_requests_are_merged_in_their_order() -> None:
    """Few are sorted in order by any algorithm."""
    every = [tensors(ints(number % 10, number % 5, number), lens(1, 1, 1)) for number in range(100)]
    numbers = np.arange(100)
    expected = np.concatenate([numbers % 10, numbers % 5, numbers])
    np.testing.assert_array_equal(batch_of(schema(), every).values, expected)


@given(groups())
def test_splitting_gives_each_request_its_samples_and_columns(every: list[Tensors]) -> None:
    batch = batch_of(schema(), every)
    samples = sum(request.samples for request in batch.members)
    # Each number tells its sample, feature and column.
    columns = [
        100 * NAMES.index(name) + column
        for name in batch.feature_set.names
        for column in range(DIMS[NAMES.index(name)])
    ]
    embeddings = (1000 * np.arange(samples)[:, np.newaxis] + np.array(columns)).astype(np.float32)
    start = 0
    for request, answer in zip(batch.members, batch.unmerge(embeddings), strict=True):
        for sample in range(request.samples):
            assert answer[sample].tolist() == [
                1000 * (start + sample) + 100 * NAMES.index(name) + column
                for name in request.feature_set.names
                for column in range(DIMS[NAMES.index(name)])
            ]
        start += request.samples


def test_one_request_is_merged_and_split_without_a_copy() -> None:
    request = tensors(ints(1), lens(1, 0, 0))
    embeddings = np.zeros((1, 6), np.float32)
    batch = batch_of(schema(), [request])
    assert batch.values is request.values
    assert np.shares_memory(batch.unmerge(embeddings)[0], embeddings)


def test_requests_of_the_default_order_are_split_into_views() -> None:
    request = tensors(ints(1), lens(1, 0, 0))
    embeddings = np.zeros((2, 6), np.float32)
    for answer in batch_of(schema(), [request, request]).unmerge(embeddings):
        assert np.shares_memory(answer, embeddings)


def test_requests_for_the_same_features_and_samples_keep_their_bags() -> None:
    """The path of most groups: many clients that ask for the same number of samples."""
    lengths = [lens(2, 0, 1, 0, 0, 1), lens(0, 1, 0, 3, 1, 0), lens(1, 1, 1, 1, 1, 1)]
    every = [
        tensors(np.arange(size.sum(dtype=np.int64)) % 5, size, np.arange(size.sum(), dtype=np.float32) + 10 * number)
        for number, size in enumerate(lengths)
    ]
    batch = batch_of(schema(weighted=(True,) * 3), every)
    merged = bags_of(NAMES, batch, np.diff(batch.offsets))
    alone = [bags_of(NAMES, request, request.lengths) for request in every]
    assert merged == {name: [bag for bags in alone for bag in bags[name]] for name in NAMES}
