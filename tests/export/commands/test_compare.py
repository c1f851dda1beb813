"""`tbe-export compare` as one types it."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

from export.__main__ import app
from export.compare.halves import split_rows
from export.compare.study import StudyOptions
from serving.bundle.load import open_bundle
from serving.engine import Engine
from serving.errors import ConfigurationError
from serving.model.config_file import read_config, settings_of
from tests.support.commands import TRAINED, tbe_export
from tests.support.planted_tables import write_labelled

PLANTED = ("--model", "tests.support.planted_tables:build")
TABLES = "[tables.a]\nrows = 1000\ndim = 16\n"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--tables", "T", "--strategy", "diagonal"], "--strategy: expected one of data_parallel"),
        (["--tables", "T", "--ranks", "1"], "--ranks: expected 2 or more"),
        (["--tables", "T", "--dtype", "int3"], "--dtype: expected one of"),
        (["--tables", "T", "--pooling-factor", "q=1"], "--pooling-factor 'q': expected the name of a table"),
        (["--tables", "T", "--checkpoint", "w.pt"], "--checkpoint: expected --model with it"),
        ([], "expected either --model or --tables"),
        (["--tables", "T", "--ranks", "3", "--ranks-per-host", "2"], "--ranks-per-host: expected a divisor"),
        (["--tables", "T", "--labelled", "T"], "--labelled: expected --model with it"),
        ([*PLANTED, "--labelled", "d.parquet"], "--labelled: expected --label with it"),
        ([*PLANTED, "--labelled", "d.jsonl", "--label", "c"], "--label: expected a parquet file"),
        ([*PLANTED, "--labelled", "d.parquet", "--label", "c"], "--labelled: d.parquet: expected a file or folder"),
        ([*PLANTED, "--labelled", "T", "--max-auc-loss", "0"], "--max-auc-loss: expected > 0"),
        ([*PLANTED, "--labelled", "T", "--config", "T"], "t.toml: unknown key"),
        ([*PLANTED, "--label", "c"], "--label: expected --labelled with it"),
        ([*PLANTED, "--columns", "T"], "--columns: expected --labelled with it"),
        ([*PLANTED, "--nulls", "empty"], "--nulls: expected --labelled with it"),
        ([*PLANTED, "--labelled", "d.jsonl", "--columns", "N"], "--columns: expected a parquet file"),
        ([*PLANTED, "--output", "a"], "--output: expected --labelled with it"),
        ([*PLANTED, "--max-auc-loss", "0.1"], "--max-auc-loss: expected --labelled with it"),
    ],
)
def test_invalid_compare_options_are_refused(tmp_path: Path, arguments: list[str], why: str) -> None:
    files = {"T": tmp_path / "t.toml", "N": tmp_path / "n.toml"}
    files["T"].write_text(TABLES)
    files["N"].write_text('item = "id"\n')
    options = [str(files.get(argument, argument)) for argument in arguments]
    done = CliRunner().invoke(app, ["compare", "--out", str(tmp_path / "out"), *options])
    assert done.exit_code == 1
    assert why in done.output
    assert not (tmp_path / "out").exists()


@pytest.mark.long
def test_placements_that_do_not_fit_are_reported_and_the_others_measured(tmp_path: Path) -> None:
    (tmp_path / "t.toml").write_text(TABLES)
    arguments = ["--tables", str(tmp_path / "t.toml"), "--memory-per-rank", "15kB", "--dtype", "int8", "--ranks", "2"]
    chosen = ["--strategy", "data_parallel", "--strategy", "row_wise", "--seconds", "0.01"]
    done = CliRunner().invoke(app, ["compare", "--out", str(tmp_path / "out"), *arguments, *chosen])
    assert done.exit_code == 0, done.output
    assert "data_parallel on 2 ranks, int8: table 'a'" in done.output
    study = json.loads((tmp_path / "out" / "study.json").read_text())
    assert [placement["error"] is None for placement in study["placements"]] == [False, True]
    assert "not possible: " in (tmp_path / "out" / "report.html").read_text()


def test_a_trained_model_is_compared_with_its_own_weights(tmp_path: Path) -> None:
    torch.manual_seed(0)
    arguments = [*TRAINED, "--strategy", "row_wise", "--ranks", "2", "--dtype", "int8"]
    done = CliRunner().invoke(app, ["compare", "--out", str(tmp_path), *arguments, "--seconds", "0.01"])
    assert done.exit_code == 0, done.output
    study = json.loads((tmp_path / "study.json").read_text())
    assert not study["generated"]
    assert study["tables"].keys() == {"user", "item", "genre", "word"}
    assert study["tables"]["user"]["dtypes"][2]["largest_error"] > 1e-3  # normal numbers of 1


def test_shardings_are_measured_beside_labelled_rows_only_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: list[StudyOptions | None] = []

    def end(_: object, options_of_study: StudyOptions | None, *_more: object) -> None:
        options.append(options_of_study)
        raise ConfigurationError("the end")

    monkeypatch.setattr("export.compare.make_study.make_study", end)
    day = write_labelled(tmp_path / "day.parquet", 100)
    arguments = ("--labelled", str(day), "--label", "click", "--dtype", "int8", "--out", str(tmp_path / "out"))
    for more in ((), ("--seconds", "0.01")):
        assert "the end" in tbe_export("compare", *PLANTED, *arguments, *more).output
    assert options[0] is None
    assert options[1] is not None
    assert options[1].ranks == (2, 4)


def test_the_recommended_settings_export_a_bundle_with_the_measured_auc(tmp_path: Path) -> None:
    from torchmetrics.functional.classification import binary_auroc

    day = write_labelled(tmp_path / "day.parquet", 6000)
    settings = tmp_path / "export.toml"
    settings.write_text('dtype = "fp16"\nid_policy = "zero"\n\n[serving]\ninstances = 2\n')
    done = tbe_export(
        "compare", *PLANTED, "--labelled", str(day), "--label", "click", "--max-auc-loss", "0.002",
        "--config", str(settings), "--out", str(tmp_path / "out"), "--dtype", "int8", "--dtype", "int4",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "* Recommended dtypes: int8 for matters, int4 for idle: 4.0 kB" in done.output
    assert ", on 3,000 held-out rows. The other 3,000 rows chose it." in done.output
    study = json.loads((tmp_path / "out" / "study.json").read_text())
    assert (study["placements"], study["one_rank"]) == ([], {})  # no option asked for shardings
    assert "<h2>Latency</h2>" not in (tmp_path / "out" / "report.html").read_text()
    assert {name: advice["dtype"] for name, advice in study["recommendations"].items()} == {
        "matters": "int8",
        "idle": "int4",
    }
    assert "with this table alone in int4, AUC loses 0.0" in study["recommendations"]["matters"]["dtype_reason"]
    recommended = str(tmp_path / "out" / "recommended.toml")
    repository = ("--repository", str(tmp_path / "r"), "--name", "m")
    done = tbe_export("model", *PLANTED, "--config", recommended, *repository)
    assert done.exit_code == 0, done.output
    bundle = tmp_path / "r" / "m" / "1"
    manifest = open_bundle(bundle).manifest
    assert {table.name: table.dtype.value for table in manifest.tables} == {"matters": "INT8", "idle": "INT4"}
    assert {table.id_policy.value for table in manifest.tables} == {"zero"}
    assert settings_of(read_config(tmp_path / "r" / "m")).instances == 2
    table = pq.read_table(day)
    table = table.take(split_rows(table["click"].to_numpy() == 1)[1])
    scores = Engine.open(bundle).score({name: table[name] for name in ("matters_id", "idle_id")})["scores"]
    labels = torch.from_numpy(table["click"].to_numpy()).long()
    auc = float(binary_auroc(torch.from_numpy(scores).double().sigmoid(), labels))
    held_out = study["dtype_study"]["recommended"]["held_out"]["auc"]
    assert auc == pytest.approx(held_out["auc"], abs=1e-6)
    trained_auc = study["dtype_study"]["held_out"]["trained_auc"]
    assert held_out["low"] <= trained_auc - auc <= held_out["high"] <= 0.002
    assert f"# AUC {auc:.5f}, a loss of " in Path(recommended).read_text()
    assert sum(path.stat().st_size for path in bundle.glob("weights*.bin")) >= 4000
