"""What is fuzzed: a model with every id policy and both poolings, and what it has to answer."""

from pathlib import Path

from export import ExportConfig, IdPolicy, WeightDtype, export_model
from serving.bundle.tables import DefaultRow
from serving.model.settings import ServingSettings
from tests.fuzz.contract import Feature, Model
from tests.support.models import MIXED, collection, float_tables

MOST_IDS, MOST_SAMPLES = 50_000, 5_000


def publish(repository: Path) -> Model:
    """Export it into `repository`, its rows as they are (FP32)."""
    module = collection(MIXED)
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
    outside: dict[str, str | int] = {"user": "error", "item": "zero", "genre": "modulo", "word": 3}
    features = {
        feature: Feature(tables[spec.name], spec.pooling == "MEAN", outside[spec.name])
        for spec in MIXED
        for feature in spec.features
    }
    return Model("m", bundle.name, features, MOST_IDS, MOST_SAMPLES)
