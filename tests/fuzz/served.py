"""What is fuzzed: a model with every id policy, raw ids and both poolings, and what it has to answer."""

from pathlib import Path

import torch

from export import ExportConfig, IdPolicy, WeightDtype, export_model
from serving.bundle.tables import DefaultRow
from serving.model.settings import ServingSettings
from tests.fuzz.contract import Feature, Model
from tests.support.managed import behind, mch, trained
from tests.support.models import MIXED, Spec, collection, float_tables

RAW = Spec("raw", 40, 8, "SUM", ("raw_ids",))
MOST_IDS, MOST_SAMPLES = 50_000, 5_000


def publish(repository: Path) -> Model:
    """Export it into `repository`, its rows as they are (FP32)."""
    raw = behind({"raw": mch(RAW.rows)}, [RAW])
    module = torch.nn.ModuleDict({"plain": collection(MIXED), "raw": trained(raw, keys=RAW.features)})
    policies: dict[str, IdPolicy | DefaultRow] = {
        "item": IdPolicy.ZERO,
        "genre": IdPolicy.MODULO,
        "word": DefaultRow(default_row=3),
    }
    config = ExportConfig(
        dtype={"*": WeightDtype.FP32},
        id_policy=policies,
        serving=ServingSettings(max_request_ids=MOST_IDS, max_request_samples=MOST_SAMPLES, max_busy_ms=60_000),
    )
    bundle = export_model(module, repository, "m", config)
    tables = float_tables(module)
    state = raw._managed_collision_collection._managed_collision_modules["raw"].state_dict()
    raw_ids, rows = (state[key].tolist() for key in ("_mch_sorted_raw_ids", "_mch_remapped_ids_mapping"))
    # The first of equal ids counts.
    known = dict(zip(raw_ids[::-1], rows[::-1], strict=True))
    outside: dict[str, str | int | dict[int, int]] = {"user": "error", "item": "zero", "genre": "modulo", "word": 3}
    outside["raw"] = known
    features = {
        feature: Feature(tables[spec.name], spec.pooling == "MEAN", outside[spec.name])
        for spec in (*MIXED, RAW)
        for feature in spec.features
    }
    return Model("m", bundle.name, features, MOST_IDS, MOST_SAMPLES)
