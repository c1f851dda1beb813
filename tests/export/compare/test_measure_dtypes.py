"""The AUC that dtypes cost: what is measured is what bundles answer, and only what is certain is recommended."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from export import ExportConfig, WeightDtype, export_model
from export.compare.dtype_scores import DtypeScorer, store_dtype
from export.compare.dtype_study import DtypeOptions, DtypeStudy
from export.compare.halves import split_rows
from export.compare.labelled_rows import LabelledBatch, LabelledRows
from export.compare.measure_dtypes import measure_dtypes
from export.prepare import Prepared, prepare
from serving.engine import Engine
from serving.errors import ConfigurationError
from serving.requests.input_forms import Nulls
from tests.models.registry import example_of, module_of
from tests.support.planted_tables import ROWS, build, build_probabilities, write_labelled
from tests.support.scored_models import EXACT, WIDTHS, by_position, dlrm, trained, two_tower

LIMIT = 0.002


def prepared(module: nn.Module, **changes: Any) -> Prepared:
    return prepare(module, replace(EXACT, **changes), None, None, lambda _: None)


@cache
def planted(build_model: Callable[[], nn.Module]) -> Prepared:
    return prepared(build_model())


def measured(
    path: Path, *, of: Callable[[], nn.Module] = build, nulls: Nulls = "refuse", **options: Any
) -> DtypeStudy:
    defaults = {"output": None, "max_auc_loss": LIMIT, "dtypes": [WeightDtype.INT8, WeightDtype.INT4]}
    return measure_dtypes(
        planted(of), DtypeOptions(rows=LabelledRows(path, "click", nulls=nulls), **defaults | options)
    )


@pytest.fixture(scope="module")
def day(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_labelled(tmp_path_factory.mktemp("labelled") / "day.parquet", 6000)


@pytest.fixture(scope="module")
def study(day: Path) -> DtypeStudy:
    return measured(day, dtypes=[*WeightDtype])


def test_the_table_that_matters_keeps_a_wide_dtype(study: DtypeStudy) -> None:
    assert study.recommended.dtypes == {"matters": "int8", "idle": "int2"}
    assert study.recommended.measured.bytes == ROWS * (8 + 4) + ROWS * (2 + 4)
    assert study.recommended.measured.auc.high <= LIMIT
    assert study.recommended.held_out is not None
    assert study.recommended.held_out.auc.high <= LIMIT
    assert study.contradicted == []
    assert study.tables["matters"]["int4"].auc.low > 0.01
    for alone in study.tables["idle"].values():
        assert alone.auc.high < LIMIT
    assert study.bundles["int4"].auc.low > 0.01
    assert "the next smaller bundle may lose more" in study.reason
    assert study.held_out is not None
    assert (study.choosing.rows, study.held_out.rows) == (3000, 3000)
    assert abs(study.choosing.ones - study.held_out.ones) <= 1
    assert (study.runs_model, study.is_sigmoid) == (True, True)


def auc_of_engine(bundle: Path, day: Path, output: str) -> float:
    """On the rows that choose."""
    from torchmetrics.functional.classification import binary_auroc

    table = pq.read_table(day)
    table = table.take(split_rows(table["click"].to_numpy() == 1)[0])
    scores = Engine.open(bundle).score({name: table[name] for name in ("matters_id", "idle_id")})[output]
    labels = torch.from_numpy(table["click"].to_numpy()).long()
    return float(binary_auroc(torch.from_numpy(scores).double().reshape(-1).sigmoid(), labels))


@pytest.mark.long  # `tests/export/commands/test_compare.py` shows it of the recommended bundle
def test_figures_are_those_of_exported_bundles(study: DtypeStudy, day: Path, tmp_path: Path) -> None:
    """Each bundle is exported and scored by an engine; its AUC is TorchMetrics'."""
    recommended = {table: WeightDtype[dtype.upper()] for table, dtype in study.recommended.dtypes.items()}
    alone = {"matters": WeightDtype.INT4, "idle": WeightDtype.FP32}
    for name, dtypes, result in (
        ("recommended", recommended, study.recommended.measured),
        ("alone", alone, study.tables["matters"]["int4"]),
    ):
        bundle = export_model(build(), tmp_path, name, ExportConfig(scores=True, dtype=dtypes))
        assert result.auc.auc == pytest.approx(auc_of_engine(bundle, day, "scores"), abs=1e-6)
        assert result.auc.loss == study.choosing.trained_auc - result.auc.auc


