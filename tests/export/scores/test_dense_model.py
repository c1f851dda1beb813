"""A dense part of the user's own takes the place of one that cannot be traced."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from export import export_model
from export.errors import ModelError
from export.parity.verify import ComparedModel, verify
from export.trained.tables import collect_tables
from serving.bundle.load import open_bundle
from serving.bundle.scores import DenseDtype
from serving.engine import Engine
from serving.errors import ConfigurationError
from tests.export.scores.test_refusals import Branches
from tests.support.long_cases import one_in
from tests.support.scored_models import EXACT, even, random_request


class Own(nn.Module):
    """Its forward has a branch, which TorchScript compiles."""

    def __init__(self) -> None:
        super().__init__()
        self.over = nn.Linear(16 + 3, 2)

    def forward(self, embeddings: dict[str, Tensor], price: Tensor) -> dict[str, Tensor]:
        logits = self.over(torch.cat([embeddings["f2"], price], dim=1))
        if float(price.sum()) > 0:
            logits = -logits
        return {"click": logits[:, 0], "buy": logits[:, 1]}


class Alone(nn.Module):
    def forward(self, embeddings: dict[str, Tensor]) -> Tensor:
        return embeddings["f0"].sum(dim=1)


class OtherInTorchScript(nn.Module):
    def forward(self, embeddings: dict[str, Tensor]) -> Tensor:
        numbers = embeddings["f0"].sigmoid()
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            numbers = numbers + (embeddings["f0"].mean(0) > 1e7).float()
        return numbers


class OtherInExport(nn.Module):
    def forward(self, embeddings: dict[str, Tensor]) -> Tensor:
        numbers = embeddings["f0"].sigmoid()
        if torch.compiler.is_compiling():
            return numbers
        return numbers + (embeddings["f0"].mean(0) > 1e7).float()


class OtherInBfloat16(nn.Module):
    def forward(self, embeddings: dict[str, Tensor]) -> Tensor:
        numbers = embeddings["f0"].sigmoid()
        if numbers.dtype == torch.bfloat16:
            numbers = numbers + (embeddings["f0"].mean(0) > 1e7).to(numbers.dtype)
        return numbers


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.over, self.norm = nn.Linear(16, 8), nn.BatchNorm1d(8)

    def forward(self, embeddings: dict[str, Tensor]) -> Tensor:
        numbers: Tensor = self.norm(self.over(embeddings["f0"])).relu().softmax(1)
        for embedding in embeddings.values():
            numbers = numbers + embedding[:, :8]
        return numbers


@pytest.mark.parametrize("dtype", one_in(2, [DenseDtype.FP32, DenseDtype.BF16]))
@pytest.mark.parametrize(
    ("dense", "mixes"), [(OtherInTorchScript, True), (OtherInExport, True), (OtherInBfloat16, None), (Plain, False)]
)
def test_the_inspected_graph_is_the_one_that_torchscript_runs(
    tmp_path: Path, dense: type[nn.Module], mixes: bool | None, dtype: DenseDtype
) -> None:
    """Samples meet where numbers are above 10⁷, which no probe shows."""
    torch.manual_seed(0)
    bundle = export_model(even(), tmp_path, "m", replace(EXACT, dense_dtype=dtype), dense=dense().eval())
    part = open_bundle(bundle).manifest.dense_part
    assert part is not None
    assert part.mixes_samples == (dtype is DenseDtype.BF16 if mixes is None else mixes), part.mixed_by


class Wrong(nn.Module):
    def forward(self, embeddings: dict[str, Tensor]) -> Tensor:
        return embeddings["none"]


class Several(nn.Module):
    def forward(self, embeddings: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return embeddings["f0"], embeddings["f1"]


@pytest.mark.parametrize("model", [Branches, even])
def test_scores_are_those_of_the_module_that_was_given(tmp_path: Path, model: Any) -> None:
    torch.manual_seed(0)
    dense, module = Own(), model()
    config = replace(EXACT, dense_widths={"price": 3})
    bundle = export_model(module, tmp_path, "m", config, dense=dense)
    assert not verify(bundle, ComparedModel(collect_tables(module))).failures
    engine = Engine.open(bundle)
    random = np.random.default_rng(0)
    bags, _ = random_request(module, random, 6)
    price = random.random((6, 3), np.float32)
    embeddings = {name: torch.from_numpy(rows.copy()) for name, rows in engine.lookup(bags).items()}
    with torch.no_grad():
        expected = dense(embeddings, torch.from_numpy(price))
    answer = engine.score(bags, {"price": price})
    assert list(answer) == ["click", "buy"]
    for name, numbers in expected.items():
        np.testing.assert_allclose(answer[name], numbers, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("dense", "names"), [(Alone(), ["scores"]), (Several(), ["scores_0", "scores_1"])])
def test_answers_without_names_are_numbered(tmp_path: Path, dense: nn.Module, names: list[str]) -> None:
    engine = Engine.open(export_model(even(), tmp_path, "m", EXACT, dense=dense))
    assert list(engine.score(random_request(even(), np.random.default_rng(0), 2)[0])) == names


def test_modules_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"expected the width of 'price', which Own takes"):
        export_model(even(), tmp_path, "m", EXACT, dense=Own())
    with pytest.raises(ModelError, match=r"Wrong: expected a forward of embeddings by feature .*'none'"):
        export_model(even(), tmp_path, "m", EXACT, dense=Wrong())
    with pytest.raises(ConfigurationError, match=r"dense: expected scores with it"):
        export_model(even(), tmp_path, "m", dense=Alone())
