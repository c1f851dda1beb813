"""Large products by oneDNN are those of torch, whatever the shape; small ones are left alone."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor

from export import export_model
from serving.engine import Engine
from serving.lookup import gemm
from serving.lookup.gemm import _is_amd, linear, replace_large_products
from serving.torchscript import torchscript
from tests.support.models import Spec, collection
from tests.support.scored_models import EXACT

HEIGHTS = (0, 1, 63, 64, 65, 128, 200, 511, 512, 700, 1024, 2500)
# Of FP32, for sums of a few hundred products.
CLOSE = 1e-4


def by_onednn(program: object) -> int:
    return str(program).count("mkldnn::_linear_pointwise")


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize(("columns", "out_features"), [(256, 64), (64, 256), (128, 128)])
def test_products_are_those_of_torch(columns: int, out_features: int, with_bias: bool) -> None:
    with torchscript():
        scripted = torch.jit.script(linear)
    weight, bias = torch.randn(out_features, columns), torch.randn(out_features) if with_bias else None
    for rows in HEIGHTS:
        whole = torch.randn(rows, columns)
        apart = torch.randn(rows, 2 * columns)[:, ::2]
        deep = torch.randn(rows, 3, columns)
        across = torch.randn(columns, rows).t()
        for matrix in (whole, apart, deep, across):
            expected = nn.functional.linear(matrix, weight, bias)
            torch.testing.assert_close(scripted(matrix, weight, bias), expected, rtol=CLOSE, atol=CLOSE)


def test_onednn_is_called_with_few_different_row_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps up to 2 MB for each of them."""
    row_counts: set[int] = set()

    def onednn(rows: torch.Tensor, weight: torch.Tensor, *_: object) -> torch.Tensor:
        row_counts.add(len(rows))
        return rows @ weight.t()

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", onednn)
    weight = torch.randn(2, 3)
    for out_features in range(3000):
        assert linear(torch.randn(out_features, 3), weight, None).shape == (out_features, 2)
    assert row_counts == {64, 128, 256, 512, 1024}


def test_small_layers_other_dtypes_and_computed_weights_are_left_alone() -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.small, self.large = nn.Linear(128, 127), nn.Linear(128, 128)
            self.fine = nn.Linear(128, 128, dtype=torch.float64)
            self.head = nn.Linear(128, 1, bias=False)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            product = nn.functional.linear(rows, rows[:128])
            from_layers = self.small(rows).sum(1) + self.large(rows).sum(1) + self.fine(rows.double()).sum(1)
            score: torch.Tensor = from_layers + product.sum(1) + self.head(rows).squeeze(1)
            return score

    layers, rows = Layers().eval(), torch.randn(640, 128)
    with torchscript():
        program = torch.jit.freeze(torch.jit.script(layers))
    assert replace_large_products(program.graph, takes_weights=True) == 1
    with torch.no_grad():
        torch.testing.assert_close(program(rows), layers(rows), rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(program(rows[:130]), layers(rows[:130]), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("said", "machine", "is_amd"),
    [
        ("processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel name\t: AMD EPYC\n", "x86_64", True),
        ("processor\t: 0\nvendor_id\t: GenuineIntel\nmodel name\t: not AuthenticAMD\n", "x86_64", False),
        ("vendor_id\t: AuthenticAMD\n", "aarch64", False),
        (None, "x86_64", False),
    ],
)
def test_amd_processors_are_recognized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str | None, machine: str, is_amd: bool
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    if said is not None:
        (tmp_path / "cpuinfo").write_text(said)
    assert _is_amd(tmp_path / "cpuinfo") is is_amd


class Wide(nn.Module):
    """Layers that are large; a row for each sample, and one for each of its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.bags: EmbeddingBagCollection = collection([Spec(f"t{n}", 50, 64, "SUM", (f"f{n}",)) for n in range(4)])
        self.cross, self.back = nn.Linear(256, 64, bias=False), nn.Linear(64, 256)
        self.parts, self.over = nn.Linear(64, 300), nn.Linear(256 + 4 * 300, 1)

    def forward(self, ids: KeyedJaggedTensor) -> torch.Tensor:
        pooled = self.bags(ids).values()
        crossed = pooled * self.back(self.cross(pooled)) + pooled
        parts = self.parts(pooled.view(-1, 4, 64)).relu()
        score: torch.Tensor = self.over(torch.cat([crossed, parts.flatten(1)], dim=1))
        return score.squeeze(1)


def test_scores_are_the_model_s_on_any_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Wide().eval()
    bundle = export_model(model, tmp_path, "m", EXACT)
    random = np.random.default_rng(0)
    for is_amd in (True, False):
        monkeypatch.setattr(gemm, "_is_amd", lambda _, is_amd=is_amd: is_amd)
        engine = Engine.open(bundle)
        assert engine._dense is not None
        graph = engine._dense._forward.graph  # type: ignore[attr-defined]
        assert by_onednn(graph) == (3 * 2 if is_amd else 0)
        for samples in (1, 16, 64, 100, 128, 600):
            ids = random.integers(0, 50, (4, samples))
            features = {f"f{n}": ids[n][:, None] for n in range(4)}
            kjt = KeyedJaggedTensor(
                [*features], torch.from_numpy(ids.reshape(-1)), lengths=torch.ones(4 * samples, dtype=torch.int32)
            )
            with torch.no_grad():
                expected = model(kjt).numpy()
            (scores,) = engine.score(features).values()
            np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-4)
        engine.close()


def test_weights_that_are_inputs_are_replaced_where_allowed_and_large() -> None:
    class Layer(nn.Module):
        def forward(self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(rows, weight, bias)

    with torchscript():
        program = torch.jit.freeze(torch.jit.script(Layer().eval()))
    assert replace_large_products(program.graph) == 0
    assert replace_large_products(program.graph, takes_weights=True) == 1
    for out_features, dtype in ((256, torch.float32), (3, torch.float32), (256, torch.float64)):
        weight, bias = torch.randn(out_features, 64, dtype=dtype), torch.randn(out_features, dtype=dtype)
        for count in (1, 64, 100, 128):
            rows = torch.randn(count, 64, dtype=dtype)
            expected = nn.functional.linear(rows, weight, bias)
            torch.testing.assert_close(program(rows, weight, bias), expected, rtol=CLOSE, atol=CLOSE)
    with torch.profiler.profile() as profile:
        program(torch.randn(128, 64), torch.randn(256, 64), torch.randn(256))
        program(torch.randn(128, 64), torch.randn(3, 64), torch.randn(3))
    (calls,) = (event.count for event in profile.key_averages() if "mkldnn::_linear_pointwise" in event.key)
    assert calls == 1
