"""The trained model is run with the weights of its checkpoint, as it is with its own."""

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

from export import ExportConfig, WeightDtype, export_model
from export.errors import ExportError
from export.parity.verify import ComparedModel, Verification, verify
from export.trained import loaded_tables
from export.trained.tables import collect_tables
from serving.bundle.load import open_bundle
from serving.bundle.manifest import Manifest
from serving.errors import ConfigurationError
from tests.support import candidate_model
from tests.support.commands import tbe_export
from tests.support.managed_collision import managed, untrained
from tests.support.position_weights import positioned
from tests.support.ranker import ranker
from tests.support.wrapped_collections import pooled

TABLES = ExportConfig(dtype={"*": WeightDtype.INT4})
SCORES = replace(TABLES, scores=True)


def moved(build: Callable[[], nn.Module]) -> nn.Module:
    """A model that was trained since it was built: its floats, tables included, are others."""
    module = build()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) / 4)
    return module


def numbers(manifest: Manifest) -> Any:
    """All parity of a bundle."""
    part = manifest.dense_part
    return msgspec.to_builtins(
        [manifest.parity, None if part is None else [output.parity for output in part.outputs]]
    )


def is_measured(manifest: Manifest) -> set[bool]:
    has_trained = [parity.trained is not None for parity in manifest.parity]
    if manifest.dense_part is not None:
        has_trained += [output.parity.trained is not None for output in manifest.dense_part.outputs]
        has_trained += [
            output.parity.auc.trained is not None for output in manifest.dense_part.outputs if output.parity.auc
        ]
    return {*has_trained}


def labelled(folder: Path) -> Path:
    """Requests for `ranker`."""
    features = {"x": [[1], [2, 3], [4]], "y": [[5], [], [6]], "z": [[7], [8], [9]]}
    dense = {"user": [[0.1, 0.2, 0.3], [0, 1, 2], [3, 2, 1]], "item": [[1, 2], [0, 0], [0.5, 1]]}
    lines = [{"features": features, "dense": dense, "label": {"like": label}} for label in ([0, 1, 1], [1, 0, 0])]
    path = folder / "labelled.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@pytest.mark.parametrize(
    ("trained", "build", "config", "example", "on_meta"),
    [
        pytest.param(moved(ranker), ranker, SCORES, None, True, id="scores"),
        pytest.param(
            moved(candidate_model.build),
            candidate_model.build,
            SCORES,
            candidate_model.example(),
            True,
            id="sequences",
        ),
        pytest.param(moved(positioned), positioned, TABLES, None, False, id="position weights"),
        pytest.param(managed(), untrained, TABLES, None, True, id="raw ids"),
        pytest.param(moved(pooled).half(), lambda: pooled().half(), TABLES, None, False, id="half"),
    ],
)
def test_a_checkpoint_gives_the_same_parity_as_the_trained_module(
    tmp_path: Path,
    trained: nn.Module,
    build: Callable[[], nn.Module],
    config: ExportConfig,
    example: Any,
    on_meta: bool,
) -> None:
    if isinstance(trained, type(ranker())):
        config = replace(config, labelled=labelled(tmp_path))
    expected = open_bundle(export_model(trained, tmp_path / "r", "own", config, example=example)).manifest
    save_dcp(
        {f"model.{key}": tensor for key, tensor in trained.state_dict().items()},
        checkpoint_id=tmp_path / "saved",
        no_dist=True,
    )
    other = build()
    if on_meta:
        for collection in collect_tables(other, trace=False).collections:
            for part in other.get_submodule(collection).modules():
                state: dict[str, Any] = part._parameters
                state |= {
                    name: None if value is None else nn.Parameter(value.to("meta"), False)
                    for name, value in state.items()
                }
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    bundle = export_model(other, tmp_path / "r", "saved", config, example=example, checkpoint=tmp_path / "saved")
    assert numbers(open_bundle(bundle).manifest) == numbers(expected)
    assert is_measured(expected) == {True}
    for name, tensor in other.state_dict().items():
        assert tensor.is_meta or torch.equal(tensor, before[name])


def compared(bundle: Path, folder: Path, **options: Any) -> Verification:
    return verify(bundle, ComparedModel(collect_tables(ranker()), folder / "saved", **options))


