"""`tbe-export verify`."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchrec import EmbeddingBagCollection

from export.trained import checkpoint
from serving.engine import Engine
from serving.model.config_file import read_config, write_config
from tests.support import bundle_reader
from tests.support.commands import TRAINED, tbe_export
from tests.support.models import SUM, collection, float_tables


def test_verify_reads_every_byte_and_asks_every_table(mixed: Path, tmp_path: Path) -> None:
    done = tbe_export("verify", str(mixed))
    assert done.exit_code == 0, done.stderr
    assert "3 files" in done.stdout
    assert "as recorded at export" in done.stdout
    steps = ("float ↔ quantized", "quantized ↔ sharded", "sharded ↔ scripted", "scripted ↔ reloaded")
    for table in ("user", "item", "genre", "word"):
        for step in steps:
            assert any(line.split()[:1] == [table] and step in line for line in done.stdout.splitlines())
    copy = Path(shutil.copytree(mixed, tmp_path / "1"))
    weights = copy / "weights.0.bin"
    content = bytearray(weights.read_bytes())
    content[1000] ^= 1
    weights.write_bytes(content)
    done = tbe_export("verify", str(copy))
    assert done.exit_code == 1
    assert "weights.0.bin: expected SHA-256" in done.stderr


def test_verify_compares_the_copies_of_a_table(repository: Path, tmp_path: Path) -> None:
    """Digests agree with each of them, and only one answers."""
    bundle = Path(shutil.copytree(repository / "sharded" / "1", tmp_path / "1"))
    assert tbe_export("verify", str(bundle)).exit_code == 0
    manifest = json.loads((bundle / "manifest.json").read_text())
    (copy,) = [shard for shard in manifest["plan"]["shards"] if (shard["table"], shard["rank"]) == ("genre", 2)]
    content = bytearray((bundle / "weights.2.bin").read_bytes())
    content[copy["offset_bytes"] + 7 * 2 * 8] ^= 1  # FP16 of dim 8: row 7
    (bundle / "weights.2.bin").write_bytes(content)
    manifest["files"]["weights.2.bin"]["sha256"] = hashlib.sha256(content).hexdigest()
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    done = tbe_export("verify", str(bundle))
    assert done.exit_code == 1
    assert "table 'genre': row 7 of its copy on rank 2 differs from that on rank 0" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        (lambda parity: parity[1:], "no table 'user'"),
        (lambda parity: [*parity, parity[1]], "table 'item' twice"),
        (lambda parity: [*parity, parity[1] | {"table": "other"}], "another table 'other'"),
    ],
    ids=["missing", "twice", "of another table"],
)
def test_verify_needs_the_parity_of_each_table(
    mixed: Path, tmp_path: Path, change: Callable[[list[Any]], list[Any]], wrong: str
) -> None:
    bundle = Path(shutil.copytree(mixed, tmp_path / "1"))
    manifest = json.loads((bundle / "manifest.json").read_text())
    manifest["parity"] = change(manifest["parity"])
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    Engine.open(bundle)
    done = tbe_export("verify", str(bundle))
    assert done.exit_code == 1
    assert f"{bundle}/manifest.json: parity: expected each table once, got {wrong}: " in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_verify_of_a_model_checks_the_version_it_serves(mixed: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(mixed.parent, tmp_path / "mixed"))
    (Path(shutil.copytree(model / "1", model / "2")) / "program.pt").write_bytes(b"")
    done = tbe_export("verify", str(model))
    assert done.exit_code == 1
    assert f"{model}/2/program.pt: expected" in done.stderr
    config = read_config(model)
    config.version_policy.specific.versions.append(1)
    write_config(model, config)
    assert tbe_export("verify", str(model)).exit_code == 0


def test_verify_with_trained_weights_measures_every_row(mixed: Path, tmp_path: Path) -> None:
    """The numbers are numpy's own, worst row included; weights that have moved on since are noticed."""
    module = collection()
    torch.save(module.state_dict(), tmp_path / "w.pt")
    options = (*TRAINED, "--checkpoint", str(tmp_path / "w.pt"))
    done = tbe_export("verify", str(mixed), *options, "--json")
    assert done.exit_code == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["ok"], report["failures"], report["quantized_measured"]) == (True, [], True)
    for parity in report["tables"]:
        trained = float_tables(module)[parity["table"]].astype(np.float64)
        stored = bundle_reader.exported_table(mixed, parity["table"]).astype(np.float64)
        error = np.abs(trained - stored)
        cosine = (trained * stored).sum() / np.linalg.norm(trained) / np.linalg.norm(stored)
        assert parity["quantized"]["worst_row"] == error.max(axis=1).argmax()
        measured = [parity["quantized"][name] for name in ("largest", "mean", "cosine")]
        assert measured == pytest.approx([error.max(), error.mean(), cosine], rel=1e-5)

    with torch.no_grad():
        module.state_dict()["embedding_bags.item.weight"][17, 3] += 5
    torch.save(module.state_dict(), tmp_path / "w.pt")
    done = tbe_export("verify", str(mixed), *options)
    assert done.exit_code == 1
    assert "table 'item': row 17 differs by 4.9" in done.stderr
    assert "table 'user'" not in done.stderr
    done = tbe_export("verify", str(mixed), *options, "--json")
    assert (done.exit_code, json.loads(done.stdout)["ok"]) == (1, False)


def test_a_checkpoint_with_nan_differs_from_the_exported_one(
    mixed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the blocks after it are fine."""
    monkeypatch.setattr(checkpoint, "_BLOCK_BYTES", 4096)
    module = collection()
    with torch.no_grad():
        module.state_dict()["embedding_bags.item.weight"][17, 3] = float("nan")
    torch.save(module.state_dict(), tmp_path / "w.pt")
    done = tbe_export("verify", str(mixed), *TRAINED, "--checkpoint", str(tmp_path / "w.pt"))
    assert done.exit_code == 1
    assert "table 'item': row 17 differs by nan" in done.stderr


def test_verify_with_another_model_names_what_differs(mixed: Path) -> None:
    done = tbe_export("verify", str(mixed), "--model", "tests.export.commands.test_verify:other_model")
    assert done.exit_code == 1
    assert "expected a model with tables {'user': (500, 16)" in done.stderr
    done = tbe_export("verify", str(mixed), "--checkpoint", "w.pt")
    assert done.exit_code == 1
    assert "--checkpoint: expected --model with it" in done.stderr


def test_a_path_without_a_bundle_is_named_before_the_model_is_built(tmp_path: Path) -> None:
    done = tbe_export("verify", str(tmp_path / "1"), "--model", "tests.export.commands.test_verify:not_built")
    assert done.exit_code == 1
    assert "expected a version that tbe-export made, REPOSITORY/NAME/VERSION" in done.stderr


def test_a_model_folder_or_unknown_version_is_refused_with_existing_ones(mixed: Path) -> None:
    for path, expected in (
        (mixed.parent, f"expected a version of this model, such as {mixed}"),
        (mixed.parent / "7", "expected one of versions [1]"),
    ):
        done = tbe_export("inspect", str(path))
        assert done.exit_code == 1
        assert expected in done.stderr


def not_built() -> EmbeddingBagCollection:
    raise AssertionError("the model was built")


def other_model() -> EmbeddingBagCollection:
    return collection(SUM)
