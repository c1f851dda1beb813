"""`MIXED` exported in every dtype, on one rank or many."""

from pathlib import Path

from export import ExportConfig, IdPolicy, Sharding, WeightDtype, export_model
from serving.engine import Engine
from tests.support.models import MIXED, collection

DTYPES = {
    "user": WeightDtype.INT8,
    "item": WeightDtype.INT4,
    "genre": WeightDtype.FP16,
    "word": WeightDtype.INT2,
}


def sharded(tmp_path: Path, sharding: Sharding | None = None) -> Engine:
    config = ExportConfig(dtype=DTYPES, id_policy={"word": IdPolicy.ZERO}, sharding=sharding or Sharding())
    return Engine.open(export_model(collection(MIXED), tmp_path / "r", "m", config))
