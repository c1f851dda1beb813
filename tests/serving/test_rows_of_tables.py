"""Rows of tables by their ids, however the table is pooled."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from export import export_model
from serving.engine import Engine
from serving.errors import InvalidRequest
from serving.requests.types import Tensors
from tests.support.models import Spec, collection
from tests.support.position_weights import positioned
from tests.support.sequence_models import FP32, ROWS, Mixed, sequences


@pytest.mark.parametrize("kind", ["SUM", "MEAN", "weighted", "positioned", "NONE"])
def test_rows_are_those_of_the_table_however_it_is_pooled(kind: str, tmp_path: Path) -> None:
    specs = [Spec("item", 300, 32, "MEAN" if kind == "MEAN" else "SUM", ("recent", "seen"))]
    module: Any = {
        "positioned": lambda: positioned(specs, {"recent": 3, "seen": 2}),
        "weighted": lambda: collection(specs, weighted=True),
        "NONE": lambda: sequences(ROWS),
    }.get(kind, lambda: collection(specs))()
    engine = Engine.open(export_model(module, tmp_path / "r", "m", FP32))
    (table,) = [tensor for name, tensor in module.state_dict().items() if name.endswith("item.weight")]
    for ids in ([], [5], np.arange(299, -1, -1), [7] * 40):
        np.testing.assert_array_equal(engine.rows("item", ids), table.numpy()[np.array(ids, np.int64)])
    every = np.arange(300)
    for gaps in (every[::3], every[::-1], np.repeat(every, 2).reshape(-1, 2).T[1], torch.from_numpy(every)[::3]):
        np.testing.assert_array_equal(engine.rows("item", gaps), table.numpy()[np.asarray(gaps)])
    with pytest.raises(InvalidRequest, match="table 'recent': expected one of 'item'"):
        engine.rows("recent", [1])
    with pytest.raises(InvalidRequest, match="table 'item': expected integers in 1 dimension"):
        engine.rows("item", [[1]])
    masked_arrays: Any = np.ma  # its functions have types from numpy 2 on
    masked = masked_arrays.array(1, mask=True)
    truths: list[Any] = [[1, torch.tensor(True)], [1, np.array(True)]]
    for wrong in truths:
        with pytest.raises(InvalidRequest, match="table 'item': expected integers, got a boolean among them"):
            engine.rows("item", wrong)
    with pytest.raises(InvalidRequest, match="table 'item': expected integers: Cannot convert masked"):
        engine.rows("item", [masked, 2])


@pytest.mark.parametrize(
    ("lengths", "why"),
    [
        ([2, -1], "table 'word': expected lengths >= 0, got -1 for sample 0"),
        ([1, 3], "table 'word': expected its bags"),
    ],
)
def test_invalid_lengths_of_a_rows_request_are_refused_by_table(lengths: list[int], why: str, tmp_path: Path) -> None:
    engine = Engine.open(export_model(Mixed(), tmp_path / "r", "m", FP32))
    tensors = Tensors(None, np.array([1, 2]), np.array(lengths, np.int32), tables=["item", "word"])
    with pytest.raises(InvalidRequest, match=why):
        engine.outputs(tensors)


def test_rows_of_a_key_shared_by_tables_are_of_one_table(tmp_path: Path) -> None:
    """An id need be in the other tables no more than a request by features would let it."""
    specs = [Spec("small", 4, 8, "SUM", ("x",)), Spec("large", 90, 12, "SUM", ("x",))]
    module = collection(specs)
    engine = Engine.open(export_model(module, tmp_path / "r", "m", FP32))
    large = module.embedding_bags["large"].weight.detach().numpy()
    np.testing.assert_array_equal(engine.rows("large", [80, 3]), large[[80, 3]])