def test_few_rows_recommend_no_dtype_below_their_resolution(tmp_path: Path) -> None:
    few = measured(write_labelled(tmp_path / "few.parquet", 90), max_auc_loss=0.0005)
    assert set(few.recommended.dtypes.values()) == {"fp32"}
    assert few.reason.startswith("no smaller bundle is certain to")
    assert "more rows make this interval narrower" in few.reason
    fewer = measured(write_labelled(tmp_path / "fewer.parquet", 35), max_auc_loss=0.5)
    assert set(fewer.recommended.dtypes.values()) == {"fp32"}
    assert fewer.reason.startswith("the halves of these rows are too small")
    assert "20 rows of each label are needed" in fewer.reason
    assert (fewer.choosing.rows, fewer.held_out, fewer.recommended.held_out) == (35, None, None)


def scores_of_ids(dtype: WeightDtype, folder: Path) -> npt.NDArray[np.float64]:
    """The planted model's score of each id of `matters`, beside id 0 of `idle`, [ROWS]."""
    bundle = export_model(build(), folder, dtype.value, ExportConfig(scores=True, dtype={"*": dtype}))
    ids = {"matters_id": np.arange(ROWS), "idle_id": np.zeros(ROWS, np.int64)}
    return np.asarray(Engine.open(bundle).score(ids)["scores"], np.float64).reshape(-1)


def test_a_dtype_that_held_out_rows_contradict_is_not_recommended(tmp_path: Path) -> None:
    """In the rows that choose, labels follow the scores of INT4: its loss is negative there, and large elsewhere."""
    random = np.random.default_rng(0)
    labels = np.arange(6000) % 2 == 0
    choosing, held_out = split_rows(labels)
    assert held_out is not None
    ids = np.empty(labels.size, np.int64)
    for rows, dtype in ((choosing, WeightDtype.INT4), (held_out, WeightDtype.FP32)):
        scores = scores_of_ids(dtype, tmp_path / "r")
        for label, sign in ((True, 3), (False, -3)):
            probabilities = 1 / (1 + np.exp(-sign * (scores - scores.mean())))
            numbers = rows[labels[rows] == label]
            ids[numbers] = random.choice(ROWS, numbers.size, p=probabilities / probabilities.sum())
    table = pa.table({"matters_id": ids, "idle_id": np.zeros_like(ids), "click": labels})
    pq.write_table(table, tmp_path / "day.parquet")
    study = measured(tmp_path / "day.parquet")
    lucky = study.contradicted[0]
    assert lucky.dtypes["matters"] == "int4"
    assert lucky.measured.auc.high < 0
    assert lucky.held_out is not None
    assert lucky.held_out.auc.low > LIMIT
    assert study.recommended.dtypes["matters"] != "int4"
    assert study.recommended.held_out is not None
    assert study.recommended.held_out.auc.low <= LIMIT
    assert "so does a smaller bundle, which the held-out rows contradict" in study.reason


def test_one_of_several_outputs_must_be_named(day: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"output: expected one of the outputs .* 'click' \[\], 'distance' \[\]"
    ):
        measured(day, of=build_probabilities)
    with pytest.raises(ConfigurationError, match="got 'buy'"):
        measured(day, of=build_probabilities, output="buy")
    study = measured(day, of=build_probabilities, output="click", dtypes=[WeightDtype.INT8])
    assert not study.is_sigmoid
    assert study.bundles.keys() == {"int8", "fp32"}
    assert 0.1 < study.choosing.trained_log_loss < 0.7


def test_rows_of_one_label_are_refused(tmp_path: Path) -> None:
    path = write_labelled(tmp_path / "day.parquet", 30)
    table = pq.read_table(path)
    pq.write_table(table.filter(np.equal(table["click"], 1)), path)
    with pytest.raises(ConfigurationError, match=r"expected rows labelled 0 and rows labelled 1, all .* are 1"):
        measured(path)


def test_files_without_rows_are_refused(tmp_path: Path) -> None:
    path = write_labelled(tmp_path / "day.parquet", 30)
    pq.write_table(pq.read_table(path).slice(0, 0), path)
    with pytest.raises(ConfigurationError, match="labelled: expected rows, got none"):
        measured(path)


def test_an_id_outside_of_a_table_is_refused_by_its_file_and_row(tmp_path: Path) -> None:
    path = write_labelled(tmp_path / "day.parquet", 900)
    table = pq.read_table(path)
    ids = table["idle_id"].to_numpy().copy()
    ids[750] = ROWS
    pq.write_table(table.set_column(table.column_names.index("idle_id"), "idle_id", [ids]), path, row_group_size=700)
    with pytest.raises(
        ConfigurationError, match=r"day\.parquet: row group 1, row 50: feature 'idle_id': .*got 200 for sample 0"
    ):
        measured(path)


