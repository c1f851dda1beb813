"""Python's `len` and `int` in a model's file: sizes that may be any, unless the file hands them on."""

import builtins
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor

from export import export_model
from export.errors import ModelError
from serving.engine import Engine
from tests.models.inputs import ids
from tests.support.long_cases import one_in
from tests.support.scored_models import EXACT

SOURCE = """
import torch
from torch import nn
from tests.models.inputs import DIM, POOLED
from tests.support.models import collection


class Ranker(nn.Module):
    def __init__(self):
        super().__init__()
        self.bags = collection(POOLED[:1])

    def forward(self, keyed):
        pooled = self.bags(keyed).values()
        return {body}
"""
SIZES = "pooled * int(len(pooled) / len(pooled)) + torch.ones(int(pooled.size(0)), DIM)"
HANDED_ON = "pooled + torch.arange(DIM, dtype=int) + sum(map(int, '12'))"
LEN_HANDED_ON = "pooled * len(max([[1], [2, 3]], key=len)) + torch.ones(len(pooled), DIM)"


@pytest.fixture
def written(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """A model's file, whose forward is the parameter."""
    path = tmp_path / "a_ranker_of_a_user.py"
    path.write_text(SOURCE.format(body=request.param))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules[path.stem]


@pytest.mark.parametrize("written", [SIZES, HANDED_ON, LEN_HANDED_ON], indirect=True)
def test_sizes_as_python_numbers_are_served_and_patches_are_undone(written: ModuleType, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = written.Ranker().eval()
    before = {**vars(written)}
    bundle = export_model(model, tmp_path / "r", "m", EXACT, example=(example(5),))
    assert vars(written) == before
    assert vars(builtins)["int"] is int
    with Engine.open(bundle) as engine:
        for samples in (1, 2, 9):
            keyed = example(samples)
            (scores,) = engine.score({"user_id": {"values": keyed.values(), "lengths": keyed.lengths()}}).values()
            torch.testing.assert_close(torch.from_numpy(scores.copy()), answer(model, keyed), rtol=0, atol=1e-6)


@pytest.mark.parametrize("written", one_in(2, [SIZES, LEN_HANDED_ON]), indirect=True)
def test_a_module_imported_under_several_names_is_restored(
    written: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a package has it that imports its parts under short names, too."""
    torch.manual_seed(0)
    model = written.Ranker().eval()
    for alias in ("a_ranker_by_another_name", "a_ranker_by_a_third_name"):
        monkeypatch.setitem(sys.modules, alias, written)
    stub = type(sys)("a_stub")
    stub.__file__ = None
    monkeypatch.setitem(sys.modules, "a_stub", stub)
    monkeypatch.setitem(sys.modules, "no_module", SimpleNamespace(__file__=SimpleNamespace()))
    named = {
        name: type(name, (), {"__module__": name}) for name in ("a_ranker_by_another_name", "a_stub", "no_module")
    }
    named["third"] = type("third", (), {"__module__": "a_ranker_by_a_third_name"})
    for name, kind in named.items():
        monkeypatch.setattr(written, name, kind, raising=False)
    before = {**vars(written)}
    bundle = export_model(model, tmp_path / "r", "m", EXACT, example=(example(5),))
    assert vars(written) == before
    with Engine.open(bundle) as engine:
        keyed = example(3)
        (scores,) = engine.score({"user_id": {"values": keyed.values(), "lengths": keyed.lengths()}}).values()
        torch.testing.assert_close(torch.from_numpy(scores.copy()), answer(model, keyed), rtol=0, atol=1e-6)


A_LIST = "works for the number of samples of the example only"
ONE = "depends on whether there is one sample"


@pytest.mark.promise(
    "A forward that changes with the number of ids, over time or with padding is refused at export with its line"
)
@pytest.mark.parametrize(
    ("written", "why"),
    one_in(
        4,
        [
            ("pooled * 2 if [1] * len(pooled) == [1, 1] else pooled", A_LIST),
            ("pooled * 2 if [0] * ((len(pooled) - 2) * (len(pooled) - 2)) else pooled", A_LIST),
            ("pooled * 2 if str([1] * len(pooled)) == '[1, 1]' else pooled", A_LIST),
            ("pooled * 2 if [1] * len(pooled) in ([1, 1], [1]) else pooled", A_LIST),
            ("pooled * 2 if isinstance([1] * len(pooled), list) else pooled", A_LIST),
            ("pooled * len([1] * len(pooled))", A_LIST),
            ("pooled * sum([1] * len(pooled))", A_LIST),
            ("pooled * ([1] * len(pooled))[0]", A_LIST),
            ("pooled * torch.tensor([*([1] * len(pooled))])[:, None]", A_LIST),
            ("pooled.clamp(-1, 1) if pooled.shape[0] == 1 else pooled", ONE),
            ("pooled.clamp(-1, 1) if len(pooled) > 1 else pooled", ONE),
            ("pooled if len(pooled) - 1 else pooled.clamp(-1, 1)", ONE),
            ("[pooled.clamp(-1, 1), pooled][bool(len(pooled) - 1)]", ONE),
            ("pooled * (torch.tensor([0.5]) if len(pooled) == 1 else torch.tensor([0.7]))", ONE),
            ("pooled * (0.5 if len(pooled) == 1 else 0.7)", ONE),
            ("pooled * (2 if 2 * pooled.shape[0] < 4 else 1)", ONE),
        ],
    ),
    indirect=["written"],
)
def test_lists_and_branches_depending_on_sizes_are_refused_with_their_line(
    written: ModuleType, tmp_path: Path, why: str
) -> None:
    """Whatever the example's happens to be."""
    with pytest.raises(ModelError, match=rf"a_ranker_of_a_user\.py, line \d+: `return .*{why}|{why}.* at .*a_ranker"):
        export_model(written.Ranker().eval(), tmp_path / "r", "m", EXACT, example=(example(5),))


def example(samples: int) -> KeyedJaggedTensor:
    return ids(np.random.default_rng(samples), samples, "user_id")


def answer(model: torch.nn.Module, keyed: KeyedJaggedTensor) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(keyed)
    return result
