"""What people have, as the tensors of a request."""

from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch
from torchrec import KeyedJaggedTensor

from serving.errors import ConfigurationError, InvalidRequest, Reason
from serving.model.settings import ServingSettings
from serving.requests.answers import decode
from serving.requests.encoding import encode

MA: Any = np.ma  # its functions have types from numpy 2 on
MASKED = MA.masked_array([3, 5], [False, True])
LISTS = {"a": [[3, 5], [], [1]], "b": [[2], [0], []]}
VALUES, LENGTHS = [3, 5, 1, 2, 0], [2, 0, 1, 1, 1, 0]


def as_arrays(dtype: type[np.integer[Any]]) -> dict[str, Any]:
    return {
        "a": (np.array([3, 5, 1], dtype), np.array([2, 0, 1], dtype)),
        "b": (np.array([2, 0], dtype), np.array([1, 1, 0], dtype)),
    }


@pytest.mark.parametrize(
    "features",
    [
        pytest.param(LISTS, id="lists"),
        pytest.param({"a": [np.array([3, 5]), np.array([]), (1,)], "b": [[2], [0], []]}, id="lists of arrays"),
        pytest.param(as_arrays(np.int64), id="int64 arrays"),
        pytest.param(as_arrays(np.uint8), id="uint8 arrays"),
        pytest.param({"a": ([3, 5, 1], [2, 0, 1]), "b": [[2], [0], []]}, id="arrays and lists"),
        pytest.param(
            {"a": {"values": [3, 5, 1], "lengths": np.array([2, 0, 1])}, "b": LISTS["b"]}, id="named arrays"
        ),
        pytest.param(
            {"a": [(3, 5), torch.tensor([], dtype=torch.int64), [1]], "b": LISTS["b"]}, id="bags of any kind"
        ),
        pytest.param(
            KeyedJaggedTensor.from_lengths_sync(["a", "b"], torch.tensor(VALUES), torch.tensor(LENGTHS)), id="KJT"
        ),
    ],
)
def test_every_form_gives_the_same_tensors(features: Any) -> None:
    tensors = encode(features)
    assert tensors.features == ("a", "b")
    assert tensors.values.dtype == np.int64
    assert tensors.values.tolist() == VALUES
    assert tensors.lengths.dtype == np.int32
    assert tensors.lengths.tolist() == LENGTHS
    assert tensors.weights is None


@pytest.mark.parametrize(
    "ids",
    [
        pytest.param([3, 5, 1], id="list"),
        pytest.param([np.int32(3), np.int64(5), 1], id="list of numpy's integers"),
        pytest.param(range(5, 2, -1), id="range"),
        pytest.param(np.array([3, 5, 1], np.uint8), id="array"),
        pytest.param(torch.tensor([3, 5, 1], dtype=torch.int32), id="tensor"),
    ],
)
def test_a_flat_list_of_ids_has_one_for_each_sample(ids: Any) -> None:
    tensors = encode({"a": ids, "b": [[7], [], [8, 9]]})
    assert tensors.values.dtype == np.int64
    assert tensors.values.tolist() == [*map(int, ids), 7, 8, 9]
    assert tensors.lengths.tolist() == [1, 1, 1, 1, 0, 2]


def objects(*items: Any) -> Any:
    array = np.empty(len(items), object)
    for position, item in enumerate(items):
        array[position] = item
    return array


