"""Random numbers that a forward draws in eval mode, of Python and numpy: a graph would have those of the export."""

import cProfile
import pstats
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.random import rand
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor

from export import export_model
from export.errors import ModelError
from serving.engine import Engine
from tests.support.long_cases import one_in
from tests.support.models import SUM, collection
from tests.support.scored_models import EXACT

IDS = {"x": [[1, 2], [3]], "y": [[4], []], "z": [[5], [6]]}


class Scored(nn.Module):
    """What it draws would change an answer once in a thousand times: no comparison of answers would show it."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = collection(SUM)
        self.generator = np.random.default_rng(0)

    def drawn(self) -> float:
        raise NotImplementedError

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        factor = 2 if self.drawn() < 0.001 else 1
        total: Tensor = self.bags(ids).values().sum(1) * factor
        return total


class OfPython(Scored):
    def drawn(self) -> float:
        return random.random()


class OfPythonByRange(Scored):
    def drawn(self) -> float:
        return random.randint(1, 10_000)


class OfPythonUnseeded(Scored):
    def drawn(self) -> float:
        return random.Random().random()


class OfNumpy(Scored):
    def drawn(self) -> float:
        return float(np.random.uniform())


class OfNumpyImported(Scored):
    def drawn(self) -> float:
        return float(rand())


class OfHeldGenerator(Scored):
    def drawn(self) -> float:
        return float(self.generator.random())


class OfNumpyUnseeded(Scored):
    def drawn(self) -> float:
        return float(np.random.default_rng().random())


class SeededPython(Scored):
    def drawn(self) -> float:
        return random.Random(7).random()


class SeededNumpy(Scored):
    def drawn(self) -> float:
        np.random.seed(7)
        return float(np.random.uniform() + np.random.default_rng(7).random())


class InTraining(Scored):
    def drawn(self) -> float:
        return random.random() if self.training else 1.0


RANDOM = (
    OfPython, OfPythonByRange, OfPythonUnseeded, OfNumpy, OfNumpyImported, OfHeldGenerator, OfNumpyUnseeded,
)  # fmt: skip


def keyed(bags: dict[str, list[list[int]]]) -> KeyedJaggedTensor:
    flat = [value for column in bags.values() for bag in column for value in bag]
    lengths = torch.tensor([len(bag) for column in bags.values() for bag in column], dtype=torch.int32)
    return KeyedJaggedTensor([*bags], torch.tensor(flat), lengths=lengths)


@pytest.mark.parametrize("example", one_in(2, [None, ((keyed(IDS),),)]), ids=["without an example", "with one"])
@pytest.mark.parametrize("kind", one_in(3, RANDOM))
def test_random_numbers_are_refused_with_their_line(kind: type[Scored], example: Any, tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"draws random numbers in eval mode at .*test_outside_reads.py, line \d+: `return"
    ):
        export_model(kind().eval(), tmp_path / "r", "m", EXACT, example=example)
    assert not (tmp_path / "r" / "m").exists()


@pytest.mark.parametrize("example", one_in(2, [None, ((keyed(IDS),),)]), ids=["without an example", "with one"])
@pytest.mark.parametrize("kind", one_in(2, [SeededPython, SeededNumpy, InTraining]))
def test_seeded_random_numbers_are_served(kind: type[Scored], example: Any, tmp_path: Path) -> None:
    module = kind().eval()
    bundle = export_model(module, tmp_path / "r", "m", EXACT, example=example)
    with Engine.open(bundle) as engine, torch.no_grad():
        np.testing.assert_allclose(engine.score(IDS)["scores"], module(keyed(IDS)).numpy(), atol=1e-5)


@pytest.mark.long
def test_an_export_can_be_profiled(tmp_path: Path) -> None:
    """A profiler in C, as cProfile before Python 3.12, is no function that `sys.setprofile` takes."""
    profile = cProfile.Profile()
    with profile:
        export_model(SeededPython().eval(), tmp_path / "r", "m", EXACT)
    functions = {name for _, _, name in pstats.Stats(profile).stats}  # type: ignore[attr-defined]
    assert {"export_model", "publish"} <= functions
