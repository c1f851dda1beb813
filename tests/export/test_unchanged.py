"""Exports leave the caller's model alone; `tests.support.mutation_check` looks at that in every test that exports."""

import inspect
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchrec import JaggedTensor, KeyedJaggedTensor

from export import ExportConfig, export_model
from export.errors import ExportError, ModelError
from export.pipeline import plan_model
from serving.engine import Engine
from tests.support.models import SUM, collection
from tests.support.mutation_check import EXPORTS, _state, assert_example_unchanged, assert_unchanged, example_state
from tests.support.scored_models import EXACT, WIDTH, even, own_scores, random_request


class Tied(nn.Module):
    """Its output layer is one of its tables: a softmax over all rows of that."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = even()
        self.over = nn.Linear(64, 16)

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        logits: Tensor = self.over(self.bags(ids).values()) @ self.bags.embedding_bags["t1"].weight.t()
        return logits.softmax(1)


class Remembers(nn.Module):
    """It keeps what it saw, holds what cannot be copied, and has hooks and parts that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = even()
        self.over = nn.Linear(64, 1)
        self.unused = nn.BatchNorm1d(3)
        self.seen: Any = None
        self.lock = threading.Lock()
        self.register_buffer("mean", torch.ones(3))
        self.over.register_full_backward_hook(lambda *_: None)

    def forward(self, ids: KeyedJaggedTensor, dense_features: Tensor) -> Tensor:
        self.seen = self.bags(ids).values()
        logits: Tensor = self.over(self.seen) + dense_features[:, :1]
        return logits


def test_the_mutation_check_wraps_every_export_function() -> None:
    for home, names in EXPORTS.items():
        for name in names:
            function = getattr(import_module(home), name)
            assert inspect.unwrap(function) is not function


@pytest.mark.parametrize("checkpoint", ["none", "trained", "meta"])
def test_tables_that_the_forward_reads_stay_where_they_are(tmp_path: Path, checkpoint: str) -> None:
    torch.manual_seed(0)
    trained = Tied().eval()
    saved = None
    module = trained
    if checkpoint != "none":
        saved = tmp_path / "saved.pt"
        torch.save(trained.state_dict(), saved)
        with torch.device("meta" if checkpoint == "meta" else "cpu"):
            module = Tied()
    bundle = export_model(module, tmp_path / "r", "m", EXACT, checkpoint=saved)
    assert list(module.bags.embedding_bags) == ["t0", "t1", "t2", "t3"]
    bags, _ = random_request(trained, np.random.default_rng(0), 5)
    scores, expected = Engine.open(bundle).score(bags)["scores"], own_scores(trained, bags, {})["scores"]
    assert scores.shape == (5, 101)
    np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("export", [export_model, lambda module, *_: plan_model(module, ExportConfig())])
def test_a_model_in_training_stays_as_it_is(tmp_path: Path, export: Callable[..., Any]) -> None:
    module = Remembers().train()
    module.over.eval()
    module.over.weight.requires_grad_(False)
    (
        module.over(torch.ones(1, 64, requires_grad=True)) * module.bags.embedding_bags["t0"].weight.sum()
    ).sum().backward()
    before = dict(_state(module))
    config = ExportConfig(scores=True, dense_widths={"dense_features": WIDTH})
    export(module, tmp_path, "m", config)
    assert_unchanged(module, before)
    assert module.seen is None


def test_a_dense_part_of_one_s_own_stays_in_training(tmp_path: Path) -> None:
    class Own(nn.Module):
        def forward(self, embeddings: dict[str, Tensor]) -> Tensor:
            return embeddings["f0"].sum(dim=1)

    dense = Own().train()
    export_model(even(), tmp_path, "m", EXACT, dense=dense)
    assert dense.training


def test_a_refused_model_stays_as_it_is(tmp_path: Path) -> None:
    class Branches(Remembers):
        def forward(self, ids: KeyedJaggedTensor, dense_features: Tensor) -> Tensor:
            self.seen = logits = super().forward(ids, dense_features)
            return logits if logits.sum() > 0 else -logits

    module = Branches()
    with pytest.raises(ModelError, match="cannot be traced"):
        export_model(module, tmp_path, "m", EXACT)
    assert module.seen is None


class WritesByData(Tied):
    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        self.bags.embedding_bags["t1"].weight.data.clamp_(-1e-3, 1e-3)
        return super().forward(ids)


class WritesRows(Tied):
    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        self.bags.embedding_bags["t1"].weight[3].mul_(0.5)
        return super().forward(ids)


@pytest.mark.parametrize("model", [WritesByData, WritesRows])
def test_a_forward_that_writes_to_a_table_is_refused(tmp_path: Path, model: type[nn.Module]) -> None:
    with pytest.raises(ModelError, match=r"its forward writes to 'bags.embedding_bags.t1.weight'"):
        export_model(model(), tmp_path, "m", EXACT)


