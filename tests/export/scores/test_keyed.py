"""Models that loop over the keys of what collections answer, and regroup it: followed, and served as they answer."""

import copy
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor, KeyedTensor
from torchrec.modules.regroup import KTRegroupAsDict
from torchrec.types import DataType

from export import export_model
from export.errors import ModelError, ParityError
from serving.bundle.load import open_bundle
from serving.engine import Engine
from tests.support.long_cases import one_in
from tests.support.managed_collision import managed
from tests.support.models import Spec, collection
from tests.support.scored_models import EXACT, QUERY, own_scores, random_request, trained

ITEM = (Spec("item", 300, 8, "SUM", ("item_id",)), Spec("seen", 300, 12, "MEAN", ("recent", "item_id")))
# TorchRec's names of the answers: in `item` two tables read item_id. None is left out: rows whose
# columns no group had were not numbers after training.
GROUPS = [["words", "user_id"], ["item_id@item", "item_id@item"], ["country", "item_id@seen", "recent"]]
QUERY_GROUPS = [["words"], ["country", "user_id"]]


class Keyed(nn.Module):
    """Two collections; the second is called after what is done with the first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.item = collection(QUERY, seed=1), collection(ITEM, seed=2)
        towers = {"user_id": 16, "country": 16, "words": 24, "a": 40, "b": 16, "c": 40}
        self.towers = nn.ModuleDict({name: nn.Linear(width, 6) for name, width in towers.items()})
        self.over = nn.Linear(32, 6)
        self.regroup = KTRegroupAsDict(GROUPS, ["a", "b", "c"])

    def summed(self, named: dict[str, Tensor]) -> Tensor:
        total = torch.stack([self.towers[name](rows).relu() for name, rows in named.items()])
        return total.sum(dim=0)

    def of_item(self, ids: KeyedJaggedTensor) -> Tensor:
        scores: Tensor = self.over(self.item(ids).values())
        return scores

    def forward(self, ids: KeyedJaggedTensor) -> Any:
        return self.of_query(self.query(ids)) * self.of_item(ids)

    def of_query(self, pooled: KeyedTensor) -> Any:
        raise NotImplementedError


class Loops(Keyed):
    def of_query(self, pooled: KeyedTensor) -> Tensor:
        out = torch.zeros(1)
        for position, key in enumerate(pooled.keys()):
            out = out + self.towers[key](pooled[key]) * (position + 1)
        return out


class MakesDict(Keyed):
    def of_query(self, pooled: KeyedTensor) -> Tensor:
        return self.summed(pooled.to_dict())


class Unpacks(Keyed):
    def of_query(self, pooled: KeyedTensor) -> Tensor:
        return self.summed(dict(**pooled))


class Splits(Keyed):
    def of_query(self, pooled: KeyedTensor) -> Tensor:
        pieces = pooled.values().split(pooled.length_per_key(), dim=pooled.key_dim())
        by_size = torch.split(pooled.values(), split_size_or_sections=pooled.length_per_key(), dim=1)
        assert len(pieces) == 3
        return self.summed(dict(zip(pooled.keys(), pieces, strict=True))) + self.summed(
            dict(zip(pooled.keys(), list(by_size), strict=True))
        )


class Cuts(Keyed):
    def of_query(self, pooled: KeyedTensor) -> Tensor:
        ends = pooled.offset_per_key()
        spans = zip(pooled.keys(), ends, ends[1:], strict=False)
        return self.summed({key: pooled.values()[:, first:last] for key, first, last in spans})


class Regroups(Keyed):
    def of_query(self, pooled: KeyedTensor) -> Tensor:
        words, rest = KeyedTensor.regroup([pooled], QUERY_GROUPS)
        (again,) = KeyedTensor.regroup([pooled], [["words", "words", "country"]])
        return self.towers["words"](words) + self.towers["a"](again[:, 8:48]) + rest[:, :6]  # type: ignore[no-any-return]


class RegroupsLoop(Keyed):
    def of_query(self, pooled: KeyedTensor) -> Tensor:
        means = [tensor.mean(dim=1) for tensor in KeyedTensor.regroup([pooled], groups=QUERY_GROUPS)]
        return torch.stack([*means, *means, *means], dim=1)


class RegroupsDict(Keyed):
    def of_query(self, pooled: KeyedTensor) -> Tensor:
        return self.summed(KeyedTensor.regroup_as_dict([pooled], [["words"], ["user_id"]], ["words", "country"]))


class RegroupsBoth(Keyed):
    def forward(self, ids: KeyedJaggedTensor) -> dict[str, Tensor]:
        named = self.regroup([self.query(ids), self.item(ids)])
        return {"sum": self.summed(named), **{name: rows.mean(dim=1) for name, rows in named.items()}}


class RegroupsNarrow(Keyed):
    def __init__(self) -> None:
        super().__init__()
        self.regroup = KTRegroupAsDict(groups=QUERY_GROUPS, keys=["words", "rest"], emb_dtype=DataType.BF16)

    def of_query(self, pooled: KeyedTensor) -> Tensor:
        named = self.regroup(keyed_tensors=[pooled])
        return named["words"].float()[:, :6] + named["rest"].float()[:, :6]  # type: ignore[no-any-return]


MODELS: list[Callable[[], Keyed]] = [
    Loops, MakesDict, Unpacks, Splits, Cuts, Regroups, RegroupsLoop, RegroupsDict, RegroupsBoth, RegroupsNarrow,
]  # fmt: skip


def assert_served(module: nn.Module, bundle: Path) -> None:
    engine = Engine.open(bundle)
    for samples in (1, 2, 33):
        bags, dense = random_request(module, np.random.default_rng(samples), samples)
        expected, scores = own_scores(copy.deepcopy(module), bags, dense), engine.score(bags, dense)
        assert list(scores) == list(expected)
        for name, numbers in expected.items():
            np.testing.assert_allclose(scores[name], numbers, rtol=0, atol=1e-6 * max(1, np.abs(numbers).max()))


@pytest.mark.parametrize(
    ("model", "fresh"),
    [
        *one_in(4, [(model, True) for model in MODELS]),
        # What a module has seen matters to KTRegroupAsDict alone, which keeps it.
        *(pytest.param(model, False, marks=pytest.mark.long) for model in (Loops, RegroupsBoth, RegroupsNarrow)),
    ],
)
def test_operations_on_keys_are_traced(model: Callable[[], Keyed], fresh: bool, tmp_path: Path) -> None:
    """A fresh module has seen no batch: TorchRec's KTRegroupAsDict does not know the keys yet."""
    module = trained(model())
    if fresh:
        state, module = module.state_dict(), model().eval()
        module.load_state_dict(state)
    bundle = export_model(module, tmp_path, "m", EXACT)
    part = open_bundle(bundle).manifest.dense_part
    assert part is not None
    assert all(tensor.parity.trained is not None for tensor in part.outputs)
    assert_served(module, bundle)


