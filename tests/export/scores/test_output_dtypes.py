"""Scores keep the dtype that the model gives them, however its dense part is found and whatever its weights are."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor

from export import ExportConfig, export_model
from export.errors import ModelError
from serving.bundle.load import open_bundle
from serving.bundle.scores import DenseDtype
from serving.engine import Engine
from tests.support.long_cases import one_in
from tests.support.models import Spec, collection
from tests.support.scored_models import EXACT

POOLED = (Spec("films", 20, 8, "SUM", ("film",)),)
FIRST = 2**53 + 1


class Best(nn.Module):
    """The name of what fits best, and other numbers of it."""

    names: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.bags, self.over = collection(POOLED), nn.Linear(8, 4)
        self.register_buffer("names", torch.arange(4) * 5 + FIRST)

    def forward(self, ids: KeyedJaggedTensor) -> dict[str, Tensor]:
        return self.best(self.bags(ids).values())

    def best(self, pooled: Tensor) -> dict[str, Tensor]:
        scores = self.over(pooled)
        best = scores.argmax(dim=1)
        return {
            "scores": scores,
            "name": self.names[best],
            "is_good": scores[:, :2] > 0,
            "rank": best.int(),
            "exact": self.names[best].double() - 0.5,
        }


class Own(Best):
    """The same, given in place of what follows."""

    def forward(self, embeddings: dict[str, Tensor]) -> dict[str, Tensor]:
        return self.best(embeddings["film"])


def ids(lengths: list[int]) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        ["film"], torch.arange(sum(lengths)) % 20, lengths=torch.tensor(lengths, dtype=torch.int32)
    )


@pytest.mark.parametrize("dtype", one_in(3, [DenseDtype.FP32, DenseDtype.BF16, DenseDtype.INT8]))
@pytest.mark.parametrize("way", ["example", "traced", "own"])
def test_output_dtypes_are_those_of_the_model(way: str, dtype: DenseDtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Best().eval()
    dense = Own().eval()
    dense.over = model.over
    ways: dict[str, dict[str, Any]] = {
        "example": {"example": (ids([1, 2, 0]),)},
        "traced": {},
        "own": {"dense": dense},
    }
    config = ExportConfig(scores=True, dtype=EXACT.dtype, dense_dtype=dtype)
    bundle = export_model(model, tmp_path / "r", "m", config, **ways[way])
    with torch.no_grad():
        expected = model(ids([1, 2, 0, 3]))
    with Engine.open(bundle) as engine:
        answer = engine.score({"film": [[0], [1, 2], [], [3, 4, 5]]})
    for name, numbers in expected.items():
        assert answer[name].dtype == numbers.numpy().dtype
        if name == "scores":
            np.testing.assert_allclose(answer[name], numbers, atol=1e-6 if dtype is DenseDtype.FP32 else 0.1)
        elif dtype is DenseDtype.FP32:
            np.testing.assert_array_equal(answer[name], numbers)
        elif name == "name":
            assert {*answer[name].tolist()} <= {*model.names.tolist()}
    part = open_bundle(bundle).manifest.dense_part
    assert part is not None
    assert [len(output.schema) for output in part.outputs] == [2, 3, 3, 3, 3]


class Complex(Best):
    def best(self, pooled: Tensor) -> dict[str, Tensor]:
        return {"wave": torch.fft.fft(pooled, dim=1)}


@pytest.mark.parametrize("example", [None, (ids([1, 2, 0]),)], ids=["traced", "example"])
def test_outputs_of_unsupported_dtypes_are_refused_by_name(example: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"output 'wave': expected one of float32, .*, got complex64: .* both parts"):
        export_model(Complex().eval(), tmp_path / "r", "m", EXACT, example=example)