@pytest.mark.parametrize(
    ("ids", "values", "lengths"),
    [
        pytest.param([[3, 5], None, []], [3, 5], [2, 0, 0], id="a list"),
        pytest.param([[None], [3, None, 5], None], [3, 5], [0, 2, 0], id="ids of lists"),
        pytest.param([3, None, 5], [3, 5], [1, 0, 1], id="ids of a list"),
        pytest.param([None, None], [], [0, 0], id="nothing else"),
        pytest.param([[3, 5], pd.NA, []], [3, 5], [2, 0, 0], id="NA for a bag"),
        pytest.param([[3, pd.NA, 5]], [3, 5], [2], id="NA in a bag"),
        pytest.param([3, pd.NA, 5], [3, 5], [1, 0, 1], id="NA among ids"),
        pytest.param(pd.Series([[3, pd.NA], [5]]), [3, 5], [1, 1], id="NA in a bag of a column"),
        pytest.param(objects(np.array([3, pd.NA], object), [5]), [3, 5], [1, 1], id="NA in an array"),
        pytest.param(objects(3, None, np.int8(5)), [3, 5], [1, 0, 1], id="ids of an object array"),
        pytest.param(objects([3, 5], None, np.array([7])), [3, 5, 7], [2, 0, 1], id="bags of an object array"),
        pytest.param(
            objects(np.array([3, 5]), None, np.array([])), [3, 5], [2, 0, 0], id="arrays of an object array"
        ),
    ],
)
def test_nulls_are_refused_or_left_out(ids: Any, values: list[int], lengths: list[int]) -> None:
    tensors = encode({"a": ids}, nulls="empty")
    assert (tensors.values.tolist(), tensors.lengths.tolist()) == (values, lengths)
    assert tensors.values.dtype == np.int64
    assert tensors.lengths.dtype == np.int32
    first = next(sample for sample, bag in enumerate(ids) if np.any(pd.isna(bag)))
    with pytest.raises(InvalidRequest, match=rf"feature 'a': expected no nulls, got one in sample {first}: fill it"):
        encode({"a": ids})


def test_an_unknown_nulls_option_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="nulls: expected one of 'refuse', 'empty', got 'drop'"):
        encode({"a": [1]}, nulls="drop")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "ids",
    [
        pytest.param(objects(3, 5, np.int64(1)), id="ids"),
        pytest.param(objects([3], (5,), np.array([1])), id="bags"),
        pytest.param(objects(*np.array([[3], [5], [1]], np.uint16)), id="arrays"),
        pytest.param(np.array([[3], [5], [1]], np.int8), id="a matrix"),
    ],
)
def test_object_arrays_and_matrices_are_taken(ids: Any) -> None:
    tensors = encode({"a": ids})
    assert (tensors.values.tolist(), tensors.lengths.tolist()) == ([3, 5, 1], [1, 1, 1])


def test_arrays_of_several_dtypes_are_not_cast_to_one() -> None:
    """numpy would make 1 of True, and a float of a uint64 beside an int64."""
    with pytest.raises(InvalidRequest, match="feature 'a': expected integers, got a boolean among them"):
        encode({"a": objects(np.array([True]), np.array([3]))})
    with pytest.raises(InvalidRequest, match="feature 'a': expected numbers that fit int64"):
        encode({"a": objects(np.array([2**63], np.uint64))})


def test_ids_and_weights_may_be_two_columns_of_bags() -> None:
    tensors = encode({"a": {"values": [[3, 5], [], [1]], "weights": [[0.5, 2.0], [], [3.0]]}}, "a")
    assert tensors.lengths.tolist() == [2, 0, 1]
    assert tensors.weights is not None
    assert tensors.weights.tolist() == [0.5, 2.0, 3.0]
    tensors = encode({"a": {"values": [3, None, 1], "weights": [0.5, None, 3.0]}}, "a", nulls="empty")
    assert tensors.weights is not None
    assert (tensors.lengths.tolist(), tensors.weights.tolist()) == ([1, 0, 1], [0.5, 3.0])


