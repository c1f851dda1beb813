"""Requests as arrays: what is refused, and what id policies make of the others."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from serving.errors import IdsOutside, InvalidRequest, Reason
from serving.model.settings import ServingSettings
from serving.requests.accept import accept
from serving.requests.id_policies import apply_id_policies
from serving.requests.schema import LookupSchema
from serving.requests.types import Tensors
from serving.requests.validate import validate
from tests.support.requests import NAMES, ROWS, checked, ints, lens, requests, schema, tensors


def test_a_good_request_is_taken_as_it_is() -> None:
    values = ints(0, 9, 4, 99, 0)
    request = checked(schema(), tensors(values, lens(2, 0, 0, 1, 1, 1)))
    assert request.requests[0].feature_set.names == NAMES
    assert request.requests[0].samples == 2
    assert request.offsets.tolist() == [0, 2, 2, 2, 3, 4, 5]
    assert request.id_bounds.tolist() == [0, 2, 3, 5]
    assert request.values is values


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
        pytest.param(np.array([1], np.uint32), lens(1, 0, 0), None, r"values: expected dtype int64, got uint32", id="values dtype"),
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


def test_an_id_is_checked_against_its_own_table_after_empty_features() -> None:
    assert checked(schema(), tensors(ints(99, 99), lens(0, 0, 0, 0, 1, 1))).id_bounds.tolist() == [0, 0, 0, 2]
    assert checked(schema(), tensors(ints(9, 9), lens(2, 0, 0))).id_bounds.tolist() == [0, 2, 2, 2]
    with pytest.raises(IdsOutside, match=r"feature 'c': expected an id in \[0, 100\), got 100 for sample 0"):
        checked(schema(), tensors(ints(100), lens(0, 0, 1)))


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
        apply_id_policies(accept(schema(), request_, ServingSettings(max_request_ids=2, max_request_samples=2)))
    assert refused.value.reason is reason


def test_the_sample_of_a_negative_length_is_named() -> None:
    with pytest.raises(InvalidRequest, match="feature 'b': expected lengths >= 0, got -1 for sample 1"):
        checked(schema(), tensors(ints(1), lens(0, 1, 0, -1, 1, 0)))


def test_ids_outside_are_counted_by_table_and_may_read_row_0() -> None:
    shared = replace(schema(default_rows=(0, 0, -1)).all_features, tables=("t", "t", "tc"))
    request = accept(LookupSchema(shared, False), tensors(ints(10, 11, 5), lens(2, 1, 0)))
    changed, outside = apply_id_policies(request)
    assert changed.values.tolist() == [0, 0, 0]
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
    request = accept(schema(zero=(True, False, True)), tensors(values, lens(2, 1, 0, 1, 1, 0)))
    changed, outside = apply_id_policies(request)
    assert changed.values.tolist() == [3, 4]
    assert changed.lengths.tolist() == [1, 0, 0, 1, 0, 0]
    assert validate([changed]).id_bounds.tolist() == [0, 1, 2, 2]
    assert outside == {"ta": 2, "tc": 1}
    assert values.tolist() == [3, 10, -1, 4, 2**40]


def test_policy_default_row_reads_that_row() -> None:
    weights = np.arange(5, dtype=np.float32)
    values = ints(3, 10, -1, 4, 2**40)
    policies = schema(default_rows=(7, -1, -1), zero=(False, False, True), weighted=(True, True, True))
    changed, outside = apply_id_policies(accept(policies, tensors(values, lens(2, 1, 0, 1, 1, 0), weights)))
    assert changed.values.tolist() == [3, 7, 7, 4]
    assert changed.lengths.tolist() == [2, 1, 0, 1, 0, 0]
    assert changed.weights is not None
    assert changed.weights.tolist() == [0, 1, 2, 3]
    assert outside == {"ta": 2, "tc": 1}
    assert values.tolist() == [3, 10, -1, 4, 2**40]


@given(
    st.lists(requests(), min_size=1, max_size=4),
    st.tuples(st.booleans(), st.booleans(), st.booleans()),
    st.integers(0, 2**32 - 1),
)
def test_policy_modulo_makes_a_row_of_every_int64(
    batch: list[Tensors], modulo: tuple[bool, bool, bool], seed: int
) -> None:
    """Alone and merged, beside features of other policies; numpy is the oracle."""
    random = np.random.default_rng(seed)
    found_in, extremes = [], ints(-(2**63), -(2**63) + 1, -1, 2**63 - 1, 2**40)
    for number, request in enumerate(batch):
        assert request.features is not None
        sizes = request.lengths.reshape(len(request.features), -1).sum(axis=1)
        rows = np.repeat([ROWS[NAMES.index(name)] for name in request.features], sizes)
        is_modulo = np.repeat([modulo[NAMES.index(name)] for name in request.features], sizes)
        changed = is_modulo & random.choice([True, False], is_modulo.size)
        values = np.where(changed, random.choice(extremes, is_modulo.size), request.values)
        batch[number] = replace(request, values=values)
        found_in.append([int(id_) % int(row_count) for id_, row_count in zip(values, rows, strict=True)])
    before = [request.values.copy() for request in batch]
    accepted = [accept(schema(modulo=modulo), request) for request in batch]
    assert validate(accepted).values.tolist() == [id_ for feature_rows in found_in for id_ in feature_rows]
    for request, original, expected in zip(batch, before, found_in, strict=True):
        np.testing.assert_array_equal(request.values, original)  # the caller's own
        changed_by_policies, counts = apply_id_policies(accept(schema(modulo=modulo), request))
        assert validate([changed_by_policies]).values.tolist() == expected
        assert counts == {}


def test_policy_modulo_works_beside_refused_and_dropped_ids() -> None:
    policies = schema(modulo=(True, False, False), zero=(False, False, True))
    with pytest.raises(IdsOutside, match=r"feature 'b': expected an id in \[0, 5\), got 5") as caught:
        checked(policies, tensors(ints(10, 5), lens(1, 1, 0)))
    assert caught.value.counts == {"tb": 1}
    accepted = checked(policies, tensors(ints(-1, 4, 100, 7), lens(1, 1, 2)))
    assert accepted.values.tolist() == [9, 4, 7]


def test_policy_zero_of_one_table_does_not_apply_to_another() -> None:
    with pytest.raises(IdsOutside, match="feature 'b'") as caught:
        checked(schema(zero=(True, False, True)), tensors(ints(10, 5), lens(1, 1, 0)))
    assert caught.value.counts == {"ta": 1, "tb": 1}


def test_a_request_beyond_the_limits_is_refused_for_any_outputs() -> None:
    limits = ServingSettings(max_request_ids=3, max_request_samples=2)
    accept(schema(), tensors(ints(1, 2, 3), lens(2, 1, 0, 0, 0, 0)), limits)
    with pytest.raises(InvalidRequest, match=r"ids: expected at most 3 in a request, got 4: .*--max-request-ids"):
        accept(schema(), tensors(ints(-1, 2, 3, 4), lens(4, 0, 0)), limits)
    with pytest.raises(InvalidRequest, match=r"samples: expected at most 2 in a request, got 3"):
        accept(schema(), tensors(ints(), lens(*[0] * 9)), limits)


WILD = st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 12), max_size=6)

LENGTHS = st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(0, 3), min_size=0, max_size=6)


@given(st.lists(st.tuples(WILD, LENGTHS), min_size=1, max_size=4))
def test_validating_together_refuses_exactly_the_requests_refused_alone(
    every: list[tuple[list[int], list[int]]],
) -> None:
    """By plain Python: every length counts, they add up, and each id is inside its table."""

    def good(values: list[int], lengths: list[int]) -> bool:
        if min(lengths, default=0) < 0 or sum(lengths) != len(values):
            return False
        samples = len(lengths) // 3
        tables = [row for row in range(3) for bag in range(samples) for _ in range(lengths[row * samples + bag])]
        return all(0 <= id_ < ROWS[table] for id_, table in zip(values, tables, strict=True))

    every = [(values, lengths[: 3 * (len(lengths) // 3)]) for values, lengths in every]
    accepted = [accept(schema(), tensors(ints(*values), lens(*lengths))) for values, lengths in every]
    try:
        validate(accepted)
        passed = True
    except InvalidRequest:
        passed = False
    assert passed == all(good(*case) for case in every)
    for request, case in zip(accepted, every, strict=True):
        if good(*case):
            changed, outside = apply_id_policies(request)
            assert (changed.values.tolist(), outside) == (case[0], {})
        else:
            with pytest.raises(InvalidRequest):
                apply_id_policies(request)


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
    accepted = [accept(schema(), request) for request in hostile]
    with pytest.raises(InvalidRequest):
        validate(accepted)
    for index in (taker, giver):
        with pytest.raises(InvalidRequest):
            apply_id_policies(accepted[index])