def test_nulls_are_refused_or_read_as_empty_bags(tmp_path: Path) -> None:
    """The same answers as from a file whose lists are empty."""
    path = write_labelled(tmp_path / "day.parquet", 900)
    table = pq.read_table(path)
    ids = table["idle_id"].to_pylist()
    studies = []
    absent: list[int] | None
    for absent in (None, []):
        bags = [absent if row % 3 == 0 else [id_] for row, id_ in enumerate(ids)]
        pq.write_table(table.set_column(table.column_names.index("idle_id"), "idle_id", pa.array(bags)), path)
        if absent is None:
            with pytest.raises(
                ConfigurationError, match=r"feature 'idle_id': expected no nulls, .* \(--nulls empty\)"
            ):
                measured(path, dtypes=[WeightDtype.INT8])
        studies.append(measured(path, nulls="empty", dtypes=[WeightDtype.INT8]))
    with_nulls, with_empty_lists = studies
    assert with_nulls.bundles["int8"].auc == with_empty_lists.bundles["int8"].auc


def mixed(tables: Mapping[str, Any]) -> dict[str, WeightDtype]:
    """Another dtype for each table in turn."""
    dtypes = [WeightDtype.INT8, WeightDtype.FP16, WeightDtype.INT4, WeightDtype.FP32]
    return {name: dtypes[number % 4] for number, name in enumerate(tables)}


def own_request(ready: Prepared) -> tuple[dict[str, Any], dict[str, Any]]:
    """The probe of a model's dense part, as ids by feature and dense inputs by name."""
    assert ready.scored is not None
    inputs, part = ready.scored.inputs, ready.scored.part
    features = {}
    for key in ready.manifest.keys:
        bag = inputs.bags[key]
        weights = (bag.weights.numpy(),) if key in ready.manifest.weighted_keys and bag.weights is not None else ()
        features[key] = (bag.ids.long().numpy(), bag.lengths.int().numpy(), *weights)
    dense = dict(zip([tensor.name for tensor in part.by_sample], inputs.dense, strict=True))
    dense |= {name: inputs.bags[name].ids for name in inputs.numbers}
    return features, {name: tensor.numpy() for name, tensor in dense.items()}


def whole_of(name: str) -> tuple[nn.Module, dict[str, Any]]:
    return module_of(name), {"example": example_of(name, 6)}


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: whole_of("beside_pooled"), id="pooled features, a sequence and dense inputs"),
        *(
            pytest.param(make, id=what, marks=pytest.mark.long)
            for what, make in {
                "DLRM": lambda: (trained(dlrm()), {}),
                "keys that several tables read": lambda: (trained(two_tower()), {}),
                "position weights": lambda: (trained(by_position()), {"dense_widths": WIDTHS}),
                "raw ids": lambda: whole_of("raw_ids"),
                "numbers by id": lambda: whole_of("numbers_by_event"),
            }.items()
        ),
    ],
)
def test_scores_with_mixed_dtypes_are_those_of_an_exported_bundle(make: Any, tmp_path: Path) -> None:
    module, changes = make()
    ready = prepared(module, **changes)
    assert ready.scored is not None
    chosen = [WeightDtype.INT8, WeightDtype.FP16, WeightDtype.INT4, WeightDtype.FP32]
    dtypes = {table.name: chosen[number % 4] for number, table in enumerate(ready.manifest.tables)}
    stored = {dtype: store_dtype(tmp_path / dtype.value, ready, dtype) for dtype in {*dtypes.values()}}
    output = next(output for output in ready.scored.part.outputs if int(np.prod(output.shape)) == 1)
    features, dense = own_request(ready)
    batch = LabelledBatch("here", features, dense, np.zeros(ready.scored.inputs.samples, np.bool_))
    (scores,), by_model = DtypeScorer(ready, stored, output).score(batch, [dtypes])
    bundle = export_model(module, tmp_path / "r", "m", replace(EXACT, dtype=dtypes, **changes))
    served = Engine.open(bundle).score(features, dense)[output.name]
    np.testing.assert_allclose(scores, served.reshape(-1), rtol=1e-5, atol=1e-6)
    assert by_model is not None
    assert np.abs(scores - by_model).max() > 0