@pytest.mark.parametrize("weight_of_null", [None, 9.0])
def test_a_null_id_is_left_out_with_its_weight(weight_of_null: float | None) -> None:
    bags, weights = [[3, None, 5], None, [None], [1]], [[0.5, weight_of_null, 2.0], None, [weight_of_null], [3.0]]
    columns: list[tuple[Any, Any]] = [
        (bags, weights),
        (objects(*bags), objects(*weights)),
        (pd.Series(bags), pd.Series(weights)),
        (pl.Series(bags), pl.Series(weights)),
        (pa.chunked_array([bags[:2], bags[2:]]), pa.chunked_array([weights[:1], weights[1:]])),
        (pl.Series(bags), weights),
    ]
    for ids, of_ids in columns:
        tensors = encode({"a": {"values": ids, "weights": of_ids}}, "a", nulls="empty")
        assert tensors.weights is not None
        assert (tensors.values.tolist(), tensors.weights.tolist()) == ([3, 5, 1], [0.5, 2.0, 3.0])
        assert tensors.lengths.tolist() == [2, 0, 0, 1]
        with pytest.raises(InvalidRequest, match="feature 'a': expected no nulls, got one in sample 0"):
            encode({"a": {"values": ids, "weights": of_ids}}, "a")


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1e39, 1.0], r"expected numbers of FP32 as weights, got 1e\+39"),
        (np.array([1.0, -1e39]), r"expected numbers of FP32 as weights, got -1e\+39"),
        ([0.5, None], "expected numbers as weights, got a null"),
        ([0.5, pd.NA], "expected numbers as weights, got a null"),
        (["1", "2"], "expected numbers as weights, got <U1"),
        (np.array([1j, 2]), "expected numbers as weights, got complex128"),
        (np.array([1, 2], "M8[s]"), r"expected numbers as weights, got datetime64\[s\]"),
    ],
    ids=str,
)
def test_weights_that_fp32_cannot_represent_are_refused(weights: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=f"feature 'a': {message}"):
        encode({"a": ([1, 2], [2], weights)}, "a")
    weights = encode({"a": ([1, 2, 3], [3], [float("inf"), float("nan"), 2**24 + 1])}, "a").weights
    np.testing.assert_array_equal(weights, np.array([np.inf, np.nan, 2**24], np.float32))


@pytest.mark.parametrize(
    "ids",
    [
        [np.int64(1), np.uint64(2)],
        [[np.int64(1)], [np.uint64(2)]],
        [np.array([1]), np.array([2], np.uint64)],
        objects(np.int64(1), np.uint64(2)),
        ([np.int64(1), np.uint64(2)], [1, 1]),
    ],
    ids=repr,
)
def test_integers_of_several_dtypes_are_not_cast_to_floats(ids: Any) -> None:
    assert encode({"a": ids}).values.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("ids", "weights", "message"),
    [
        ([[3, 5], [1]], [[0.5], [1.0]], "got 1 weights for the 2 ids of sample 0"),
        ([[3, 5], [1]], [[0.5, 1.0]], "got weights of 1 samples for ids of 2"),
        ([[3], None], [[0.5], [1.0]], "got 1 weights for the 0 ids of sample 1"),
        ([[3], [3, None]], [[1.0], [None, 1.0]], "got a null for the weight of an id in sample 1"),
        ([[3], [5, 7]], [[1.0], [1.0, None]], "got a null for the weight of an id in sample 1"),
        ([3, 5], [1.0, None], "got a null for the weight of an id in sample 1"),
        ([[3, None]], [[1.0]], "got 1 weights for the 2 ids of sample 0"),
        (
            [[3]],
            ([1.0], [1], [2.0]),
            "got a column of weights beside ids that have weights: leave one out$",
        ),
    ],
)
def test_two_columns_that_do_not_agree_are_refused(ids: Any, weights: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^feature 'a': expected a weight for each id, {message}"):
        encode({"a": {"values": ids, "weights": weights}}, "a", nulls="empty")


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ({"a": [[1, 2], [3]], "b": [1, 2]}, "ids: expected at most 4 in a request, got 5: send several requests"),
        ({"a": [[], [], [], []]}, "samples: expected at most 3 in a request, got 4: send several requests"),
    ],
)
def test_a_request_over_the_limits_is_refused(features: Any, message: str) -> None:
    limits = ServingSettings(max_request_ids=4, max_request_samples=3)
    with pytest.raises(InvalidRequest, match=message) as refused:
        encode(features, limits=limits)
    assert refused.value.reason is Reason.SIZE
    encode({"a": [[1, 2], [3], [4]]}, limits=limits)


