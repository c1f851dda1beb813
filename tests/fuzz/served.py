"""What is fuzzed, and what it has to answer: a whole model with every id policy, raw ids and scores, one whose samples
would meet if requests were scored together, and one of sequences.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch import nn

from export import ExportConfig, IdPolicy, WeightDtype, export_model
from serving.bundle.tables import DefaultRow
from serving.model.settings import ServingSettings
from tests.fuzz.answers import Feature
from tests.fuzz.contract import Model, Scores
from tests.support.models import MIXED, Spec, float_tables
from tests.support.sequences import POOLED, ROWS, Mixed
from tests.support.whole import DENSE, RAW, Meeting, Whole

MOST_IDS, MOST_SAMPLES, MOST_SEQUENCE_BYTES = 50_000, 5_000, 500_000
PLAIN: dict[str, str | int] = {"user": "error", "item": "zero", "genre": "modulo", "word": 3}


def publish(repository: Path) -> list[Model]:
    """Export all into `repository`, their rows as they are (FP32)."""
    return [_whole(repository, "m", Whole()), _whole(repository, "meets", Meeting()), _of_sequences(repository)]


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


def _whole(repository: Path, name: str, module: Whole) -> Model:
    module = module.eval()
    bundle = export_model(module, repository, name, replace(_config(), scores=True))
    state = module.raw._managed_collision_collection._managed_collision_modules["raw"].state_dict()
    raw_ids, rows = (state[key].tolist() for key in ("_mch_sorted_raw_ids", "_mch_remapped_ids_mapping"))
    # The first of equal ids counts.
    known = dict(zip(raw_ids[::-1], rows[::-1], strict=True))
    features = _features((*MIXED, RAW), module, {**PLAIN, "raw": known})
    scores = Scores(DENSE, ("like", "both"), module.behind)
    return Model(name, bundle.name, features, MOST_IDS, MOST_SAMPLES, MOST_SEQUENCE_BYTES, scores)


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
