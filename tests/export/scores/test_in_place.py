"""Forwards that write to tensors, have no eval of their own, or keep state: served as the model answers, or refused."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torchrec import KeyedJaggedTensor

from export import export_model
from export.errors import ExportError
from serving.engine import Engine
from tests.support.long_cases import one_in
from tests.support.scored_models import EXACT, WIDTH, even, own_scores, random_request

CONFIG = replace(EXACT, dense_widths={"dense_features": WIDTH})


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = even()
        self.first = nn.Linear(64 + 13, 8)
        self.over = nn.Linear(8, 1)

    def forward(self, dense_features: Tensor, ids: KeyedJaggedTensor) -> Tensor:
        return self.of(dense_features, self.bags(ids).values())

    def of(self, dense: Tensor, pooled: Tensor) -> Tensor:
        raise NotImplementedError

    def head(self, dense: Tensor, pooled: Tensor) -> Tensor:
        return self.over(self.first(torch.cat([pooled, dense], dim=1)))  # type: ignore[no-any-return]


class WritesEmbeddings(_Model):
    def of(self, dense: Tensor, pooled: Tensor) -> Tensor:
        pooled.mul_(2)
        return self.head(dense, pooled)


class WritesDense(_Model):
    def of(self, dense: Tensor, pooled: Tensor) -> Tensor:
        dense.clamp_(0, 0.5).log1p_()
        return self.head(dense, pooled)


class WritesBetween(_Model):
    def of(self, dense: Tensor, pooled: Tensor) -> Tensor:
        hidden = self.first(torch.cat([pooled, dense], dim=1))
        functional.relu(hidden, inplace=True)
        return self.over(hidden)  # type: ignore[no-any-return]


class WritesByModule(_Model):
    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU(inplace=True)

    def of(self, dense: Tensor, pooled: Tensor) -> Tensor:
        return self.head(self.relu(dense - 0.5), self.relu(pooled))


class Trains(_Model):
    """Nobody called its `eval`."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Sequential(nn.BatchNorm1d(77), nn.Dropout(0.5))

    def of(self, dense: Tensor, pooled: Tensor) -> Tensor:
        return self.over(self.first(self.norm(torch.cat([pooled, dense], dim=1))))  # type: ignore[no-any-return]


class Autocasts(_Model):
    def of(self, dense: Tensor, pooled: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.head(dense, pooled)


class WritesToAPart(_Model):
    def of(self, dense: Tensor, pooled: Tensor) -> Tensor:
        part = pooled[:, :3]
        part += 1
        return self.head(dense, pooled)


class IsRandom(_Model):
    def of(self, dense: Tensor, pooled: Tensor) -> Tensor:
        return self.head(dense + torch.randn_like(dense), pooled)


class Counts(_Model):
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def of(self, dense: Tensor, pooled: Tensor) -> Tensor:
        self.count.add_(1)
        return self.head(dense, pooled) + self.count


@pytest.mark.parametrize("saved", one_in(2, [True, False]), ids=["checkpoint", "module"])
@pytest.mark.parametrize("model", one_in(2, [WritesEmbeddings, WritesDense, WritesBetween, WritesByModule, Trains]))
def test_in_place_operators_write_to_copies(tmp_path: Path, model: Any, saved: bool) -> None:
    torch.manual_seed(0)
    module = model().train()
    before = copy.deepcopy(module.state_dict())
    torch.save(before, tmp_path / "saved")
    torch.manual_seed(1)
    exported = model() if saved else module
    bundle = export_model(exported, tmp_path / "r", "m", CONFIG, checkpoint=tmp_path / "saved" if saved else None)
    assert exported.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    engine = Engine.open(bundle)
    bags, dense = random_request(module, np.random.default_rng(0), 6)
    dense_before = {name: tensor.copy() for name, tensor in dense.items()}
    expected = own_scores(module, bags, {name: tensor.copy() for name, tensor in dense.items()})["scores"]
    np.testing.assert_allclose(engine.score(bags, dense)["scores"], expected, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(dense["dense_features"], dense_before["dense_features"])


@pytest.mark.parametrize("saved", one_in(2, [True, False]), ids=["checkpoint", "module"])
@pytest.mark.parametrize("model", one_in(2, [Autocasts, WritesToAPart, IsRandom, Counts]))
def test_forwards_that_a_graph_cannot_represent_are_refused(tmp_path: Path, model: Any, saved: bool) -> None:
    torch.manual_seed(0)
    module = model()
    torch.save(module.state_dict(), tmp_path / "saved")
    with pytest.raises(
        ExportError, match=r"does not have changes it|changes the buffer|cannot be traced|draws random numbers"
    ):
        export_model(module, tmp_path / "r", "m", CONFIG, checkpoint=tmp_path / "saved" if saved else None)
