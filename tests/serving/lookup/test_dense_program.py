"""The dense part scores large batches some samples at a time, unless samples meet in it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from export import ExportConfig, export_model
from serving.engine import Engine
from serving.lookup import dense_program
from serving.lookup.dense_program import DenseProgram
from tests.support.models import SUM, random_bags
from tests.support.ranker import mixing, ranker

SAMPLES = 11


@pytest.mark.parametrize(
    ("model", "sizes"),
    [pytest.param(ranker, [4, 4, 3], id="independent"), pytest.param(mixing, [SAMPLES], id="samples meet")],
)
def test_a_large_batch_is_cut_where_samples_are_independent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Callable[[], nn.Module], sizes: list[int]
) -> None:
    random = np.random.default_rng(0)
    widths = {"user": 3, "item": 2} if model is ranker else {}
    dense = {name: random.random((SAMPLES, width), np.float32) for name, width in widths.items()}
    rows = random_bags(random, SUM, SAMPLES), dense
    with Engine.open(export_model(model(), tmp_path / "r", "m", ExportConfig(scores=True))) as engine:
        whole = engine.score(*rows)
        scored_sizes: list[int] = []
        run = DenseProgram._run

        def spy(self: DenseProgram, embeddings: Any, inputs: Any) -> Any:
            scored_sizes.append(len(embeddings))
            return run(self, embeddings, inputs)

        monkeypatch.setattr(DenseProgram, "_run", spy)
        monkeypatch.setattr(dense_program, "POOLED_SLICE", 2)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
        cut = engine.score(*rows)
    assert scored_sizes == sizes
    for name, scores in whole.items():
        np.testing.assert_allclose(cut[name], scores, rtol=1e-5, atol=1e-6)
