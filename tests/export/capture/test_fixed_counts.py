"""A forward that compares its number of ids: it is served for exactly as many ids in each sample as the example has."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

from export import export_model
from serving.engine import Engine
from serving.errors import InvalidRequest
from tests.support.long_cases import one_in
from tests.support.scored_models import EXACT

DIM, COUNT = 8, 3


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = EmbeddingConfig(name="t", num_embeddings=40, embedding_dim=DIM, feature_names=["seen"])
        self.rows, self.top = EmbeddingCollection(tables=[config]), nn.Linear(DIM, 1)


class KeepsTheLast(Rows):
    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        rows = self.rows(ids)["seen"].values().view(ids.stride(), -1, DIM)
        most = 2
        if most < rows.size(1):
            rows = rows[:, -most:]
        answer: Tensor = self.top(rows.sum(1))
        return answer


class CountsUp(Rows):
    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        rows = self.rows(ids)["seen"].values().view(ids.stride(), -1, DIM)
        for most in range(2, 7):
            if most < rows.size(1):
                rows = rows + most
        answer: Tensor = self.top(rows[:, : min(2, rows.size(1))].sum(1))
        return answer


def keyed(ids: np.ndarray[Any, Any]) -> KeyedJaggedTensor:
    lengths = torch.full((len(ids),), ids.shape[1], dtype=torch.int32)
    return KeyedJaggedTensor(["seen"], torch.from_numpy(ids).reshape(-1), lengths=lengths)


@pytest.mark.parametrize("kind", one_in(2, [KeepsTheLast, CountsUp]))
def test_comparison_with_the_number_of_ids(kind: type[Rows], tmp_path: Path) -> None:
    model, random = kind(), np.random.default_rng(0)
    example = (keyed(random.integers(0, 40, (4, COUNT))),)
    with Engine.open(export_model(model, tmp_path / "r", "m", EXACT, example=example)) as engine:
        for samples in (1, 2, 9):
            ids = random.integers(0, 40, (samples, COUNT))
            (scores,) = engine.score({"seen": ids.tolist()}).values()
            with torch.no_grad():
                expected = model(keyed(ids)).numpy()
            np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-6)
        for bags in ([[1, 2]], [[1, 2, 3, 4]], [[1, 2, 3], [1, 2]], [[1, 2, 3], []]):
            with pytest.raises(InvalidRequest, match="'seen'"):
                engine.score({"seen": bags})
