"""Requests as arrays: what is refused, and that merging and splitting change nothing."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from serving import kjt
from serving.errors import IdsOutside, InvalidRequest, Reason
from serving.kjt import Batch, Checked, Limits, Tensors
from serving.schema import Schema, Selection

NAMES = ("a", "b", "c")
ROWS = (10, 5, 100)
DIMS = (2, 3, 1)


def schema(
    *,
    zero: tuple[bool, ...] = (False, False, False),
    default_rows: tuple[int, ...] = (-1, -1, -1),
    weighted: tuple[bool, ...] = (False, False, False),
) -> Schema:
    every = Selection(
        names=NAMES,
        key_of=NAMES,
        tables=("ta", "tb", "tc"),
        positions=np.arange(3),
        rows=np.array(ROWS, np.uint64),
        dims=np.array(DIMS, np.int64),
        zero=np.array(zero),
        default_rows=np.array(default_rows),
        weighted=np.array(weighted),
        default=True,
    )
    return Schema(every, any(weighted))


def ints(*numbers: int) -> Any:
    return np.array(numbers, np.int64)


def lens(*numbers: int) -> Any:
    return np.array(numbers, np.int32)


def tensors(values: Any, lengths: Any, weights: Any = None, features: Any = None) -> Tensors:
    return Tensors(features, values, lengths, weights)


def checked(schema: Schema, *requests: Tensors) -> Checked:
    """As the backend does it: all together, and one by one if that fails."""
    accepted = [kjt.accept(schema, request) for request in requests]
    try:
        return kjt.check(accepted)
    except InvalidRequest:
        return kjt.check([kjt.mend(request)[0] for request in accepted])


def test_a_good_request_is_taken_as_it_is() -> None:
    values = ints(0, 9, 4, 99, 0)
    request = checked(schema(), tensors(values, lens(2, 0, 0, 1, 1, 1)))
    assert request.requests[0].selection.names == NAMES
    assert request.requests[0].samples == 2
    assert request.offsets.tolist() == [0, 2, 2, 2, 3, 4, 5]
    assert request.ids.tolist() == [0, 2, 3, 5]
    assert request.values is values


def test_the_same_names_are_the_same_selection() -> None:
    one = schema()
    assert one.select(["b", "a"]) is one.select(("b", "a"))
    assert one.select(None) is one.select(None)
    assert one.select(NAMES).default
    assert not one.select(["b", "a"]).default


def test_endless_orders_of_features_take_no_endless_memory() -> None:
    names = tuple("abcdefgh")
    none: Any = np.zeros(8, np.int64)
    many = Schema(Selection(names, names, names, np.arange(8), none, none, none, none, none, True), False)
    for order in itertools.islice(itertools.permutations(names), 5000):
        assert many.select(order).names == order
    assert len(many._selections) <= 1024


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
    good = tensors(ints(1, 1), lens(1, 1, 0))
    with pytest.raises(InvalidRequest, match=message):
        checked(schema(), tensors(values, lengths, None, features))
    with pytest.raises(InvalidRequest, match=message):
        checked(schema(), good, tensors(values, lengths, None, features), good)


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        pytest.param(tensors(ints(1), lens(1), None, ("d",)), Reason.FEATURES, id="unknown feature"),
        pytest.param(tensors(ints(1), lens(1, 0)), Reason.LENGTHS, id="not divisible"),
        pytest.param(tensors(ints(1), lens(2, -1, 0)), Reason.LENGTHS, id="negative length"),
        pytest.param(tensors(ints(1, 1), lens(1, 0, 0)), Reason.LENGTHS, id="ids left over"),
        pytest.param(tensors(ints(10), lens(1, 0, 0)), Reason.IDS, id="id = rows"),
        pytest.param(tensors(ints(1), lens(1, 0, 0), np.ones(1, np.float32)), Reason.WEIGHTS, id="weights"),
        pytest.param(tensors(ints(1).reshape(1, 1), lens(1, 0, 0)), Reason.SHAPE, id="shape"),
        pytest.param(tensors(ints(1, 1, 1), lens(3, 0, 0)), Reason.SIZE, id="ids"),
        pytest.param(tensors(ints(), lens(*[0] * 9)), Reason.SIZE, id="samples"),
    ],
)
def test_a_refusal_has_the_reason_that_metrics_tell(request_: Tensors, reason: Reason) -> None:
    with pytest.raises(InvalidRequest) as refused:
        kjt.mend(kjt.accept(schema(), request_, Limits(request_ids=2, request_samples=2)))
    assert refused.value.reason is reason


def test_the_sample_of_a_negative_length_is_named_not_that_of_an_empty_bag() -> None:
    with pytest.raises(InvalidRequest, match="feature 'b': expected lengths >= 0, got -1 for sample 1"):
        checked(schema(), tensors(ints(1), lens(0, 1, 0, -1, 1, 0)))


def test_ids_outside_are_counted_for_the_table_and_row_0_may_stand_in() -> None:
    shared = replace(schema(default_rows=(0, 0, -1)).every, tables=("t", "t", "tc"))
    request = kjt.accept(Schema(shared, False), tensors(ints(10, 11, 5), lens(2, 1, 0)))
    mended, outside = kjt.mend(request)
    assert mended.values.tolist() == [0, 0, 0]
    assert outside == {"t": 3}


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
        checked(schema(weighted=(weighted,) * 3), tensors(ints(1), lens(1, 0, 0), weights))


def test_an_unweighted_table_in_a_weighted_model_counts_each_id_once() -> None:
    weights = np.array([2.0, 3.0], np.float32)
    request = checked(schema(weighted=(True, False, True)), tensors(ints(1, 1), lens(1, 1, 0), weights))
    assert request.weights is not None
    assert request.weights.tolist() == [2.0, 1.0]
    assert weights.tolist() == [2.0, 3.0]


def test_policy_zero_leaves_ids_out_and_counts_them() -> None:
    values = ints(3, 10, -1, 4, 2**40)
    request = kjt.accept(schema(zero=(True, False, True)), tensors(values, lens(2, 1, 0, 1, 1, 0)))
    mended, outside = kjt.mend(request)
    assert mended.values.tolist() == [3, 4]
    assert mended.lengths.tolist() == [1, 0, 0, 1, 0, 0]
    assert kjt.check([mended]).ids.tolist() == [0, 1, 2, 2]
    assert outside == {"ta": 2, "tc": 1}
    assert values.tolist() == [3, 10, -1, 4, 2**40]


def test_policy_default_row_reads_that_row() -> None:
    weights = np.arange(5, dtype=np.float32)
    values = ints(3, 10, -1, 4, 2**40)
    policies = schema(default_rows=(7, -1, -1), zero=(False, False, True), weighted=(True, True, True))
    mended, outside = kjt.mend(kjt.accept(policies, tensors(values, lens(2, 1, 0, 1, 1, 0), weights)))
    assert mended.values.tolist() == [3, 7, 7, 4]
    assert mended.lengths.tolist() == [2, 1, 0, 1, 0, 0]
    assert mended.weights is not None
    assert mended.weights.tolist() == [0, 1, 2, 3]
    assert outside == {"ta": 2, "tc": 1}
    assert values.tolist() == [3, 10, -1, 4, 2**40]


def test_policy_zero_does_not_excuse_another_table() -> None:
    with pytest.raises(IdsOutside, match="feature 'b'") as caught:
        checked(schema(zero=(True, False, True)), tensors(ints(10, 5), lens(1, 1, 0)))
    assert caught.value.counts == {"ta": 1, "tb": 1}


def test_a_request_larger_than_the_limits_is_refused_whatever_it_asks() -> None:
    limits = Limits(request_ids=3, request_samples=2)
    kjt.accept(schema(), tensors(ints(1, 2, 3), lens(2, 1, 0, 0, 0, 0)), limits)
    with pytest.raises(InvalidRequest, match=r"ids: expected at most 3 in a request, got 4: .*--max-request-ids"):
        kjt.accept(schema(), tensors(ints(-1, 2, 3, 4), lens(4, 0, 0)), limits)
    with pytest.raises(InvalidRequest, match=r"samples: expected at most 2 in a request, got 3"):
        kjt.accept(schema(), tensors(ints(), lens(*[0] * 9)), limits)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=30))
def test_groups_keep_the_order_and_the_limits(sizes: list[tuple[int, int]]) -> None:
    limits = Limits(call_ids=40, call_samples=50)
    requests = [
        kjt.accept(schema(), tensors(np.zeros(ids, np.int64), np.zeros(3 * samples, np.int32)))
        for ids, samples in sizes
    ]
    groups = list(kjt.grouped(requests, limits))
    assert [position for group in groups for position in group] == list(range(len(sizes)))
    for group, following in itertools.pairwise([*groups, []]):
        assert sum(sizes[position][0] for position in group) <= 40
        assert sum(sizes[position][1] for position in group) <= 50
        for position in following[:1]:  # no group could have taken one more
            ids, samples = (sum(sizes[each][axis] for each in [*group, position]) for axis in (0, 1))
            assert ids > 40 or samples > 50


def test_a_request_larger_than_a_call_is_answered_alone() -> None:
    limits = Limits(call_ids=2)
    sizes = [1, 5, 1, 1]
    requests = [kjt.accept(schema(), tensors(np.zeros(size, np.int64), lens(size, 0, 0))) for size in sizes]
    assert list(kjt.grouped(requests, limits)) == [[0], [1], [2, 3]]


@st.composite
def requests(draw: st.DrawFn, *, weighted: bool = False) -> Tensors:
    order = tuple(draw(st.permutations(NAMES))[: draw(st.integers(1, 3))])
    samples = draw(st.integers(0, 4))
    bags = [
        draw(st.lists(st.lists(st.integers(0, ROWS[NAMES.index(name)] - 1), max_size=4), min_size=samples, max_size=samples))
        for name in order
    ]  # fmt: skip
    values = np.array([id_ for column in bags for bag in column for id_ in bag], np.int64)
    lengths = np.array([len(bag) for column in bags for bag in column], np.int32)
    weights = np.arange(values.size, dtype=np.float32) if weighted else None
    return Tensors(order, values, lengths, weights)


def bags_of(features: Sequence[str], request: Any, lengths: Any) -> dict[str, list[list[tuple[int, float]]]]:
    """{feature: [[(id, weight), ...] for each sample]}."""
    ids = iter(request.values.tolist())
    weights = iter([1.0] * request.values.size if request.weights is None else request.weights.tolist())
    rows = np.asarray(lengths).reshape(len(features), -1).tolist()
    return {
        feature: [[(next(ids), next(weights)) for _ in range(length)] for length in row]
        for feature, row in zip(features, rows, strict=True)
    }


def batch_of(schema: Schema, every: Sequence[Tensors]) -> Batch:
    return kjt.merge(schema, checked(schema, *every))


@given(
    st.one_of(st.lists(requests(), min_size=1, max_size=5), st.lists(requests(weighted=True), min_size=1, max_size=5))
)
def test_merging_keeps_every_bag(every: list[Tensors]) -> None:
    weighted = every[0].weights is not None
    batch = batch_of(schema(weighted=(weighted,) * 3), every)
    together = bags_of(batch.selection.names, batch, np.diff(batch.offsets))
    assert set(together) == {feature for request in every for feature in request.features or ()}
    start = 0
    for request, accepted in zip(every, batch.requests, strict=True):
        alone = bags_of(request.features or (), request, request.lengths)
        for feature, bags in together.items():
            here = bags[start : start + accepted.samples]
            assert here == alone.get(feature, [[]] * accepted.samples)
        start += accepted.samples
    assert all(len(bags) == start for bags in together.values())


def test_very_many_requests_are_merged_in_their_order() -> None:
    """Few are sorted in order by any algorithm."""
    every = [tensors(ints(number % 10, number % 5, number), lens(1, 1, 1)) for number in range(100)]
    numbers = np.arange(100)
    expected = np.concatenate([numbers % 10, numbers % 5, numbers])
    np.testing.assert_array_equal(batch_of(schema(), every).values, expected)


@given(st.lists(requests(), min_size=1, max_size=5))
def test_splitting_gives_each_request_its_samples_and_columns(every: list[Tensors]) -> None:
    batch = batch_of(schema(), every)
    samples = sum(request.samples for request in batch.requests)
    # Each number tells its sample, feature and column.
    columns = [
        100 * NAMES.index(name) + column
        for name in batch.selection.names
        for column in range(DIMS[NAMES.index(name)])
    ]
    embeddings = (1000 * np.arange(samples)[:, np.newaxis] + np.array(columns)).astype(np.float32)
    start = 0
    for request, answer in zip(batch.requests, kjt.split(embeddings, batch), strict=True):
        for sample in range(request.samples):
            assert answer[sample].tolist() == [
                1000 * (start + sample) + 100 * NAMES.index(name) + column
                for name in request.selection.names
                for column in range(DIMS[NAMES.index(name)])
            ]
        start += request.samples


WILD = st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 12), max_size=6)
LENGTHS = st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(0, 3), min_size=0, max_size=6)


@given(st.lists(st.tuples(WILD, LENGTHS), min_size=1, max_size=4))
def test_checking_together_refuses_exactly_what_is_refused_alone(every: list[tuple[list[int], list[int]]]) -> None:
    """By plain Python: every length counts, they add up, and each id is inside its table."""

    def good(values: list[int], lengths: list[int]) -> bool:
        if min(lengths, default=0) < 0 or sum(lengths) != len(values):
            return False
        samples = len(lengths) // 3
        tables = [row for row in range(3) for bag in range(samples) for _ in range(lengths[row * samples + bag])]
        return all(0 <= id_ < ROWS[table] for id_, table in zip(values, tables, strict=True))

    every = [(values, lengths[: 3 * (len(lengths) // 3)]) for values, lengths in every]
    accepted = [kjt.accept(schema(), tensors(ints(*values), lens(*lengths))) for values, lengths in every]
    try:
        kjt.check(accepted)
        passed = True
    except InvalidRequest:
        passed = False
    assert passed == all(good(*each) for each in every)
    for request, each in zip(accepted, every, strict=True):
        if good(*each):
            mended, outside = kjt.mend(request)
            assert (mended.values.tolist(), outside) == (each[0], {})
        else:
            with pytest.raises(InvalidRequest):
                kjt.mend(request)


@given(st.lists(requests(), min_size=2, max_size=5), st.data())
def test_lengths_that_add_up_only_together_are_refused(every: list[Tensors], data: st.DataObject) -> None:
    """One request's bags would take another's ids: what one has too many, the other has too few."""
    taker, giver = data.draw(st.permutations(range(len(every))))[:2]
    assume(every[taker].lengths.size and any(every[giver].lengths))
    longer, shorter = every[taker].lengths.copy(), every[giver].lengths.copy()
    bag = data.draw(st.sampled_from(np.flatnonzero(shorter).tolist()))
    moved = data.draw(st.integers(1, int(shorter[bag])))
    longer[data.draw(st.integers(0, longer.size - 1))] += moved
    shorter[bag] -= moved
    hostile = list(every)
    hostile[taker], hostile[giver] = replace(every[taker], lengths=longer), replace(every[giver], lengths=shorter)
    accepted = [kjt.accept(schema(), request) for request in hostile]
    with pytest.raises(InvalidRequest):
        kjt.check(accepted)
    for each in (taker, giver):
        with pytest.raises(InvalidRequest):
            kjt.mend(accepted[each])


def test_one_request_is_merged_and_split_without_a_copy() -> None:
    request = tensors(ints(1), lens(1, 0, 0))
    embeddings = np.zeros((1, 6), np.float32)
    batch = batch_of(schema(), [request])
    assert batch.values is request.values
    assert np.shares_memory(kjt.split(embeddings, batch)[0], embeddings)


def test_requests_of_the_default_order_are_split_into_views() -> None:
    request = tensors(ints(1), lens(1, 0, 0))
    embeddings = np.zeros((2, 6), np.float32)
    for answer in kjt.split(embeddings, batch_of(schema(), [request, request])):
        assert np.shares_memory(answer, embeddings)
