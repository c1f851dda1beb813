"""Native code of a dense part is loaded only where processor and torch are those that it was compiled for."""

import hashlib
import io
import json
import re
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from export import export_model
from serving.bundle.load import open_bundle
from serving.bundle.scores import SCORES, DenseFile, DenseFormat
from serving.engine import Engine
from serving.errors import BundleError
from serving.lookup import dense_files
from serving.lookup.aot_inductor import INSTRUCTIONS, LIBRARY, misfit
from tests.support.scored_models import EXACT, dlrm, own_scores, random_request

NAME = "scores.x86-64-v3.zip"
V3 = " ".join(sorted(INSTRUCTIONS["x86-64-v3"]))


def native(instructions: str = "x86-64-v3", release: str = torch.__version__) -> DenseFile:
    return DenseFile(NAME, DenseFormat.AOTINDUCTOR, instructions=instructions, torch=release)


@pytest.mark.parametrize(
    ("file", "flags", "expected"),
    [
        pytest.param(native(), f"fpu {V3} avx512f", "", id="fits"),
        pytest.param(native(), V3.replace(" avx2", ""), "compiled for x86-64-v3, this processor has no avx2", id="no AVX2"),
        pytest.param(native(), "asimd sve", "compiled for x86-64-v3, this processor has no abm, avx, avx2, .*", id="ARM"),
        pytest.param(native(), None, "compiled for x86-64-v3, this processor has no abm, avx, avx2, .*", id="unreadable"),
        pytest.param(native(release="2.12.0+cpu"), V3, r"compiled for torch 2\.12\.0\+cpu, this is torch 2\..*", id="older"),
        pytest.param(native(release=f"{torch.__version__}1"), V3, "compiled for torch 2.*1, this is torch 2.*", id="build"),
        pytest.param(native("x86-64-v9"), V3, "compiled for x86-64-v9, expected one of x86-64-v3", id="unknown level"),
        pytest.param(DenseFile(SCORES, DenseFormat.TORCHSCRIPT), "", "", id="TorchScript"),
    ],
)  # fmt: skip
def test_code_for_another_machine_is_named(tmp_path: Path, file: DenseFile, flags: str | None, expected: str) -> None:
    if flags is not None:
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
    assert re.fullmatch(expected, misfit(file, tmp_path / "cpuinfo") or "")


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_model(dlrm(), tmp_path_factory.mktemp("scores"), "m", EXACT)


def with_native(published: Path, folder: Path, content: bytes, **changes: str) -> Path:
    """A copy of a bundle with native code as its fastest file."""
    bundle = Path(shutil.copytree(published, folder / "1"))
    (bundle / NAME).write_bytes(content)
    manifest = json.loads((bundle / "manifest.json").read_text())
    manifest["requires"] = sorted([*manifest["requires"], "aot_inductor"])
    manifest["files"][NAME] = {"size_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    described: dict[str, Any] = {"name": NAME, "format": "AOTINDUCTOR", "instructions": "x86-64-v3"}
    manifest["dense_part"]["files"].insert(0, {**described, "torch": torch.__version__, **changes})
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    return bundle


def archive_of(library: bytes) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr(LIBRARY, library)
        archive.writestr("../outside", b"")
    return content.getvalue()


def never(_: bytes) -> Any:
    pytest.fail("loaded")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"torch": "2.12.0"}, "compiled for torch 2.12.0, this is torch"),
        ({"instructions": "x86-64-v9"}, "compiled for x86-64-v9, expected one of x86-64-v3"),
    ],
)
def test_code_for_another_machine_is_not_loaded_and_the_next_file_answers(
    published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], reason: str
) -> None:
    bundle = with_native(published, tmp_path, archive_of(b"\x7fELF"), **changes)
    monkeypatch.setitem(dense_files._LOADERS, DenseFormat.AOTINDUCTOR, never)
    engine = Engine.open(bundle)
    assert engine.dense_part is not None
    assert engine.dense_part.file.format is not DenseFormat.AOTINDUCTOR
    assert engine.dense_part.failures[0].startswith(f"{bundle / NAME}: {reason}")
    model = dlrm()
    bags, dense = random_request(model, np.random.default_rng(0), 5)
    expected = own_scores(model, bags, dense)["scores"]
    np.testing.assert_allclose(engine.score(bags, dense)["scores"], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "content", [b"no archive", archive_of(b"\x7fELF"), archive_of(b"")], ids=["no zip", "ELF", "empty"]
)
def test_unloadable_code_is_named_and_the_next_file_serves(
    published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    """The temporary folder is removed, and nothing is written beside it."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    bundle = with_native(published, tmp_path, content)
    loaded = Engine.open(bundle).dense_part
    assert loaded is not None
    assert loaded.file.format is not DenseFormat.AOTINDUCTOR
    assert f"{bundle / NAME}: torch {torch.__version__} cannot load it: " in loaded.failures[0]
    assert not [*temporary.iterdir()]
    assert not (tmp_path / "outside").exists()


def test_a_bundle_with_native_code_must_require_aot_inductor(published: Path, tmp_path: Path) -> None:
    bundle = with_native(published, tmp_path, archive_of(b""))
    text = (bundle / "manifest.json").read_text()
    (bundle / "manifest.json").write_text(text.replace('"aot_inductor", ', ""))
    with pytest.raises(BundleError, match=r"requires: expected \['aot_inductor', 'dense_files', 'dense_part'\]"):
        open_bundle(bundle)


def test_changed_code_is_not_loaded(published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = with_native(published, tmp_path, archive_of(b"\x7fELF"))
    opened = open_bundle(bundle)
    (bundle / NAME).write_bytes(archive_of(b"\x7fELG"))
    monkeypatch.setitem(dense_files._LOADERS, DenseFormat.AOTINDUCTOR, never)
    with pytest.raises(BundleError, match=f"{NAME}: expected SHA-256"):
        open_bundle(bundle)
    with pytest.raises(BundleError, match=f"{NAME}: expected SHA-256"):
        Engine(opened)
