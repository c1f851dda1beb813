"""The smallest dtype within a limit."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from export import ExportConfig, WeightDtype, export_model
from export.errors import QuantizeError
from export.pipeline import plan_model
from export.rows.quantize import quantize, smallest_dtype
from export.trained import checkpoint
from export.trained.generated_checkpoint import generated_checkpoint
from export.trained.stored_tensors import InMemory
from export.trained.tables import TrainedTable
from serving.bundle.tables import Pooling
from tests.support import bundle_reader
from tests.support.models import MIXED, collection, float_tables


@pytest.mark.parametrize("scale", [1.0, 1e-3, 300.0])
def test_smallest_dtype_is_that_of_numpy(tmp_path: Path, scale: float) -> None:
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
            errors[name][dtype] = float(np.abs(table - bundle_reader.exported_table(bundle, name)).max())
    ordered = sorted(WeightDtype, key=lambda dtype: dtype.format.bits)
    for tried in ordered[:-1]:
        for factor in (0.999, 1.001):
            limits = {name: errors[name][tried] * factor for name in tables}
            planned = plan_model(module, ExportConfig(max_error=limits))
            for stored in planned.tables:
                within = [d for d in ordered if errors[stored.name][d] <= limits[stored.name]]
                assert stored.dtype is within[0], (stored.name, tried, factor)


@pytest.mark.parametrize(
    "dtype", [dtype for dtype in WeightDtype if dtype is not WeightDtype.FP32], ids=lambda d: d.value
)
def test_an_error_equal_to_the_limit_is_allowed(dtype: WeightDtype) -> None:
    """The limit is the largest error allowed. A step of the smallest kind below it, the dtype is out."""
    table = TrainedTable("t", "t", 400, 16, Pooling.SUM, False, ("x",), ("x",))
    weights = generated_checkpoint((table,))
    rows = weights.rows(table, 0, 400)
    narrower = [value for value in WeightDtype if value.format.bits < dtype.format.bits]

    def error(stored: WeightDtype) -> float:
        return float(np.abs(rows.numpy() - stored.format.dequantize(quantize("t", 0, rows, stored).numpy())).max())

    limit = error(dtype)
    assert all(error(value) > limit for value in narrower)
    assert smallest_dtype(table, weights, limit, lambda _: None) is dtype
    assert smallest_dtype(table, weights, math.nextafter(limit, 0), lambda _: None) is not dtype


def test_progress_is_every_element_that_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_BLOCK_BYTES", 4096)
    table = TrainedTable("t", "t", 400, 16, Pooling.SUM, False, ("x",), ("x",))
    elements: list[int] = []
    assert smallest_dtype(table, generated_checkpoint((table,)), 1e9, elements.append) is WeightDtype.INT2
    assert len(elements) > 1
    assert sum(elements) == 400 * 16
    elements.clear()
    assert smallest_dtype(table, generated_checkpoint((table,)), 0, elements.append) is WeightDtype.FP32
    assert len(elements) == 1, "no dtype was left, and it read on"


def _table_of(rows: torch.Tensor) -> tuple[TrainedTable, checkpoint.Checkpoint]:
    table = TrainedTable("t", "t", len(rows), rows.shape[1], Pooling.SUM, False, ("x",), ("x",))
    return table, checkpoint.Checkpoint("test", {"t": InMemory(rows)})


def test_numbers_beyond_a_dtype_leave_it_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_BLOCK_BYTES", 640)
    rows = torch.ones(100, 16)
    rows[70, 3] = 1e6  # beyond FP16; and so is the scale of 4 or 2 bits
    assert smallest_dtype(*_table_of(rows), 1e9, lambda _: None) is WeightDtype.INT8
    rows[80] = 1e6  # so is the bias
    assert smallest_dtype(*_table_of(rows), 1e9, lambda _: None) is WeightDtype.FP32


def test_a_row_with_nan_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_BLOCK_BYTES", 640)
    rows = torch.ones(100, 16)
    rows[70, 3] = float("nan")
    with pytest.raises(QuantizeError, match="table 't': row 70 holds NaN"):
        smallest_dtype(*_table_of(rows), 1e9, lambda _: None)