def test_a_list_of_bags_stays_a_list_of_bags() -> None:
    ragged = np.empty(2, object)
    ragged[:] = [[3, 5], []]
    assert encode({"a": ragged}).lengths.tolist() == [2, 0]
    assert encode({"a": np.array([[3, 5], [1, 2]])}).lengths.tolist() == [2, 2]
    without_samples: list[Any] = [[], np.zeros(0, np.int64), np.zeros((0, 1), np.int64)]
    for bags in without_samples:
        assert encode({"a": bags}).lengths.size == 0


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.int16])
def test_a_kjt_may_have_ids_and_lengths_of_any_integer_dtype(dtype: torch.dtype) -> None:
    kjt = KeyedJaggedTensor.from_lengths_sync(
        ["a", "b"], torch.tensor(VALUES, dtype=dtype), torch.tensor(LENGTHS, dtype=dtype)
    )
    tensors = encode(kjt)
    assert tensors.values.dtype == np.int64
    assert tensors.lengths.dtype == np.int32
    assert (tensors.values.tolist(), tensors.lengths.tolist()) == (VALUES, LENGTHS)


AB_KJT = KeyedJaggedTensor.from_lengths_sync(["a", "b"], torch.tensor([3, 5, 1]), torch.tensor([2, 1]))
WEIGHTED_KJT = KeyedJaggedTensor.from_lengths_sync(
    ["a", "b"], torch.tensor([3, 5, 1]), torch.tensor([2, 1]), weights=torch.tensor([0.5, 2.0, 3.0])
)


@pytest.mark.parametrize(
    ("features", "weighted", "expected"),
    [
        pytest.param({"a": ([3, 5], [2], [0.5, 2.0]), "b": ([1], [1], [3.0])}, "ab", [0.5, 2.0, 3.0], id="arrays"),
        pytest.param(WEIGHTED_KJT, "ab", [0.5, 2.0, 3.0], id="KJT"),
        pytest.param({"a": ([3, 5], [2], [0.5, 2.0]), "b": [[1]]}, "a", [0.5, 2.0, 1.0], id="a feature without"),
        pytest.param({"a": {"weights": [0.5, 2.0], "values": [3, 5], "lengths": [2]}}, "a", [0.5, 2.0], id="named"),
        pytest.param({"b": [[1], [2]]}, "a", [1.0, 1.0], id="only features without"),
        pytest.param(AB_KJT, "c", [1.0, 1.0, 1.0], id="KJT of features without"),
    ],
)
def test_weights_travel_with_their_ids(features: Any, weighted: str, expected: list[float]) -> None:
    weights = encode(features, weighted).weights
    assert weights is not None
    assert weights.dtype == np.float32
    assert weights.tolist() == expected


