"""`tbe-export model`."""

import shutil
from pathlib import Path

import pytest
import torch

from export.commands.show import show_published
from serving.bundle.formats import WeightDtype
from serving.bundle.load import open_bundle
from tests.support.commands import TRAINED, tbe_export
from tests.support.models import collection, exported

DTYPES = ", ".join(dtype.value.lower() for dtype in WeightDtype)


def test_model_exports_by_name_and_pattern(tmp_path: Path) -> None:
    torch.save(collection().state_dict(), tmp_path / "w.pt")
    done = tbe_export(
        "model", *TRAINED, "--checkpoint", str(tmp_path / "w.pt"),
        "--repository", str(tmp_path / "r"), "--name", "m", "--version", "3",
        "--dtype", "int4", "--dtype", "us*=fp16", "--id-policy", "word=zero", "--output-dtype", "fp16",
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    manifest = open_bundle(tmp_path / "r" / "m" / "3").manifest
    assert [table.dtype.value for table in manifest.tables] == ["FP16", "INT4", "INT4", "INT4"]
    assert [table.id_policy.value for table in manifest.tables] == ["error", "error", "error", "zero"]
    assert manifest.output_dtype.value == "FP16"
    for table in manifest.tables:
        assert any(table.name in line and table.dtype.value in line for line in done.stdout.splitlines())
    assert f"published {tmp_path / 'r' / 'm' / '3'}" in done.stdout
    assert f"next: tbe-serve run {tmp_path / 'r'}\n" in done.stdout


def test_the_next_step_printed_is_a_server_a_load_or_a_release(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    bundle = exported(tmp_path)
    model, following = bundle.parent, bundle.parent / "2"
    manifest = open_bundle(bundle).manifest

    def next_of(version: Path) -> str:
        show_published(version, manifest)
        return capsys.readouterr().out.splitlines()[-1]

    assert next_of(bundle) == f"next: tbe-serve run {model.parent}"
    shutil.copytree(bundle, following)
    assert next_of(following) == "next: tbe-serve load m"
    assert tbe_export("release", str(model), "1").exit_code == 0
    assert next_of(following) == f"next: tbe-export release {model} 2"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["--model", "tests.support.models:nothing"], "--model tests.support.models:nothing: expected package.module:function", id="no function"),
        pytest.param(["--model", "nowhere:build"], "--model nowhere:build: expected package.module:function", id="no module"),
        pytest.param(["--model", "builtins:dict"], "--model builtins:dict: expected a torch.nn.Module, got dict", id="no nn.Module"),
        pytest.param(["--dtype", "int3"], f"--dtype: expected one of {DTYPES}, got 'int3'", id="dtype"),
        pytest.param(["--dtype", "itme=int4"], "--dtype 'itme': expected the name of a table", id="pattern"),
        pytest.param(["--max-error", "small"], "--max-error: expected a number, got 'small'", id="number"),
        pytest.param(["--dtype", "int8", "--max-error", "user=1e-9"], "table 'user': INT8 moves an element by", id="limit"),
        pytest.param(["--checkpoint", "nowhere.pt"], "--checkpoint nowhere.pt: expected a file, or a folder with", id="checkpoint"),
    ],
)  # fmt: skip
def test_a_failed_export_prints_one_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    trained = () if "--model" in arguments else TRAINED
    done = tbe_export("model", "--repository", str(tmp_path / "r"), "--name", "m", *trained, *arguments)
    assert done.exit_code == 1
    assert f"tbe-export: {message}" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "r" / "m").exists()


def test_a_width_that_the_model_contradicts_is_refused_with_its_line(tmp_path: Path) -> None:
    done = tbe_export(
        *("model", "--model", "tests.support.ranker:ranker", "--repository", str(tmp_path / "r"), "--name", "m"),
        *("--scores", "--dense-width", "user=7"),
    )
    assert done.exit_code == 1
    (said,) = done.stderr.splitlines()
    assert "'user': expected 3, of the nn.Linear that takes it at " in said
    assert "tests/support/ranker.py, line " in said
    assert said.endswith(", got 7")
