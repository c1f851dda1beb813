"""Rows are stored as FBGEMM's own op stores them, or refused by name."""

from pathlib import Path

import pytest
import torch

from export import ExportConfig, WeightDtype, export_model
from export.errors import QuantizeError
from export.rows.quantize import quantize
from export.trained import checkpoint
from tests.support.folder_contents import files
from tests.support.models import Spec, collection


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_bytes_are_those_of_fbgemm_s_own_op(bits: int, dtype: torch.dtype) -> None:
    rows = torch.randn(1000, 16).to(dtype)
    fused = torch.ops.fbgemm.FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf(rows, bits)
    stored = quantize("t", 0, rows, WeightDtype[f"INT{bits}"])
    assert torch.equal(stored[:, 4:], fused[:, :-4])
    assert torch.equal(stored[:, :4], fused[:, -4:])


def test_unpackable_dim_is_refused_before_writing(tmp_path: Path) -> None:
    module = collection((Spec("odd", 10, 6, "SUM", ("x",)),))
    with pytest.raises(QuantizeError, match="table 'odd': expected a dim that is a multiple of 4 for INT4, got 6"):
        export_model(module, tmp_path / "r", "m", ExportConfig(dtype={"*": WeightDtype.INT4}))
    assert files(tmp_path) == {}


@pytest.mark.parametrize(
    ("value", "dtype", "message"),
    [
        pytest.param(float("nan"), WeightDtype.INT8, "table 'user': row 321 holds NaN or infinity", id="NaN"),
        pytest.param(float("-inf"), WeightDtype.FP32, "table 'user': row 321 holds NaN or infinity", id="infinity"),
        pytest.param(-70_000.0, WeightDtype.INT8, "table 'user': row 321 has a scale or bias beyond FP16", id="bias"),
        pytest.param(7e7, WeightDtype.INT4, "table 'user': row 321 has a scale or bias beyond FP16", id="scale"),
        pytest.param(70_000.0, WeightDtype.FP16, "table 'user': row 321 is beyond FP16", id="FP16"),
    ],
)
def test_a_row_that_does_not_fit_its_dtype_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float, dtype: WeightDtype, message: str
) -> None:
    monkeypatch.setattr(checkpoint, "_BLOCK_BYTES", 6400)  # the row is not in the first block
    module = collection()
    with torch.no_grad():
        module.embedding_bags["user"].weight[321, 2] = value
    with pytest.raises(QuantizeError, match=message):
        export_model(module, tmp_path / "r", "m", ExportConfig(dtype={"user": dtype}))
    assert list((tmp_path / "r").iterdir()) == []
