"""Random numbers of torch in eval mode: refused by their operator, however seldom or little they count."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor

from export import export_model
from export.errors import ModelError
from serving.engine import Engine
from tests.support.models import SUM, collection
from tests.support.module_calls import assert_served
from tests.support.scored_models import EXACT, WIDTH

Of = Callable[[Tensor], Tensor]


WIDE = replace(EXACT, dense_widths={"dense_features": WIDTH})


class Drawing(nn.Module):
    def __init__(self, of: Of) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bags, self.top, self.of = collection(SUM), nn.Linear(28 + WIDTH, 1), of

    def forward(self, ids: KeyedJaggedTensor, dense_features: Tensor) -> Tensor:
        answer: Tensor = self.top(torch.cat([self.bags(ids).values(), self.of(dense_features)], dim=1))
        return answer


class Masked(nn.Module):
    """A buffer with NaN, as masks of missing numbers have."""

    missing: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bags, self.top = collection(SUM), nn.Linear(28, 1)
        self.register_buffer("missing", torch.tensor([float("nan"), 1.0]))

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        answer: Tensor = self.top(self.bags(ids).values()) * torch.nan_to_num(self.missing, 0.5).sum()
        return answer


@pytest.mark.parametrize(
    ("of", "operator"),
    [
        pytest.param(lambda x: torch.where(x == 3, torch.rand_like(x), x), "rand_like", id="for some inputs"),
        pytest.param(lambda x: torch.where(torch.rand_like(x) < 1e-5, x + 100, x), "rand_like", id="seldom"),
        pytest.param(lambda x: x + torch.randn(WIDTH) * 1e-9, "randn", id="little"),
        pytest.param(lambda x: x * (1 + torch.zeros_like(x).normal_() * 1e-6), "normal_", id="in place"),
        pytest.param(lambda x: x[:, torch.randperm(WIDTH)], "randperm", id="an order"),
        pytest.param(lambda x: nn.functional.dropout(x, 1e-6), "dropout|bernoulli", id="dropout that always drops"),
    ],
)
def test_a_forward_that_draws_is_refused(of: Of, operator: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=rf"Drawing: .*draws random numbers in eval mode, by aten\.({operator})"):
        export_model(Drawing(of).eval(), tmp_path / "r", "m", WIDE)


@pytest.mark.parametrize(
    "of",
    [lambda x: nn.functional.dropout(x, 0.0), nn.Dropout(0.5).eval(), lambda x: x + torch.ones_like(x)],
    ids=["dropout of none", "dropout in eval mode", "no numbers"],
)
def test_a_forward_without_random_numbers_is_served(of: Of, tmp_path: Path) -> None:
    model = Drawing(of).eval()
    dense = np.ones((1, WIDTH), np.float32)
    with Engine.open(export_model(model, tmp_path / "r", "m", WIDE)) as engine:
        (scores,) = engine.score({"x": [[1]], "y": [[2]], "z": [[3]]}, {"dense_features": dense}).values()
    ids = KeyedJaggedTensor(["x", "y", "z"], torch.tensor([1, 2, 3]), lengths=torch.tensor([1, 1, 1]))
    with torch.no_grad():
        np.testing.assert_allclose(scores, model(ids, torch.from_numpy(dense)).numpy(), rtol=1e-5, atol=1e-6)


def test_a_buffer_with_nan_does_not_count_as_changed(tmp_path: Path) -> None:
    model = Masked().eval()
    with Engine.open(export_model(model, tmp_path / "r", "m", EXACT)) as engine:
        (scores,) = engine.score({"x": [[1]], "y": [[2]], "z": [[3]]}).values()
    ids = KeyedJaggedTensor(["x", "y", "z"], torch.tensor([1, 2, 3]), lengths=torch.tensor([1, 1, 1]))
    with torch.no_grad():
        np.testing.assert_allclose(scores, model(ids).numpy(), rtol=1e-5, atol=1e-6)


def test_dropout_of_zero_is_served_with_an_example(tmp_path: Path) -> None:
    model = Drawing(lambda x: nn.functional.dropout(x, 0.0)).eval()
    lengths = torch.ones(6, dtype=torch.int32)
    ids = KeyedJaggedTensor(["x", "y", "z"], torch.arange(6), lengths=lengths)
    example = (ids, torch.ones(2, WIDTH))
    assert_served(export_model(model, tmp_path / "r", "m", EXACT, example=example), model, example)
