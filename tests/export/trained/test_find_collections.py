"""What of a trained module is served, and that whatever changes ids, weights or pooling on the way is refused by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection, KeyedJaggedTensor
from torchrec.inference.modules import quantize_embeddings
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM, DLRM_DCN
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_tower import EmbeddingTower, EmbeddingTowerCollection
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.itep_embedding_modules import ITEPEmbeddingBagCollection
from torchrec.modules.itep_modules import GenericITEPModule

from export import export_model
from export.errors import ModelError
from export.trained.find_collections import find_collections
from serving.bundle.load import open_bundle
from tests.support.wrapped_collections import Around, Hash, pooled


def position_weighted() -> Any:
    return FeatureProcessedEmbeddingBagCollection(
        pooled(weighted=True), PositionWeightedModuleCollection({"fa": 10, "fb": 10})
    )


class Hashes(Around):
    def forward(self, kjt: KeyedJaggedTensor) -> Any:
        return self.ebc(KeyedJaggedTensor(kjt.keys(), kjt.values() % 10, lengths=kjt.lengths()))


class HashesInPlace(Around):
    def forward(self, kjt: KeyedJaggedTensor) -> Any:
        kjt.values().remainder_(10)
        return self.ebc(kjt)


class HashesBehindDense(Around):
    """The dense part is what changes the ids: it is one step, and not looked into."""

    def __init__(self) -> None:
        super().__init__()
        self.hash = Hash()

    def forward(self, kjt: KeyedJaggedTensor) -> Any:
        return self.ebc(self.hash(kjt))


class Branches(Around):
    """On values, before its collection is called."""

    def forward(self, kjt: KeyedJaggedTensor) -> Any:
        if kjt.values().sum() > 0:
            return self.ebc(kjt)
        return None


class NeverCalls(Around):
    def forward(self, kjt: KeyedJaggedTensor) -> Any:
        return kjt


class Overrides(EmbeddingBagCollection):  # type: ignore[misc]
    def forward(self, features: Any) -> Any:
        return super().forward(Hash()(features))


def with_sequences(**options: Any) -> nn.Module:
    sequences = EmbeddingCollection(
        tables=[EmbeddingConfig(name="t", num_embeddings=10, embedding_dim=8, feature_names=["s"])], **options
    )
    return nn.ModuleDict({"pooled": pooled(), "sequences": sequences})


def with_indices() -> nn.Module:
    return with_sequences(need_indices=True)


def padded() -> Any:
    module: Any = with_sequences()
    module["sequences"].embeddings["t"].padding_idx = 0
    return module


def quantized() -> nn.Module:
    module: nn.Module = quantize_embeddings(nn.Sequential(pooled()), torch.qint8, inplace=True)
    return module


def hooked(register: str) -> Any:
    collection = pooled()
    getattr(collection, register)(lambda *_: None)
    return collection


def with_own_forward() -> Any:
    collection: Any = pooled()
    collection.forward = lambda kjt: EmbeddingBagCollection.forward(collection, Hash()(kjt))
    return collection


def with_bag(**changed: Any) -> Any:
    collection = pooled()
    for name, value in changed.items():
        setattr(collection.embedding_bags["b"], name, value)
    return collection


GIVES_OTHERS = "gives the collection .* other ids or weights than its own inputs"


@pytest.mark.parametrize(
    ("build", "message"),
    [
        pytest.param(lambda: ITEPEmbeddingBagCollection(pooled(), GenericITEPModule({}, [])), f"ITEPEmbeddingBagCollection: {GIVES_OTHERS}", id="ITEP"),
        pytest.param(Hashes, f"Hashes: {GIVES_OTHERS}", id="ids made anew"),
        pytest.param(HashesInPlace, f"HashesInPlace: {GIVES_OTHERS}", id="ids changed in place"),
        pytest.param(HashesBehindDense, f"HashesBehindDense: {GIVES_OTHERS}", id="ids changed by a module"),
        pytest.param(lambda: nn.Sequential(nn.Linear(2, 2), pooled()), f"Sequential: {GIVES_OTHERS}", id="behind another"),
        pytest.param(Branches, "cannot be traced to the collection 'ebc' .*control flow", id="control flow"),
        pytest.param(NeverCalls, "cannot be traced to the collection 'ebc'", id="never called"),
        pytest.param(lambda: Overrides(tables=pooled().embedding_bag_configs()), "Overrides: expected EmbeddingBagCollection", id="subclass"),
        pytest.param(with_indices, r"sequences \(EmbeddingCollection\): need_indices: expected False", id="sequences with indices"),
        pytest.param(padded, r"sequences \(EmbeddingCollection\): embeddings\.t: expected a plain nn\.Embedding, without", id="sequences with padding"),
        pytest.param(quantized, r"0 \(EmbeddingBagCollection\): expected EmbeddingBagCollection or Fused", id="quantized already"),
        pytest.param(lambda: hooked("register_forward_pre_hook"), "has a hook", id="pre-hook"),
        pytest.param(lambda: hooked("register_forward_hook"), "has a hook", id="hook"),
        pytest.param(with_own_forward, "forward of its own", id="own forward"),
        pytest.param(lambda: with_bag(max_norm=1.0), r"embedding_bags\.b: expected a plain nn.EmbeddingBag", id="max_norm"),
        pytest.param(lambda: with_bag(padding_idx=0), r"embedding_bags\.b: expected a plain nn.EmbeddingBag", id="padding_idx"),
    ],
)  # fmt: skip
def test_modules_that_change_a_lookup_are_refused_by_name(
    build: Callable[[], nn.Module], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        export_model(build(), tmp_path / "r", "m")
    assert list(tmp_path.iterdir()) == []


class Scores(Around):
    """Takes a batch apart, branches on what it looked up, and goes on after it."""

    def forward(self, batch: Any, dense: Tensor) -> Any:
        looked_up = self.ebc(batch["sparse"].to("cpu")).values()
        return self.over(looked_up) if looked_up.sum() > 0 else dense


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user, self.item, self.project = pooled("a"), pooled("b"), nn.Linear(8, 8)

    def forward(self, kjt: KeyedJaggedTensor) -> Any:
        return (self.project(self.user(kjt).values()) * self.item(kjt).values()).sum(1)


def towers() -> Any:
    return EmbeddingTowerCollection([EmbeddingTower(pooled(name), nn.Linear(8, 8)) for name in ("a", "b")])


DENSE = ["dense_arch (DenseArch)", "over_arch (OverArch)"]


@pytest.mark.parametrize(
    ("build", "collections", "left_out"),
    [
        pytest.param(pooled, [""], [], id="a collection"),
        pytest.param(lambda: nn.ModuleDict({"a": pooled(), "l": nn.Linear(2, 2)}), ["a"], ["l (Linear)"], id="a container"),
        pytest.param(lambda: DLRM(pooled(), 4, [8, 8], [4, 1]), ["sparse_arch.embedding_bag_collection"], DENSE, id="DLRM"),
        pytest.param(lambda: DLRM_DCN(pooled(), 4, [8, 8], [4, 1], 2, 2), ["sparse_arch.embedding_bag_collection"], DENSE, id="DLRM_DCN"),
        pytest.param(lambda: SimpleDeepFMNN(4, pooled(), 8, 8), ["sparse_arch.embedding_bag_collection"], DENSE, id="DeepFM"),
        pytest.param(TwoTowers, ["user", "item"], ["project (Linear)", "TwoTowers.forward after its collections"], id="two towers"),
        pytest.param(position_weighted, [""], [], id="position weights"),
        pytest.param(lambda: nn.ModuleDict({"a": position_weighted(), "l": nn.Linear(2, 2)}), ["a"], ["l (Linear)"], id="position weights in a container"),
        pytest.param(towers, ["towers.0.embedding", "towers.1.embedding"], ["towers.0.interaction (Linear)"], id="tower collection"),
        pytest.param(Scores, ["ebc"], ["over (Linear)", "Scores.forward after its collections"], id="control flow behind"),
    ],
)  # fmt: skip
def test_modules_around_collections_are_left_out_and_named(
    build: Callable[[], nn.Module], collections: list[str], left_out: list[str]
) -> None:
    module = build()
    training = {part for part in module.modules() if part.training}
    result = find_collections(module)
    assert list(result.collections) == collections
    assert set(left_out) <= set(result.left_out)
    assert {part for part in module.modules() if part.training} == training


def test_the_manifest_names_what_was_left_out(tmp_path: Path) -> None:
    manifest = open_bundle(export_model(TwoTowers(), tmp_path / "r", "m")).manifest
    assert manifest.left_out == ("TwoTowers.forward after its collections", "project (Linear)")
