"""What is wrong on the way from float rows to a served model fails the export."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from export import ExportConfig, WeightDtype, export_model, pipeline
from export.errors import ParityError
from export.program import compile as compile_
from export.program.compile import compile_program, save_program
from export.rows import rank_files
from export.rows.quantize import quantize
from serving.bundle.load import open_bundle
from tests.support.models import collection


def test_a_table_that_moves_past_its_limit_fails_the_export(tmp_path: Path) -> None:
    limits = ExportConfig(dtype={"*": WeightDtype.INT4}, max_error={"user": 1e-3})
    with pytest.raises(ParityError, match=r"table 'user': INT4 moves an element by .*, expected at most 0\.001"):
        export_model(collection(), tmp_path / "r", "m", limits)
    assert list((tmp_path / "r").iterdir()) == []


def corrupt_codes(table: str, start: int, rows: torch.Tensor, dtype: WeightDtype) -> torch.Tensor:
    stored = quantize(table, start, rows, dtype)
    if table == "genre":
        stored[7, 5] ^= 0x80
    return stored


def test_an_error_limit_refuses_a_given_dtype_and_chooses_one_otherwise(tmp_path: Path) -> None:
    config = ExportConfig(max_error={"user": 3e-3}, dtype={"item": WeightDtype.INT4})
    tables = open_bundle(export_model(collection(), tmp_path / "r", "m", config)).manifest.tables
    assert [table.dtype.value for table in tables] == ["FP16", "INT4", "INT8", "INT8"]
    with pytest.raises(ParityError, match="table 'user': INT8 moves an element by"):
        export_model(
            collection(), tmp_path / "r", "m", ExportConfig(max_error={"*": 1e-3}, dtype={"*": WeightDtype.INT8})
        )


def test_a_quantizer_wrong_in_one_code_fails_the_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_files, "quantize", corrupt_codes)
    with pytest.raises(ParityError, match="table 'genre': row 7 moved further than rounding explains"):
        export_model(collection(), tmp_path / "r", "m")


def test_a_program_wrong_for_one_table_fails_the_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_wrongly(manifest: Any) -> Any:
        program: Any = compile_program(manifest)
        program.tbe.weights_offsets[3] += 1  # the first byte of `genre`
        return program

    monkeypatch.setattr(pipeline, "compile_program", compile_wrongly)
    with pytest.raises(ParityError, match="table 'genre': the compiled program answers differently, by"):
        export_model(collection(), tmp_path / "r", "m")


@pytest.mark.usefixtures("fresh_process")
def test_a_bundle_that_a_fresh_process_cannot_open_fails_the_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save_half_of_it(program: Any, path: Path) -> None:
        save_program(program, path)
        os.truncate(path, path.stat().st_size // 2)

    monkeypatch.setattr(compile_, "save_program", save_half_of_it)
    with pytest.raises(ParityError, match=r"a fresh process could not answer from it:\n(.|\n)*program\.pt"):
        export_model(collection(), tmp_path / "r", "m")
    assert list((tmp_path / "r").iterdir()) == []