@pytest.mark.parametrize("model", one_in(2, [RegroupsBoth, Loops]))
def test_loops_over_keys_are_served_with_weights_of_a_checkpoint(model: Callable[[], Keyed], tmp_path: Path) -> None:
    module = trained(model())
    torch.save(module.state_dict(), tmp_path / "saved")
    with torch.device("meta"):
        untrained = model()
    assert_served(module, export_model(untrained, tmp_path / "r", "m", EXACT, checkpoint=tmp_path / "saved"))


def test_keys_of_a_managed_collision_collection_are_known(tmp_path: Path) -> None:
    class Managed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.sparse, self.over = managed(), nn.Linear(4, 1)

        def forward(self, ids: KeyedJaggedTensor) -> Tensor:
            pooled, _ = self.sparse(ids)
            means = [pooled[key].mean(dim=1) * (position + 1) for position, key in enumerate(pooled.keys())]
            scores: Tensor = self.over(torch.stack(means, dim=1))
            return scores

    part = open_bundle(export_model(Managed(), tmp_path, "m", EXACT)).manifest.dense_part
    assert part is not None
    assert part.outputs[0].parity.trained is not None
    assert part.outputs[0].parity.trained < 1e-5


def test_without_scores_a_collection_behind_a_loop_is_found(tmp_path: Path) -> None:
    """Following stops at nothing that keys explain: ids of `item` are known to be those of the request."""
    bundle = export_model(Loops(), tmp_path, "m")
    assert len(open_bundle(bundle).manifest.tables) == 4


def test_a_regrouping_cached_for_another_key_order_is_refused(tmp_path: Path) -> None:
    """KTRegroupAsDict keeps what it made of its first batch, whose keys were in another order."""
    module = RegroupsBoth().eval()
    with torch.no_grad():
        query = KeyedTensor(["words", "country", "user_id"], [24, 16, 16], torch.zeros(2, 56))
        item = KeyedTensor(["item_id@seen", "recent", "item_id@item"], [12, 12, 8], torch.zeros(2, 32))
        module.regroup([query, item])
    with pytest.raises(
        ParityError, match="RegroupsBoth: output 'sum': what follows the collections answers differently"
    ):
        export_model(module, tmp_path, "m", EXACT)


class LoopsIds(Keyed):
    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        return torch.stack([self.query(ids)[key].sum(dim=1) for key in ids.keys()])  # noqa: SIM118  # to blame


class LoopsChunks(Keyed):
    def of_query(self, pooled: KeyedTensor) -> Tensor:
        return torch.stack([tensor.sum(dim=1) for tensor in pooled.values().chunk(3, dim=1)])  # to blame


class LoopsRows(Keyed):
    def of_query(self, pooled: KeyedTensor) -> Tensor:
        return torch.stack([tensor * 2 for tensor in pooled.values()])  # to blame


class AsksForAnother(Keyed):
    def of_query(self, pooled: KeyedTensor) -> Tensor:
        scores: Tensor = pooled["nobody"] * 2  # to blame
        return scores


class RegroupsOthers(RegroupsNarrow):
    def of_query(self, pooled: KeyedTensor) -> Tensor:
        other_order = KeyedTensor(["country", "user_id", "words"], [16, 16, 24], pooled.values())
        scores: Tensor = self.regroup([other_order])["words"]
        return scores[:, :6]


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (LoopsIds, "Proxy object cannot be iterated"),
        (LoopsChunks, "Proxy object cannot be iterated"),
        (LoopsRows, "Proxy object cannot be iterated"),
        (AsksForAnother, "'nobody'"),
        (RegroupsOthers, "RegroupsOthers: its forward cannot be"),
    ],
)  # fmt: skip
def test_untraceable_loops_and_unknown_keys_are_refused(model: Callable[[], Keyed], why: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as refused:
        export_model(model().eval(), tmp_path / "r", "m", EXACT)
    message = str(refused.value)
    assert why in message
    lines, first = inspect.getsourcelines(model)
    for number, line in enumerate(lines):
        assert "# to blame" not in line or f" at {__file__}, line {first + number}: `{line.strip()}`" in message
    assert not (tmp_path / "r").exists()
