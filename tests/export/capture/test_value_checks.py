"""Statements of a forward that only check numbers: they hinder no export. One that does more is refused by its line."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor

from export import export_model
from export.errors import ModelError
from serving.engine import Engine
from tests.support.long_cases import one_in
from tests.support.models import SUM, collection
from tests.support.scored_models import EXACT

WIDTH = 3


class Scored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bags, self.top = collection(SUM), nn.Linear(28 + WIDTH, 1)

    def scored(self, ids: KeyedJaggedTensor, dense: Tensor) -> Tensor:
        answer: Tensor = self.top(torch.cat([self.bags(ids).values(), dense], dim=1))
        return answer

    def forward(self, ids: KeyedJaggedTensor, dense: Tensor) -> Tensor:
        return self.scored(ids, dense)


def finite(numbers: Tensor) -> Tensor:
    if numbers.isnan().any() or float(numbers.abs().max()) > 1e20:
        raise ValueError("not finite")
    return numbers


def at_least_zero(numbers: Tensor) -> Tensor:
    if (numbers < 0).any():
        raise ValueError(
            f"negative: {numbers.min()}",
        )
    return numbers


class Checks(Scored):
    """Each way to say it."""

    def forward(self, ids: KeyedJaggedTensor, dense: Tensor) -> Tensor:
        pooled = self.bags(ids).values()
        assert torch.isfinite(dense).all(), "dense is not finite"
        for value in (pooled, finite(dense)):
            assert value.abs().max().item() < 1e12 and bool(value.isfinite().all())  # noqa: PT018  as it is written
        if not torch.isfinite(pooled).all():
            raise ValueError("pooled is not finite")
        torch._assert(pooled.isfinite().all(), "pooled")  # type: ignore[no-untyped-call, unused-ignore]
        assert int(ids.lengths().max()) < 1000
        if (ids.lengths() >= 0).all():
            answer: Tensor = self.top(torch.cat([pooled, dense], dim=1))
        else:
            raise ValueError("lengths")
        return answer


class Positive(Scored):
    """It refuses most of the numbers that an export tries by itself."""

    def forward(self, ids: KeyedJaggedTensor, dense: Tensor) -> Tensor:
        assert (dense >= 0).all()
        assert dense.max() <= 1
        return self.scored(ids, dense.sqrt())


class PositiveInOneLine(Scored):
    def forward(self, ids: KeyedJaggedTensor, dense: Tensor) -> Tensor:
        if (dense < 0).any(): raise ValueError("negative")  # fmt: skip  # noqa: E701  as it is written
        return self.scored(ids, dense.sqrt())


class PositiveByTorch(Scored):
    def forward(self, ids: KeyedJaggedTensor, dense: Tensor) -> Tensor:
        torch._assert((dense >= 0).all(), "negative")  # type: ignore[no-untyped-call, unused-ignore]
        return self.scored(ids, dense.sqrt())


class PositiveByHelper(Scored):
    def forward(self, ids: KeyedJaggedTensor, dense: Tensor) -> Tensor:
        return self.scored(ids, at_least_zero(dense).sqrt())


class Catches(Scored):
    def forward(self, ids: KeyedJaggedTensor, dense: Tensor) -> Tensor:
        try:
            assert (dense < 5).all()
        except AssertionError:
            dense = dense * 0
        return self.scored(ids, dense)


class CatchesOfOthers(Scored):
    def checked(self, dense: Tensor) -> Tensor:
        if (dense > 5).any():
            raise ValueError("large")
        return dense

    def forward(self, ids: KeyedJaggedTensor, dense: Tensor) -> Tensor:
        try:
            dense = self.checked(dense)
        except ValueError:
            dense = dense * 0
        return self.scored(ids, dense)


class Returns(Scored):
    def forward(self, ids: KeyedJaggedTensor, dense: Tensor) -> Tensor:
        if (dense > 5).any():
            if self.top.bias is not None:
                return self.scored(ids, dense * 0)
            raise ValueError("large")
        return self.scored(ids, dense)


class Keeps(Scored):
    def forward(self, ids: KeyedJaggedTensor, dense: Tensor) -> Tensor:
        if (largest := dense.max().item()) > 100:
            raise ValueError("large")
        return self.scored(ids, dense) * largest


class Branches(Scored):
    def forward(self, ids: KeyedJaggedTensor, dense: Tensor) -> Tensor:
        if (dense > 5).any():
            dense = dense * 0
        return self.scored(ids, dense)


def bags_of(samples: int) -> dict[str, list[list[int]]]:
    random = np.random.default_rng((7, samples))
    return {key: [random.integers(0, 10, n).tolist() for n in random.integers(0, 4, samples)] for key in "xyz"}


def call_of(samples: int) -> tuple[KeyedJaggedTensor, Tensor]:
    bags = bags_of(samples)
    flat = torch.tensor([value for column in bags.values() for bag in column for value in bag], dtype=torch.int64)
    lengths = torch.tensor([len(bag) for column in bags.values() for bag in column], dtype=torch.int32)
    return KeyedJaggedTensor([*bags], flat, lengths=lengths), torch.rand(samples, WIDTH)


@pytest.mark.parametrize("kind", one_in(3, [Checks, Positive, PositiveInOneLine, PositiveByHelper, PositiveByTorch]))
def test_a_forward_that_checks_its_numbers_is_served(kind: Callable[[], Scored], tmp_path: Path) -> None:
    module: Any = kind().eval()
    bundle = export_model(module, tmp_path / "r", "m", EXACT, example=call_of(6))
    with Engine.open(bundle) as engine, torch.no_grad():
        part, notes = engine.bundle.manifest.dense_part, engine.bundle.manifest.notes
        assert part is not None
        assert not part.mixes_samples
        assert any(
            note.startswith("example: requests are not checked as the forward does at test_value_checks.py")
            for note in notes
        )
        for samples in (1, 2, 9):
            ids, dense = call_of(samples)
            result = engine.score(bags_of(samples), {"dense": dense.numpy()})["scores"]
            np.testing.assert_allclose(result, module(ids, dense).numpy(), atol=1e-5)


@pytest.mark.parametrize("kind", one_in(2, [Catches, CatchesOfOthers, Returns, Keeps, Branches]))
def test_a_question_that_an_answer_hangs_on_is_refused(kind: Callable[[], Scored], tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"depends on numbers of the request at .*test_value_checks.py, line .*torch.where"
    ):
        export_model(kind().eval(), tmp_path / "r", "m", EXACT, example=call_of(6))
    assert not (tmp_path / "r" / "m").exists()
