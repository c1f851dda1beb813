"""An exported program answers as the module that it was made of, for any number of samples."""

import io

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


@pytest.mark.parametrize("is_amd", [True, False])
def test_it_answers_as_its_module(monkeypatch: pytest.MonkeyPatch, is_amd: bool) -> None:
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