def test_verify_measures_what_an_export_could_not(tmp_path: Path) -> None:
    torch.save(moved(ranker).state_dict(), tmp_path / "saved")
    size = 4 * (50 * 8 + 10 * 12)
    samples = labelled(tmp_path)
    config = replace(SCORES, labelled=samples)

    def exported(most: int) -> Path:
        limit = replace(config, trained_memory_bytes=most)
        return export_model(ranker(), tmp_path / "r", "m", limit, checkpoint=tmp_path / "saved")

    measured, bundle = open_bundle(exported(size)).manifest, exported(size - 1)
    assert (is_measured(measured), is_measured(open_bundle(bundle).manifest)) == ({True}, {False})
    verification = compared(bundle, tmp_path, labelled=samples, trained_memory_bytes=size)
    assert (verification.failures, verification.is_run) == ((), True)
    assert verification.dense_part is not None
    assert measured.dense_part is not None
    # The files were timed by each export.
    files = verification.dense_part.files
    assert verification.dense_part == msgspec.structs.replace(measured.dense_part, files=files)
    assert [parity.trained for parity in verification.parity] == [parity.trained for parity in measured.parity]
    verification = compared(bundle, tmp_path, labelled=samples, trained_memory_bytes=size - 1)
    assert (verification.failures, verification.is_run) == ((), False)
    amended = msgspec.structs.replace(measured, parity=verification.parity, dense_part=verification.dense_part)
    assert is_measured(amended) == {False}


def test_the_scale_of_scores_is_the_same_without_running_the_model(tmp_path: Path) -> None:
    """They are made of the rows that are served, not of random embeddings."""
    torch.save(moved(ranker).state_dict(), tmp_path / "saved")
    exact = replace(SCORES, dtype={"*": WeightDtype.FP32})
    scales = []
    for most in (None, 0):
        config = replace(exact, trained_memory_bytes=most)
        bundle = export_model(ranker(), tmp_path / "r", "m", config, checkpoint=tmp_path / "saved")
        part = open_bundle(bundle).manifest.dense_part
        assert part is not None
        scales.append([output.parity.scale for output in part.outputs])
    assert scales[0] == pytest.approx(scales[1], rel=1e-5)


def test_a_table_that_is_loaded_wrongly_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What compares the model shares no code with what serves."""
    torch.save(moved(pooled).state_dict(), tmp_path / "saved")
    read_rows = loaded_tables._read
    monkeypatch.setattr(loaded_tables, "_read", lambda *arguments: read_rows(*arguments) + 1)
    with pytest.raises(ExportError, match="table 'a': the trained module answers differently for feature 'fa'"):
        export_model(pooled(), tmp_path / "r", "m", TABLES, checkpoint=tmp_path / "saved")


def test_labels_need_a_model_with_scores(tmp_path: Path) -> None:
    bundle = export_model(pooled(), tmp_path / "r", "m")
    with pytest.raises(ConfigurationError, match=r"labelled \(--labelled\): expected a model"):
        verify(bundle, ComparedModel(collect_tables(pooled()), labelled=labelled(tmp_path)))


def test_an_export_that_cannot_run_the_model_prints_the_command_that_can(tmp_path: Path) -> None:
    torch.save({"ema": moved(ranker).state_dict(), "model": ranker().state_dict()}, tmp_path / "saved.pt")
    options = ("--model", "tests.support.ranker:ranker", "--checkpoint", str(tmp_path / "saved.pt"))
    settings = tmp_path / "export.toml"
    settings.write_text(f'labelled = "{labelled(tmp_path)}"\nscores = true\ncheckpoint_prefix = "ema."\n')
    where = ("--repository", str(tmp_path / "r"), "--name", "m", "--config", str(settings))
    done = tbe_export("model", *options, *where, "--trained-memory", "2kB")
    assert (done.exit_code, done.stderr) == (0, "")
    assert "the tables take 2.1 kB as FP32, more than 2.0 kB (--trained-memory" in done.stdout
    program, *command = shlex.split(done.stdout.splitlines()[-1])
    assert program == "tbe-export"
    done = tbe_export(*command, "--json")
    assert (done.exit_code, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    like, both = (output["parity"] for output in report["dense_part"]["outputs"])
    assert all(table["trained"] is not None for table in report["tables"])
    assert 0 <= like["auc"]["trained"] <= 1
    assert 0 < both["trained"] < 1
