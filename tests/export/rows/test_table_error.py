"""The error of a table is gathered from its blocks, whichever of them is wrong."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from export import ExportConfig, WeightDtype, export_model
from export.errors import ParityError
from export.rows import rank_files
from export.rows.quantize import quantize
from export.rows.table_error import TableError, rounding_bounds
from export.trained import checkpoint
from serving.bundle.formats import CodeRows
from tests.support.folder_contents import files
from tests.support.models import Spec, collection

_ROWS = torch.randn(400, 16, generator=torch.Generator().manual_seed(0))


def _moved(stored: torch.Tensor, dtype: WeightDtype, row: int) -> None:
    """Move an element of a row by more than rounding can: another exponent, or another code."""
    stored[row, dtype.format.header_bytes + max(dtype.format.bits // 8 - 1, 0)] ^= 0x3F


def _written(number: float) -> Callable[[torch.Tensor, WeightDtype, int], None]:
    """Write a number into a row: as its first element, or as its scale."""

    def write(stored: torch.Tensor, dtype: WeightDtype, row: int) -> None:
        name = "float16" if isinstance(dtype.format, CodeRows) else dtype.format.torch_name
        stored.numpy().view(name)[row, 0] = number

    return write


_SPOILED = {"moved": _moved, "nan": _written(float("nan")), "infinite": _written(float("inf"))}


@pytest.mark.parametrize("dtype", WeightDtype, ids=lambda dtype: dtype.value)
@pytest.mark.parametrize("spoil", _SPOILED.values(), ids=_SPOILED)
@pytest.mark.parametrize("wrong", [(), (0,), (5,), (100,), (150,), (399,), (5, 150), (150, 399)], ids=str)
def test_a_wrong_row_of_any_block_is_named(
    dtype: WeightDtype, spoil: Callable[[torch.Tensor, WeightDtype, int], None], wrong: tuple[int, ...]
) -> None:
    stored = quantize("t", 0, _ROWS, dtype).clone()  # FP32 rows are stored as they are, in the same memory
    for row in wrong:
        spoil(stored, dtype, row)
    joined, added = TableError(dtype), TableError(dtype)
    for start in range(0, 400, 100):
        rows, bytes_ = _ROWS[start : start + 100].numpy(), stored[start : start + 100].numpy()
        block = TableError(dtype)
        block.add(start, rows, bytes_, np.empty_like(rows))
        joined.join(block)
        added.add(start, rows, bytes_, np.empty_like(rows))
    assert joined.unexplained_row == added.unexplained_row == min(wrong, default=None)
    assert joined.tally.worst_row in wrong or not wrong
    assert math.isfinite(joined.tally.largest) == (spoil is _moved or not wrong)


def test_bounds_are_the_largest_of_all_blocks() -> None:
    error = TableError(WeightDtype.INT8)
    for bound, largest in ((1.0, 2.0), (4.0, 3.0), (2.0, 8.0), (0.5, 0.5)):
        error.join(TableError(WeightDtype.INT8, bound=bound, largest=largest))
    assert (error.bound, error.largest) == (4.0, 8.0)


@pytest.mark.parametrize(("how", "wrong"), [("moved", 0), ("moved", 100), ("moved", 499), ("nan", 100)])
def test_an_export_that_stores_one_row_wrongly_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, wrong: int
) -> None:
    """Whichever of eight blocks it is in, and however large an error is allowed."""
    monkeypatch.setattr(checkpoint, "_BLOCK_BYTES", 4096)

    def wrongly(table: str, start: int, rows: torch.Tensor, dtype: WeightDtype) -> torch.Tensor:
        stored = quantize(table, start, rows, dtype)
        if start <= wrong < start + len(stored):
            _SPOILED[how](stored, dtype, wrong - start)
        return stored

    monkeypatch.setattr(rank_files, "quantize", wrongly)
    module = collection((Spec("t", 500, 16, "SUM", ("x",)),))
    with pytest.raises(ParityError) as refused:
        export_model(module, tmp_path / "r", "m", ExportConfig(dtype={"*": WeightDtype.FP16}, max_error={"*": 1e9}))
    assert f"table 't': row {wrong} moved further than rounding explains" in str(refused.value).splitlines()
    assert files(tmp_path) == {}


@pytest.mark.parametrize("dtype", WeightDtype, ids=lambda dtype: dtype.value)
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_element_is_that_of_any_block_and_sign(dtype: WeightDtype, sign: int) -> None:
    rows = _ROWS.clone()
    rows[7, 3] = 50 * sign
    error = TableError(dtype)
    for start in range(0, 400, 100):
        block = rows[start : start + 100]
        error.add(start, block.numpy(), quantize("t", start, block, dtype).numpy(), np.empty(block.shape, np.float32))
    assert error.largest == 50


def test_bound_of_a_float_row() -> None:
    rows = np.array([[1.0, -0.5], [-1000.0, 3.0], [0.0, 0.0], [1e-7, 0.0]], np.float32)
    stored = quantize("t", 0, torch.from_numpy(rows), WeightDtype.FP16).numpy()
    bounds = rounding_bounds(rows, stored, WeightDtype.FP16)
    np.testing.assert_allclose(
        bounds, [2**-11 + 2**-25, 1000 * 2**-11 + 2**-25, 2**-25, 1e-7 * 2**-11 + 2**-25], rtol=1e-6
    )
    assert (rounding_bounds(rows, rows.view(np.uint8), WeightDtype.FP32) == 0).all()
