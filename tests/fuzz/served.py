"""What is fuzzed, and what it has to answer: a whole model with every id policy, raw ids and scores, and one of
sequences.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor

from export import ExportConfig, IdPolicy, WeightDtype, export_model
from serving.bundle.tables import DefaultRow
from serving.model.settings import ServingSettings
from tests.fuzz.answers import Answer, Doubles, Feature
from tests.fuzz.contract import Model, Scores
from tests.support.managed import behind, mch, trained
from tests.support.models import MIXED, Spec, collection, float_tables
from tests.support.sequences import POOLED, ROWS, Mixed

RAW = Spec("raw", 40, 8, "SUM", ("raw_ids",))
MOST_IDS, MOST_SAMPLES, MOST_SEQUENCE_BYTES = 50_000, 5_000, 500_000
PLAIN: dict[str, str | int] = {"user": "error", "item": "zero", "genre": "modulo", "word": 3}
DENSE = {"price": 3, "age": 2}


class Whole(nn.Module):
    """Collections of row numbers and of raw ids, two dense inputs, two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = collection(MIXED)
        self.raw = trained(behind({"raw": mch(RAW.rows)}, [RAW]), keys=RAW.features)
        torch.manual_seed(0)
        self.of_price, self.of_age = nn.Linear(DENSE["price"], 4), nn.Linear(DENSE["age"], 4)
        width = sum(spec.dim * len(spec.features) for spec in (*MIXED, RAW))
        self.top = nn.Linear(width + 8, 3)

    def forward(self, ids: KeyedJaggedTensor, price: Tensor, age: Tensor) -> dict[str, Tensor]:
        pooled = [self.plain(ids).values(), self.raw(ids)[0].values()]
        every = self.top(torch.cat([*pooled, self.of_price(price), self.of_age(age).relu()], dim=1))
        return {"like": every[:, 0].sigmoid(), "both": every[:, 1:]}

    def oracle(self, embeddings: Doubles, dense: Mapping[str, Doubles]) -> Answer:
        """The forward behind the collections, by numpy."""
        age = _linear(self.of_age, dense["age"])
        every = _linear(
            self.top,
            np.concatenate([embeddings, _linear(self.of_price, dense["price"]), np.maximum(age, 0)], axis=1),
        )
        with np.errstate(over="ignore"):
            return {"like": 1 / (1 + np.exp(-every[:, 0])), "both": every[:, 1:]}


def _linear(layer: nn.Linear, numbers: Doubles) -> Doubles:
    """Term by term: a product of matrices may do otherwise with what is not finite."""
    weight = layer.weight.detach().numpy().astype(np.float64)
    with np.errstate(invalid="ignore"):
        found: Doubles = (numbers[:, np.newaxis, :] * weight).sum(axis=2) + layer.bias.detach().numpy()
    return found


def publish(repository: Path) -> list[Model]:
    """Export both into `repository`, their rows as they are (FP32)."""
    return [_whole(repository), _of_sequences(repository)]


def _config() -> ExportConfig:
    policies: dict[str | int, IdPolicy | DefaultRow] = {
        "zero": IdPolicy.ZERO,
        "modulo": IdPolicy.MODULO,
        3: DefaultRow(default_row=3),
    }
    return ExportConfig(
        dtype={"*": WeightDtype.FP32},
        id_policy={table: policies[what] for table, what in PLAIN.items() if what in policies},
        serving=ServingSettings(
            max_request_ids=MOST_IDS,
            max_request_samples=MOST_SAMPLES,
            max_sequence_bytes=MOST_SEQUENCE_BYTES,
            max_busy_ms=60_000,
        ),
    )


def _whole(repository: Path) -> Model:
    module = Whole().eval()
    bundle = export_model(module, repository, "m", replace(_config(), scores=True))
    state = module.raw._managed_collision_collection._managed_collision_modules["raw"].state_dict()
    raw_ids, rows = (state[key].tolist() for key in ("_mch_sorted_raw_ids", "_mch_remapped_ids_mapping"))
    # The first of equal ids counts.
    known = dict(zip(raw_ids[::-1], rows[::-1], strict=True))
    features = _features((*MIXED, RAW), module, {**PLAIN, "raw": known})
    scores = Scores(DENSE, ("like", "both"), module.oracle)
    return Model("m", bundle.name, features, MOST_IDS, MOST_SAMPLES, MOST_SEQUENCE_BYTES, scores)


def _of_sequences(repository: Path) -> Model:
    module = Mixed()
    bundle = export_model(module, repository, "rows", _config())
    features = _features((*POOLED, *ROWS), module, PLAIN)
    return Model("rows", bundle.name, features, MOST_IDS, MOST_SAMPLES, MOST_SEQUENCE_BYTES)


def _features(
    specs: Sequence[Spec], module: nn.Module, outside: Mapping[str, str | int | Mapping[int, int]]
) -> dict[str, Feature]:
    tables = float_tables(module)
    return {
        feature: Feature(
            spec.name, tables[spec.name], spec.pooling == "MEAN", outside[spec.name], spec.pooling == "NONE"
        )
        for spec in specs
        for feature in spec.features
    }
