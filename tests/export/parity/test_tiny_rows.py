"""Rows below what FP16 can say: their numbers, or the scale and bias of their codes, are rounded to few bits or to 0."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torchrec import EmbeddingBagCollection

from export import ExportConfig, OutputDtype, WeightDtype, export_model, export_next, publish_changes, publish_delta
from export.errors import ParityError
from export.rows.quantize import quantize
from export.rows.table_error import TableError, rounding_bounds
from serving.bundle.formats import CodeRows
from serving.bundle.load import open_bundle
from serving.engine import Engine
from tests.support.models import Spec, collection

SPEC = (Spec("t", 40, 16, "SUM", ("f",)),)
PATTERN = torch.tensor([1, -1, 0.5, -0.5, 0.25, -0.25, 0.75, 0] * 2)
HALVES = [dtype for dtype in WeightDtype if dtype is not WeightDtype.FP32]
# Rows of this size are lost in each dtype.
LOST = {WeightDtype.INT8: 3e-6, WeightDtype.INT4: 2e-7, WeightDtype.INT2: 3e-8, WeightDtype.FP16: 2e-8}
every_dtype = pytest.mark.parametrize("dtype", HALVES, ids=lambda dtype: dtype.value)


def bags(size: float, tiny: dict[int, float] | None = None) -> EmbeddingBagCollection:
    """A table of rows of one size, some of which are of others."""
    module = collection(SPEC)
    with torch.no_grad():
        weight = module.embedding_bags["t"].weight
        weight.copy_(size * PATTERN.expand(40, -1))
        for row, scale in (tiny or {}).items():
            weight[row] = scale * PATTERN
    return module


def config(dtype: WeightDtype, **limits: float) -> ExportConfig:
    return ExportConfig(dtype={"*": dtype}, max_error=limits)


@every_dtype
def test_a_table_that_is_lost_is_refused_by_its_row(tmp_path: Path, dtype: WeightDtype) -> None:
    with pytest.raises(
        ParityError, match=r"table 't': row 0 is too small for its scale and numbers in FP16, and moves"
    ):
        export_model(bags(LOST[dtype]), tmp_path / "r", "m", config(dtype))
    assert not (tmp_path / "r" / "m").exists()
    bundle = export_model(bags(LOST[dtype]), tmp_path / "r", "m", config(dtype, t=1e-3))  # who says so gets it
    assert "40 rows, the first is row 0, are too small for FP16" in open_bundle(bundle).manifest.notes[0]
    export_model(bags(LOST[dtype]), tmp_path / "r", "m", config(WeightDtype.FP32))


@every_dtype
@pytest.mark.parametrize("shift", [0.0, 1e-9], ids=["around zero", "constant"])
def test_tiny_rows_among_others_are_noted_by_their_number(tmp_path: Path, dtype: WeightDtype, shift: float) -> None:
    """Those of ids that a training has hardly seen are no reason to refuse the others."""
    module = bags(0.1, {7: LOST[dtype], 30: LOST[dtype]})
    if shift:
        with torch.no_grad():
            module.embedding_bags["t"].weight[[7, 30]] = shift
    bundle = open_bundle(export_model(module, tmp_path / "r", "m", config(dtype)))
    (note,) = bundle.manifest.notes
    assert note.startswith("table 't': 2 rows, the first is row 7, are too small for FP16")
    assert bundle.manifest.parity[0].limit < 0.1  # is not that of a row whose stored scale is 1


@every_dtype
def test_rows_that_keep_their_numbers_are_not_noted(tmp_path: Path, dtype: WeightDtype) -> None:
    zeros = bags(0.1, {3: 0.0})
    with torch.no_grad():
        zeros.embedding_bags["t"].weight[5] = 0.1  # constant: its step is 0
    for module in (zeros, bags(1e-3), bags(50.0)):
        assert open_bundle(export_model(module, tmp_path / "r", "m", config(dtype))).manifest.notes == ()


@every_dtype
def test_no_row_moves_by_much_of_itself_without_a_note(dtype: WeightDtype) -> None:
    """By an oracle of its own: what is stored, decoded, against the row; of all sizes, around zero and beside it."""
    random = np.random.default_rng(0)
    for _ in range(400):
        size = 10 ** random.uniform(-9, 1)
        row = (random.normal(size=16) * size + random.choice([0.0, size, 100 * size])).astype(np.float32)[np.newaxis]
        stored = quantize("t", 0, torch.from_numpy(row), dtype).numpy()
        error = TableError(dtype)
        error.add(0, row, stored, np.empty_like(row))
        moved, largest = np.abs(dtype.format.dequantize(stored) - row).max(), np.abs(row).max()
        expected = moved > largest / 32 and moved > 2 * _explained(row, dtype)
        assert (error.coarse.count == 1) == expected
        assert error.unexplained_row is None
        assert moved <= rounding_bounds(row, stored, dtype)[0] < 3 * np.ptp(row) + largest / 100 + 1e-5


def _explained(row: npt.NDArray[np.float32], dtype: WeightDtype) -> float:
    """How far half a step, and 11 bits of a scale and a bias, can move an element."""
    largest, unit = float(np.abs(row).max()), 2.0**-11
    if not isinstance(dtype.format, CodeRows):
        return largest * unit
    step = (float(row.max()) - float(row.min())) / dtype.format.largest_code
    return step * (0.5 + dtype.format.largest_code * unit) + abs(float(row.min())) * unit + 8 * 2.0**-24 * largest


@every_dtype
def test_deltas_are_checked_alike(tmp_path: Path, dtype: WeightDtype) -> None:
    tiny = (np.array([9, 4]), LOST[dtype] * PATTERN.expand(2, -1))
    export_model(bags(0.1), tmp_path / "r", "m", config(dtype))
    (note,) = publish_delta(tmp_path / "r", "m", {"t": tiny}).notes
    assert note.startswith("table 't': 2 rows, the first is row 4, are too small for FP16")
    published = publish_changes(tmp_path / "r", "m", bags(0.1, {6: LOST[dtype]}))
    assert published is not None
    assert "row 6 is too small for FP16" in published.notes[0]
    # Where the version is exact, a row that is lost is worse than any.
    export_model(bags(0.0), tmp_path / "s", "m", config(dtype))
    with pytest.raises(ParityError, match=r"table 't': row (4|9) is too small for its scale and numbers in FP16"):
        publish_delta(tmp_path / "s", "m", {"t": tiny})
    with pytest.raises(ParityError, match="table 't': row 6 is too small for its scale and numbers in FP16"):
        publish_changes(tmp_path / "s", "m", bags(0.0, {6: LOST[dtype]}))
    assert publish_delta(tmp_path / "s", "m", {"t": tiny}, max_error={"t": 1e-3}).notes


@every_dtype
def test_a_further_version_is_checked_alike(tmp_path: Path, dtype: WeightDtype) -> None:
    export_model(bags(0.1), tmp_path / "r", "m", config(dtype))
    with pytest.raises(ParityError, match="row 0 is too small"):
        export_next(bags(LOST[dtype]), tmp_path / "r", "m", config(dtype))
    further = export_next(bags(0.1, {5: LOST[dtype]}), tmp_path / "r", "m", config(dtype))
    assert "row 5 is too small for FP16" in open_bundle(further).manifest.notes[0]


def test_answers_that_fp16_cannot_say_are_noted(tmp_path: Path) -> None:
    answers = ExportConfig(dtype={"*": WeightDtype.FP32}, output_dtype=OutputDtype.FP16)
    bundle = export_model(bags(1e-7), tmp_path / "r", "m", answers)
    assert "FP16 answers are coarse, or 0: its largest element is 1e-07" in open_bundle(bundle).manifest.notes[0]
    assert open_bundle(export_model(bags(1e-3), tmp_path / "r", "m", answers)).manifest.notes == ()


def test_the_row_of_the_report(tmp_path: Path) -> None:
    """An INT8 row whose step is 2.4e-8, which FBGEMM stores with the scale 1, was served as a constant."""
    with Engine.open(export_model(bags(3e-6), tmp_path / "r", "m", config(WeightDtype.INT8, t=1e-3))) as engine:
        assert np.ptp(engine.rows("t", [0])) == 0
    with Engine.open(export_model(bags(3e-6), tmp_path / "r", "m", config(WeightDtype.FP32))) as engine:
        np.testing.assert_array_equal(engine.rows("t", [0])[0], 3e-6 * PATTERN)
