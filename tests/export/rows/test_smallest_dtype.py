"""The smallest dtype within a limit."""

from pathlib import Path

import numpy as np
import pytest
import torch

from export import ExportConfig, WeightDtype, export_model
from export.pipeline import plan_model
from tests.support import oracle
from tests.support.models import MIXED, collection, float_tables

pytestmark = pytest.mark.usefixtures("quick_reload")


@pytest.mark.parametrize("scale", [1.0, 1e-3, 300.0])
def test_the_smallest_dtype_within_the_limit_is_the_smallest_that_numpy_finds(tmp_path: Path, scale: float) -> None:
    """Limits just above and just below each dtype's own error, found by storing the tables in every dtype."""
    module = collection(MIXED)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(scale)
    tables = float_tables(module)
    errors: dict[str, dict[WeightDtype, float]] = {name: {} for name in tables}
    for dtype in WeightDtype:
        bundle = export_model(module, tmp_path / "r", dtype.value, ExportConfig(dtype={"*": dtype}))
        for name, table in tables.items():
            errors[name][dtype] = float(np.abs(table - oracle.exported_table(bundle, name)).max())
    ordered = sorted(WeightDtype, key=lambda dtype: dtype.format.bits)
    for tried in ordered[:-1]:
        for factor in (0.999, 1.001):
            limits = {name: errors[name][tried] * factor for name in tables}
            planned = plan_model(module, ExportConfig(max_error=limits))
            for stored in planned.tables:
                within = [d for d in ordered if errors[stored.name][d] <= limits[stored.name]]
                assert stored.dtype is within[0], (stored.name, tried, factor)
