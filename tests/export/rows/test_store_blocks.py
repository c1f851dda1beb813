"""Weights files: rows one after another, whatever blocks they were read in."""

from pathlib import Path

import msgspec
import pytest

from export import export_model
from export.trained import checkpoint
from serving.bundle.opening import open_bundle
from tests.support.models import Spec, collection


def test_rows_are_packed_at_alignment_1(tmp_path: Path) -> None:
    bundle = export_model(collection((Spec("t", 1000, 64, "SUM", ("x",)),)), tmp_path / "r", "m")
    assert (bundle / "weights.0.bin").stat().st_size == 1000 * 68


def test_blocks_do_not_change_the_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = export_model(collection(), tmp_path / "r", "m")
    monkeypatch.setattr(checkpoint, "_BLOCK_BYTES", 1000)
    blocks = export_model(collection(), tmp_path / "r", "m")
    assert (whole / "weights.0.bin").read_bytes() == (blocks / "weights.0.bin").read_bytes()
    parity = [open_bundle(bundle).manifest.parity for bundle in (whole, blocks)]
    for one, other in zip(*parity, strict=True):
        for name in ("largest", "worst_row"):
            assert getattr(one.quantized, name) == getattr(other.quantized, name)
        for name in ("mean", "cosine"):
            assert getattr(one.quantized, name) == pytest.approx(getattr(other.quantized, name))
        assert msgspec.structs.replace(one, quantized=other.quantized) == other