def test_a_layer_that_writes_to_a_shared_table_writes_to_a_copy(tmp_path: Path) -> None:
    written: list[Tensor] = []

    class Renormalizes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags = even()
            self.kinds = nn.Embedding(100, 16, max_norm=0.01)
            self.kinds.weight = self.bags.embedding_bags["t0"].weight

        def forward(self, ids: KeyedJaggedTensor, dense_features: Tensor) -> Tensor:
            rows = self.kinds(dense_features[:, 0].nan_to_num().clamp(0, 9).long())
            written.append(self.kinds.weight)
            logits: Tensor = (self.bags(ids)["f0"] * rows).sum(1)
            return logits

    config = ExportConfig(scores=True, dense_widths={"dense_features": WIDTH})
    model = Renormalizes()
    before = model.kinds.weight.detach().clone()
    with suppress(ExportError):  # whether it is served is another question
        export_model(model, tmp_path, "m", config)
    assert torch.equal(model.kinds.weight, before)
    copies = [weight for weight in written if type(weight) is nn.Parameter and not weight.is_meta]
    assert any(not torch.equal(weight, before) for weight in copies)


def test_a_tensor_that_was_computed_is_copied(tmp_path: Path) -> None:
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags = even()
            self.over = nn.Linear(64, 4)
            self.cache = (self.over.weight * 2).sum(1)

        def forward(self, ids: KeyedJaggedTensor) -> Tensor:
            logits: Tensor = self.over(self.bags(ids).values()) + self.cache
            return logits

    module = Cached().eval()
    bundle = export_model(module, tmp_path, "m", EXACT)
    bags, _ = random_request(module, np.random.default_rng(0), 5)
    expected = own_scores(module, bags, {})["scores"]
    np.testing.assert_allclose(Engine.open(bundle).score(bags)["scores"], expected, rtol=0, atol=1e-6)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a part": lambda m: setattr(m, "bags", collection(SUM)),
    "a part of a part": lambda m: delattr(m.bags.embedding_bags, "t1"),
    "a parameter's numbers": lambda m: m.over.weight.data.add_(1),
    "a parameter": lambda m: setattr(m.over, "weight", nn.Parameter(m.over.weight.detach().clone())),
    "a table's numbers": lambda m: m.bags.embedding_bags["t0"].weight.data[3, 3].zero_(),
    "a buffer": lambda m: m.mean.mul_(2),
    "requires_grad": lambda m: m.over.weight.requires_grad_(False),
    "a gradient": lambda m: setattr(m.over.bias, "grad", torch.zeros(1)),
    "the mode": lambda m: m.unused.eval(),
    "a hook": lambda m: m.over.register_forward_hook(lambda *_: None),
    "an attribute": lambda m: setattr(m, "seen", 1),
    "a new attribute": lambda m: setattr(m, "new", 1),
}


class OfBatch(nn.Module):
    """It writes to its arguments, and keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = even()

    def forward(self, ids: KeyedJaggedTensor, batch: dict[str, Any]) -> Tensor:
        batch["price"].clamp_(0, 1)
        batch["events"].values().mul_(2)
        batch["seen"] = ids.lengths()
        return self.bags(ids).values().sum(1) + batch["price"].sum(1)  # type: ignore[no-any-return]


def example_of_batch() -> tuple[Any, ...]:
    values, lengths = torch.arange(24) % 7, torch.ones(24, dtype=torch.int32)
    ids = KeyedJaggedTensor(["f0", "f1", "f2", "f3"], values, lengths=lengths)
    price = torch.randn(6, 2, requires_grad=True)
    (price * 2).sum().backward()  # type: ignore[no-untyped-call]
    return ids, {"price": price, "events": JaggedTensor(torch.rand(6), lengths=lengths[:6]), "names": ["a", None]}


def test_an_example_stays_as_it_is(tmp_path: Path) -> None:
    module, example = OfBatch().eval(), example_of_batch()
    before = dict(example_state(example))
    with suppress(ExportError):  # it is the example that counts
        export_model(module, tmp_path, "m", EXACT, example=example)
    assert_example_unchanged(example, before)
    assert "example.0._stride" in before
    assert isinstance(example[1]["price"].grad, Tensor)


CHANGES_OF_EXAMPLE: dict[str, Callable[[Any], Any]] = {
    "a tensor's numbers": lambda e: e[1]["price"].data.zero_(),
    "a tensor": lambda e: e[1].update(price=e[1]["price"].detach().clone()),
    "a gradient": lambda e: e[1]["price"].grad.zero_(),
    "a hook": lambda e: e[1]["price"].register_hook(lambda _: None),
    "requires_grad": lambda e: e[1]["price"].requires_grad_(False),
    "ids": lambda e: e[0].values()[0].add_(1),
    "what a KJT keeps": lambda e: e[0].offsets(),
    "values of a JaggedTensor": lambda e: e[1]["events"].values().mul_(2),
    "an entry": lambda e: e[1].update(seen=1),
    "an item": lambda e: e[1]["names"].append("c"),
}


@pytest.mark.parametrize("change", CHANGES_OF_EXAMPLE)
def test_every_change_of_an_example_is_detected(change: str) -> None:
    example = example_of_batch()
    before = dict(example_state(example))
    assert_example_unchanged(example, before)
    CHANGES_OF_EXAMPLE[change](example)
    with pytest.raises(AssertionError, match="the export changed"):
        assert_example_unchanged(example, before)


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_of_a_model_is_detected(change: str) -> None:
    module = Remembers()
    before = dict(_state(module))
    assert_unchanged(module, before)
    CHANGES[change](module)
    with pytest.raises(AssertionError, match="the export changed"):
        assert_unchanged(module, before)
