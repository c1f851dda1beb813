"""From a trained module to a published bundle: what it says of itself, what it takes, and what stops it."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torchrec import EmbeddingBagCollection

from export import IdPolicy, export_model, pipeline
from export.config import Progress
from export.errors import PublishError
from export.parity.limits import check_parity
from serving.bundle.load import open_bundle
from tests.support.folder_contents import files
from tests.support.models import MIXED, MIXED_CONFIG, Spec, collection


@pytest.mark.usefixtures("fresh_process")
def test_the_manifest_says_what_was_exported(tmp_path: Path) -> None:
    manifest = open_bundle(export_model(collection(MIXED), tmp_path / "r", "m", MIXED_CONFIG)).manifest
    assert [feature.name for feature in manifest.features] == [
        "user_id",
        "item_id",
        "recent_items",
        "genres",
        "words",
    ]
    assert [table.dtype.value for table in manifest.tables] == ["INT8", "INT4", "FP16", "INT2"]
    assert [table.id_policy for table in manifest.tables] == [IdPolicy.ERROR] * 3 + [IdPolicy.ZERO]
    assert manifest.versions.keys() >= {"torch", "torchrec", "fbgemm-gpu-cpu", "tbe-serving"}
    for parity in manifest.parity:
        assert 0 < parity.quantized.mean < parity.quantized.largest <= parity.limit
        assert 0.8 < parity.quantized.cosine < 1
        assert parity.sharded.largest < 1e-5
        assert parity.sharded.cosine == pytest.approx(1, abs=1e-9)
        assert parity.scripted is not None
        assert parity.scripted.largest == parity.reloaded.largest == 0
        assert parity.scripted.cosine == parity.reloaded.cosine == 1


EXPORT_CHECKPOINT = """
import resource, sys
from export import ExportConfig, export_model
from export.errors import PublishError
from tests.export.test_pipeline import on_meta
def peak():  # what getrusage says would be the parent's, if that was larger
    return int(open("/proc/self/status").read().partition("VmHWM:")[2].split()[0])
before = peak()
if len(sys.argv) > 3:
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), int(sys.argv[3])))
try:
    # The model itself is not run: it would be loaded.
    export_model(on_meta(), sys.argv[1], "m", ExportConfig(trained_memory_bytes=0), checkpoint=sys.argv[2])
except PublishError as error:
    sys.exit(str(error))
print(peak() - before)
"""

LARGE = (Spec("t", 3_000_000, 64, "SUM", ("x",)),)


def on_meta() -> EmbeddingBagCollection:
    with torch.device("meta"):
        return collection(LARGE)


@pytest.fixture(scope="module")
def large_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table of 732 MiB."""
    path = tmp_path_factory.mktemp("large") / "w.pt"
    torch.save({"embedding_bags.t.weight": torch.linspace(-1, 1, 3_000_000 * 64).view(-1, 64)}, path)
    return path


@pytest.mark.long
def test_memory_does_not_grow_with_the_table(tmp_path: Path, large_checkpoint: Path) -> None:
    command = [sys.executable, "-c", EXPORT_CHECKPOINT, str(tmp_path / "r"), str(large_checkpoint)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert 1 < int(done.stdout) / 1024 < 300  # MiB, of 732
    assert (tmp_path / "r" / "m" / "1" / "weights.0.bin").stat().st_size == 3_000_000 * 68


@pytest.mark.promise("A killed export, or one with a full disk, leaves whole versions or nothing")
def test_a_full_disk_is_reported_and_leaves_nothing(tmp_path: Path, large_checkpoint: Path) -> None:
    """A limit on the size of files stands in for the disk: the kernel refuses the write in the same way."""
    command = [sys.executable, "-c", EXPORT_CHECKPOINT, str(tmp_path / "r"), str(large_checkpoint), str(50 << 20)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "the draft cannot be written: File too large: make room beside the repository" in done.stderr
    assert files(tmp_path) == {}
    assert [path.name for path in tmp_path.iterdir()] == ["r"]


def test_nothing_is_published_that_serving_would_refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that JSON does not have, wherever it came from: the manifest would say null."""

    def with_no_number(*arguments: Any) -> Any:
        first, *rest = check_parity(*arguments)
        return msgspec.structs.replace(first, limit=float("inf")), *rest

    export_model(collection(), tmp_path / "r", "m")
    before = files(tmp_path)
    monkeypatch.setattr(pipeline, "check_parity", with_no_number)
    with pytest.raises(PublishError, match=r"could not be served: .*Expected `float`, got `null`"):
        export_model(collection(), tmp_path / "r", "m")
    assert files(tmp_path) == before


def test_progress_covers_every_byte(tmp_path: Path) -> None:
    steps: list[Progress] = []
    export_model(collection(), tmp_path / "r", "m", progress=steps.append)
    total = sum(4 * spec.rows * spec.dim for spec in MIXED)
    assert [step.step for step in steps] == ["user", "item", "genre", "word", "parity"]
    assert {step.total for step in steps} == {total}
    assert steps[-1].done == steps[-2].done == total
