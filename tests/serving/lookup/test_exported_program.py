"""An exported program answers as the module that it was made of, for any number of samples."""

import io
import logging
import os
import pickle
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from serving.lookup import gemm
from serving.lookup.exported_program import load_exported_program


class Layers(nn.Module):
    """Has a parameter of each kind: of layers, shared, a buffer, a buffer that is not saved, and a constant."""

    shift: Tensor
    factor: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = nn.Linear(128, 8), nn.Linear(128, 128)
        self.head = nn.Linear(128, 1, bias=False)
        self.tied = self.head.weight
        self.register_buffer("shift", torch.randn(8))
        self.register_buffer("factor", torch.randn(()), persistent=False)

    def forward(self, rows: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        order = torch.tensor([3, 1, 0, 2])
        hidden = self.large(rows).relu() * self.factor + self.tied
        return self.head(hidden).squeeze(1), (self.small(rows) + self.shift)[:, order] * ids[:, None]


class Runs:
    """Runs code where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_a_pickled_object_is_not_unpickled(tmp_path: Path) -> None:
    """torch.export unpickles any object in place of the example inputs."""
    module = nn.Linear(2, 1)
    torch.export.save(torch.export.export(module, (torch.rand(2, 2),)), tmp_path / "good.pt2")
    load_exported_program((tmp_path / "good.pt2").read_bytes())
    pickled = io.BytesIO()
    torch.save(Runs(tmp_path / "ran"), pickled)
    with zipfile.ZipFile(tmp_path / "good.pt2") as good, zipfile.ZipFile(tmp_path / "bad.pt2", "w") as bad:
        names = good.namelist()
        for name in names:
            bad.writestr(name, pickled.getvalue() if "sample_inputs" in name else good.read(name))
    assert any("sample_inputs" in name for name in names)
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        load_exported_program((tmp_path / "bad.pt2").read_bytes())
    assert not (tmp_path / "ran").exists()
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ
    logging.disable(logging.CRITICAL)  # torch's own line about it cannot be formatted
    with suppress(Exception):
        torch.export.load(tmp_path / "bad.pt2")
    logging.disable(logging.NOTSET)
    assert (tmp_path / "ran").exists()  # torch itself runs it


@pytest.mark.parametrize("is_amd", [True, False])
def test_an_exported_program_answers_like_its_module(monkeypatch: pytest.MonkeyPatch, is_amd: bool) -> None:
    monkeypatch.setattr(gemm, "_is_amd", lambda _: is_amd)
    layers = Layers().eval()
    rows = {0: torch.export.Dim.DYNAMIC}
    program = torch.export.export(layers, (torch.randn(5, 128), torch.arange(5)), dynamic_shapes=(rows, rows))
    content = io.BytesIO()
    torch.export.save(program, content)
    forward = load_exported_program(content.getvalue())
    code = forward.func.__self__.code  # type: ignore[attr-defined]
    assert code.count("gemm_linear(") == int(is_amd)
    assert "_assert_tensor_metadata" not in code
    for samples in (1, 2, 5, 64, 200):
        arguments = torch.randn(samples, 128), torch.arange(samples)
        with torch.inference_mode():
            for actual, expected in zip(forward(*arguments), layers(*arguments), strict=True):
                torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-4)
