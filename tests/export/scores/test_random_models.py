"""Whole models made at random, against themselves as TorchRec runs them."""

import os
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor, KeyedTensor
from torchrec.modules.embedding_modules import get_embedding_names_by_table
from torchrec.modules.regroup import KTRegroupAsDict

from export import export_model
from export.config import ExportConfig
from export.prepare import describe
from export.scores.dense_part import compile_dense_part
from export.trained.checkpoint import Checkpoint, module_weights
from export.trained.tables import collect_tables
from serving.client import LookupClient, Retries
from serving.engine import Engine
from serving.server import run_server
from tests.support.long_cases import one_in
from tests.support.models import Spec, collection, flat, random_bags
from tests.support.scored_models import EXACT, own_scores
from tests.support.servers import FREE, at_once

KEYS = ("a", "b", "c", "d", "e")
# Real Tritons are slow to start: so many models are served, all by one.
SERVED = 4
# RANDOM_MODELS=200 makes more of them.
MORE = int(os.environ.get("RANDOM_MODELS", "24"))


class Random(nn.Module):
    """One to three collections, whose tables share keys; what is behind them is drawn, too."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        random = np.random.default_rng(seed)
        self.specs: list[tuple[Spec, ...]] = []
        for number in range(random.integers(1, 4)):
            specs = []
            for table in range(random.integers(1, 4)):
                keys = tuple(random.choice(KEYS, size=random.integers(1, 4), replace=False).tolist())
                dim = 4 * int(random.integers(1, 9))
                pooling = str(random.choice(["SUM", "MEAN"]))
                specs.append(Spec(f"t{number}{table}", int(random.integers(5, 60)), dim, pooling, keys))
            self.specs.append(tuple(specs))
        parts = [collection(specs, seed=seed + n) for n, specs in enumerate(self.specs)]
        self.parts = nn.ModuleList(parts)
        by_table = [get_embedding_names_by_table(part.embedding_bag_configs()) for part in parts]
        self.names = [list(chain.from_iterable(output)) for output in by_table]
        widths = [sum(spec.dim * len(spec.features) for spec in specs) for specs in self.specs]
        self.towers = nn.ModuleList(nn.Sequential(nn.Linear(width, 6), nn.ReLU()) for width in widths)
        self.kind = int(random.integers(4))
        self.dense = nn.Linear(int(random.integers(1, 5)), 6)
        self.norm = nn.BatchNorm1d(6)
        self.over = nn.Linear(6, 3)
        self.reads = int(random.integers(4))
        # One for each collection: names of answers may be the same in several.
        self.regroups = nn.ModuleList(KTRegroupAsDict([names[:1], names], ["some", "all"]) for names in self.names)

    def forward(self, ids: KeyedJaggedTensor, numbers: Tensor) -> Any:
        out = self.dense(numbers)
        for number, (part, tower) in enumerate(zip(self.parts, self.towers, strict=True)):
            out = out + tower(self.rows_of(part(ids), number))
        logits = self.over(self.norm(out))
        if self.kind == 0:
            return logits
        if self.kind == 1:
            return logits[:, 0], logits[:, 1:].sigmoid()
        if self.kind == 2:
            return {"click": logits[:, :1], "buy": logits[:, 1], "all": logits.reshape(-1, 3, 1)}
        return torch.einsum("bi,bj->bij", logits, out)

    def rows_of(self, pooled: KeyedTensor, number: int) -> Tensor:
        values: Tensor = pooled.values()
        if self.reads == 0:
            return values
        if self.reads == 1:
            return torch.cat([pooled[name] for name in self.names[number]], dim=1)
        if self.reads == 2:
            return torch.cat([pooled[key] / (1 + index) for index, key in enumerate(pooled.keys())], dim=1)
        answered_scores: Tensor = self.regroups[number]([pooled])["all"]
        return answered_scores

    def request(self, random: np.random.Generator, samples: int) -> tuple[dict[str, Any], dict[str, Any]]:
        bags: dict[str, Any] = {}
        rows: dict[str, Spec] = {}
        for specs in self.specs:
            for spec in specs:
                for key in spec.features:
                    if key not in rows or spec.rows < rows[key].rows:
                        rows[key] = spec
        for key, spec in rows.items():
            bags |= random_bags(random, [Spec("t", spec.rows, 4, "SUM", (key,))], samples)
        return bags, {"numbers": random.random((samples, self.dense.in_features), np.float32)}


def assert_same(answered_scores: Any, expected: Any) -> None:
    assert list(answered_scores) == list(expected)
    for name, numbers in expected.items():
        assert answered_scores[name].shape == numbers.shape
        scale = max(1, float(np.abs(numbers).max(initial=0)))
        np.testing.assert_allclose(answered_scores[name], numbers, rtol=0, atol=2e-6 * scale)


@pytest.mark.long
def test_random_models_are_served_with_their_own_answers(tmp_path: Path) -> None:
    """In process, and over gRPC, all requests at once, so that they are merged."""
    random = np.random.default_rng(0)
    models = {f"m{seed}": Random(seed).eval() for seed in range(SERVED)}
    requests = []
    for name, module in models.items():
        engine = Engine.open(export_model(module, tmp_path / "r", name, EXACT))
        for samples in (1, 3, 17):
            bags, dense = module.request(random, samples)
            requests.append((name, bags, dense, own_scores(module, bags, dense)))
            assert_same(engine.score(bags, dense), requests[-1][-1])
    with run_server(tmp_path / "r", FREE, log=tmp_path / "log") as server:
        clients = {name: LookupClient(server.grpc, name, 60, retries=Retries(attempts=1)) for name in models}
        for client in clients.values():
            client.info()
        answered_scores = at_once(
            [partial(clients[name].score, bags, dense) for name, bags, dense, _ in 3 * requests]
        )
        for client in clients.values():
            client.close()
    for answer, (_, _, _, expected) in zip(answered_scores, 3 * requests, strict=True):
        assert_same(answer, expected)


def checkpoint(weights: Checkpoint) -> Checkpoint:
    return weights


@pytest.mark.parametrize("seeds", one_in(50, (range(first, first + 4) for first in range(SERVED, SERVED + MORE, 4))))
def test_random_dense_parts_answer_as_the_model_does(seeds: range) -> None:
    """Given the embeddings that the model itself makes."""
    random = np.random.default_rng(seeds[0])
    for seed in seeds:
        module = Random(seed).eval()
        trained = collect_tables(module)
        weights = module_weights(module, trained.tables)
        manifest = describe(trained.tables, EXACT, partial(checkpoint, weights))
        scored = compile_dense_part(trained, manifest, {}, ExportConfig(scores=True))
        bags, dense = module.request(random, 9)
        values, lengths = flat(bags)
        ids = KeyedJaggedTensor(list(bags), torch.from_numpy(values), lengths=torch.from_numpy(lengths))
        rows: dict[str, Tensor] = {}
        with torch.no_grad():
            for path, tables in trained.by_collection.items():
                names = [name for table in tables for name in table.features]
                answered = module.get_submodule(path)(ids)
                rows |= dict(zip(names, answered.values().split(answered.length_per_key(), dim=1), strict=True))
            together = torch.cat([rows[feature.name] for feature in manifest.features], dim=1)
            answered_scores = scored.formats.forward(together, torch.from_numpy(dense["numbers"]))
        served = {
            output.name: tensor.numpy() for output, tensor in zip(scored.part.outputs, answered_scores, strict=True)
        }
        assert_same(served, own_scores(module, bags, dense))
        assert not scored.part.mixes_samples
