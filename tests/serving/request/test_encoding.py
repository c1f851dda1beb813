"""What people have, as the tensors of a request."""

from typing import Any

import numpy as np
import pytest
import torch
from torchrec import KeyedJaggedTensor

from serving.errors import InvalidRequest
from serving.request.encoding import decode, encode

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


FORMS = r"feature 'a': expected a list of bags, .* or arrays: the tuple \(values, lengths\) or .*\{.values.: .*\}"


@pytest.mark.parametrize(
    ("features", "message"),
    [
        pytest.param({}, "features: expected at least one", id="nothing"),
        pytest.param({"a": [[1]], "b": [[1], [2]]}, "feature 'b': expected as many samples as 'a' has, 1, got 2", id="samples"),
        pytest.param(5, r"features: expected ids by feature, \{name: ids\}, or a KeyedJaggedTensor, got int", id="no features"),
        pytest.param([[1]], "features: expected ids by feature, .* got list", id="bags alone"),
        pytest.param({5: [[1]]}, "feature 5: expected the name of a feature, got int", id="no name"),
        pytest.param({"a": [1, 2]}, FORMS + "; got list: object of type 'int' has no len", id="no bags"),
        pytest.param({"a": 7}, FORMS + "; got int: ", id="a number"),
        pytest.param({"a": None}, FORMS + "; got NoneType: ", id="nothing for a feature"),
        pytest.param({"a": "12"}, FORMS + "; got str for a list", id="text"),
        pytest.param({"a": ["12", "3"]}, FORMS + "; got str for a list", id="text for a bag"),
        pytest.param({"a": [b"12"]}, FORMS + "; got bytes for a list", id="bytes for a bag"),
        pytest.param({"a": [{3, 5}]}, FORMS + "; got set for a list", id="a set for a bag"),
        pytest.param({"a": {(3, 5)}}, FORMS + "; got set for a list", id="a set of bags"),
        pytest.param({"a": [{3: 0.5}]}, FORMS + "; got dict for a list", id="weights by id"),
        pytest.param({"a": {0: [3]}}, FORMS + r"; got \[0\]", id="bags by number"),
        pytest.param({"a": {"values": [3]}}, FORMS + r"; got \['values'\]", id="values alone"),
        pytest.param({"a": {"values": [3], "lengths": [1], "weight": [1]}}, FORMS + "; got .*'weight'", id="another name"),
        pytest.param({"a": ([3], [5], [1], [2])}, FORMS + "; got a tuple of 4", id="a tuple of bags"),
        pytest.param({"a": ([3, 5], [1])}, "expected 1 ids, the sum of its lengths, got 2: a tuple is .values, lengths.; a list of bags is a list", id="a tuple of two bags"),
        pytest.param({"a": ([1], [1], None)}, "feature 'a': expected 1 weights", id="no weights where there are some"),
        pytest.param({"a": [[1.5]]}, "feature 'a': expected integers", id="a fraction"),
        pytest.param({"a": [["x"]]}, "feature 'a': expected integers", id="a string"),
        pytest.param({"a": [[2**63]]}, "feature 'a': expected numbers that fit int64", id="too large"),
        pytest.param({"a": ([1, 2], [1])}, "feature 'a': expected 1 ids, the sum of its lengths, got 2", id="sum"),
        pytest.param({"a": ([1], [1], [1.0, 2.0])}, "feature 'a': expected 1 weights", id="weights"),
        pytest.param({"a": ([1],)}, FORMS + "; got a tuple of 1", id="a tuple of one"),
    ],
)  # fmt: skip
def test_what_is_no_request_is_refused_by_name(features: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        encode(features)


def test_an_answer_is_cut_into_views() -> None:
    embeddings = np.arange(10, dtype=np.float32).reshape(2, 5)
    answer = decode(embeddings, {"b": 3, "a": 2})
    assert list(answer) == ["b", "a"]
    assert answer["b"].tolist() == [[0, 1, 2], [5, 6, 7]]
    assert answer["a"].tolist() == [[3, 4], [8, 9]]
    assert all(np.shares_memory(rows, embeddings) for rows in answer.values())