@pytest.mark.parametrize(
    ("features", "weighted", "message"),
    [
        pytest.param({"a": ([1], [1], [1.0])}, "", "feature 'a': expected no weights", id="not weighted"),
        pytest.param(WEIGHTED_KJT, "", "feature 'a': expected no weights", id="not weighted, KJT"),
        pytest.param({"b": [[1]], "a": [[1]]}, "a", "feature 'a': expected a weight for each id", id="missing"),
        pytest.param(AB_KJT, "b", "feature 'b': expected a weight for each id", id="missing, KJT"),
    ],
)
def test_weights_that_do_not_fit_the_model_are_refused(features: Any, weighted: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        encode(features, weighted)


FORMS = r"feature 'a': expected a list of bags, .*, or a tuple of arrays, \(values, lengths\) or \(values, lengths, weights\)"


@pytest.mark.parametrize(
    ("features", "message"),
    [
        pytest.param({}, "features: expected at least one", id="nothing"),
        pytest.param({"a": [[1]], "b": [[1], [2]]}, "feature 'b': expected as many samples as 'a' has, 1, got 2", id="samples"),
        pytest.param(5, r"features: expected ids by feature, \{name: ids\}, a KeyedJaggedTensor or a DataFrame, got int", id="no features"),
        pytest.param([[1]], "features: expected ids by feature, .* got list", id="bags alone"),
        pytest.param({5: [[1]]}, "feature 5: expected the name of a feature, got int", id="no name"),
        pytest.param({"a": [3, [5]]}, FORMS + "; got a list that mixes ids and bags", id="an id, then a bag"),
        pytest.param({"a": [[3], 5]}, FORMS + "; got a list that mixes ids and bags", id="a bag, then an id"),
        pytest.param({"a": [3, None]}, "feature 'a': expected no nulls, got one in sample 1: fill it, or pass", id="an id, then nothing"),
        pytest.param({"a": [[3], [], None]}, "feature 'a': expected no nulls, got one in sample 2", id="nothing among bags"),
        pytest.param({"a": [[3], [5, None]]}, "feature 'a': expected no nulls, got one in sample 1", id="nothing in a bag"),
        pytest.param({"a": (3, 5)}, FORMS + "; got a tuple of 2", id="a tuple of ids"),
        pytest.param({"a": [1.5, 2]}, r"feature 'a': expected integers in 1 dimension, got float64 \[2\]: convert whole numbers", id="one-hot fractions"),
        pytest.param({"a": MASKED}, "feature 'a': expected integers: a masked array", id="masked ids"),
        pytest.param({"a": (MASKED, [1, 1])}, "feature 'a': expected integers: a masked array", id="masked values"),
        pytest.param({"a": [MASKED]}, FORMS + "; got MaskedArray for a list", id="a masked bag"),
        pytest.param(
            {"a": ([1, 2], [1, 1], MASKED)},
            "feature 'a': expected numbers as weights: a masked array",
            id="masked weights",
        ),
        pytest.param({"a": [1, True]}, "feature 'a': expected integers, got a boolean among them", id="a truth"),
        pytest.param({"a": [[2], [1, True]]}, "feature 'a': expected integers, got a boolean", id="a truth in a bag"),
        pytest.param({"a": [[2, np.False_]]}, "feature 'a': expected integers, got a boolean", id="a truth of numpy"),
        pytest.param({"a": [[1, np.array(True)]]}, "feature 'a': expected integers, got a boolean", id="a truth, 0-d"),
        pytest.param({"a": [torch.tensor([True]), torch.tensor([2])]}, "feature 'a': expected integers, got a boolean", id="truths of torch"),
        pytest.param({"a": np.array([1, 2], "m8[s]")}, "feature 'a': expected integers in 1 dimension, got timedelta64", id="durations"),
        pytest.param({"a": [np.timedelta64(1)]}, "feature 'a': expected integers in 1 dimension, got timedelta64", id="a duration"),
        pytest.param({"a": ([2, 1], [True, 1])}, "feature 'a': expected integers, got a boolean", id="a true length"),
        pytest.param({"a": [True, False]}, "feature 'a': expected integers in 1 dimension, got bool", id="one-hot truths"),
        pytest.param({"a": np.array(7)}, FORMS + "; got ndarray: ", id="an array of no dimensions"),
        pytest.param({"a": [3, 5], "b": [[1, 2]]}, r"feature 'b': expected as many samples as 'a' has, 2, got 1: 'a' is a list of ids, one for each sample; a sample with several is \[\[id, …\]\]", id="one-hot for one sample"),
        pytest.param({"b": [[1, 2]], "a": np.array([3, 5])}, "feature 'a': expected as many .* 1, got 2: 'a' is a list of ids", id="a one-hot array for one sample"),
        pytest.param({"a": 7}, FORMS + "; got int: ", id="a number"),
        pytest.param({"a": None}, FORMS + "; got NoneType: ", id="nothing for a feature"),
        pytest.param({"a": "12"}, FORMS + "; got str for a list", id="text"),
        pytest.param({"a": ["12", "3"]}, FORMS + "; got str for a list", id="text for a bag"),
        pytest.param(
            KeyedJaggedTensor.from_lengths_sync(["a"], torch.tensor([1.0]), torch.tensor([1])),
            "KeyedJaggedTensor 'values': expected integers in 1 dimension, got float32",
            id="a KJT of floats",
        ),
        pytest.param({"a": [b"12"]}, FORMS + "; got bytes for a list", id="bytes for a bag"),
        pytest.param({"a": bytearray(b"12")}, FORMS + "; got bytearray for a list", id="a bytearray"),
        pytest.param({"a": [bytearray(b"12")]}, FORMS + "; got bytearray for a list", id="a bytearray for a bag"),
        pytest.param(
            {"a": ([1, 2], [2], [True, 0.5])},
            "feature 'a': expected numbers as weights, got booleans",
            id="a truth as weight",
        ),
        pytest.param(
            {"a": ([1, 2], [2], np.array([True, False]))},
            "feature 'a': expected numbers as weights, got booleans",
            id="truths as weights",
        ),
        pytest.param({"a": [{3, 5}]}, FORMS + "; got set for a list", id="a set for a bag"),
        pytest.param({"a": {(3, 5)}}, FORMS + "; got set for a list", id="a set of bags"),
        pytest.param({"a": [{3: 0.5}]}, FORMS + "; got dict for a list", id="weights by id"),
        pytest.param({"a": {0: [3]}}, FORMS + r"; got \[0\]", id="bags by number"),
        pytest.param({"a": {"values": [3]}}, FORMS + r"; got \['values'\]", id="values alone"),
        pytest.param({"a": {"values": [3], "lengths": [1], "weight": [1]}}, FORMS + "; got .*'weight'", id="another name"),
        pytest.param({"a": ([3], [5], [1], [2])}, FORMS + "; got a tuple of 4", id="a tuple of bags"),
        pytest.param({"a": ([3, 5], [1])}, "expected 1 ids, the sum of its lengths, got 2: a tuple is .values, lengths.; a list of bags is a list", id="a tuple of two bags"),
        pytest.param({"a": ([1], [1], None)}, FORMS + "; got None for an array", id="no weights where there are some"),
        pytest.param({"a": [[1.5]]}, "feature 'a': expected integers", id="a fraction"),
        pytest.param({"a": [["x"]]}, "feature 'a': expected integers", id="a string"),
        pytest.param({"a": [[2**63]]}, "feature 'a': expected numbers that fit int64, got 9223372036854775808", id="too large"),
        pytest.param({"a": [-1, 2**63]}, "feature 'a': expected integers: got -1 and 9223372036854775808, which no 64-bit dtype holds", id="too large beside a negative one"),
        pytest.param({"a": [[2**64]]}, "feature 'a': expected integers: got 18446744073709551616, which no 64-bit dtype holds", id="much too large"),
        pytest.param({"a": ([1, 2], [1])}, "feature 'a': expected 1 ids, the sum of its lengths, got 2", id="sum"),
        pytest.param({"a": ([1], [1], [1.0, 2.0])}, "feature 'a': expected 1 weights", id="weights"),
        pytest.param({"a": ([1],)}, FORMS + "; got a tuple of 1", id="a tuple of one"),
    ],
)  # fmt: skip
def test_invalid_requests_are_refused_by_name(features: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        encode(features)


def test_an_answer_is_cut_into_views() -> None:
    embeddings = np.arange(10, dtype=np.float32).reshape(2, 5)
    answer = decode(embeddings, {"b": 3, "a": 2})
    assert list(answer) == ["b", "a"]
    assert answer["b"].tolist() == [[0, 1, 2], [5, 6, 7]]
    assert answer["a"].tolist() == [[3, 4], [8, 9]]
    assert all(np.shares_memory(rows, embeddings) for rows in answer.values())
