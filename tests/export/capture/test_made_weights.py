"""Weights that come as JaggedTensors beside ids, of which the forward makes one KeyedJaggedTensor: they are the weights
of a request, whatever its lengths; and what the forward changes of them is refused.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchrec import JaggedTensor, KeyedJaggedTensor

from export import export_model
from export.errors import ModelError
from serving.engine import Engine
from serving.requests.accept import accept
from serving.requests.encoding import encode
from tests.support.long_cases import one_in
from tests.support.models import Spec, collection
from tests.support.module_calls import answer_of_call, assert_close
from tests.support.scored_models import EXACT

KEYS = ("film", "shop")
SPECS = tuple(Spec(key, 40, 8, "SUM", (key,)) for key in KEYS)


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bags, self.top = collection(SPECS, weighted=True), nn.Linear(16, 1)

    def scored(self, ids: KeyedJaggedTensor, weights: list[Tensor]) -> Tensor:
        weighted = KeyedJaggedTensor(ids.keys(), ids.values(), torch.cat(weights), ids.lengths())
        answer: Tensor = self.top(self.bags(weighted).values())
        return answer


class Beside(Weighted):
    def forward(self, ids: KeyedJaggedTensor, film_weights: JaggedTensor, shop_weights: JaggedTensor) -> Tensor:
        return self.scored(ids, [film_weights.values(), shop_weights.values()])


class AlsoSummed(Weighted):
    """The weights are numbers of the dense part, too."""

    def forward(self, ids: KeyedJaggedTensor, film_weights: JaggedTensor, shop_weights: JaggedTensor) -> Tensor:
        total = film_weights.to_padded_dense(6).sum(1, keepdim=True)
        answer: Tensor = self.scored(ids, [film_weights.values(), shop_weights.values()]) + total
        return answer


class Swapped(Weighted):
    """What the example has alike is of the other key."""

    def forward(self, ids: KeyedJaggedTensor, film_weights: JaggedTensor, shop_weights: JaggedTensor) -> Tensor:
        return self.scored(ids, [shop_weights.values(), film_weights.values()])


class Scaled(Weighted):
    def forward(self, ids: KeyedJaggedTensor, film_weights: JaggedTensor, shop_weights: JaggedTensor) -> Tensor:
        return self.scored(ids, [film_weights.values() * 1.0, shop_weights.values() + 0.0])


def drawn(samples: int, seed: int = 0) -> dict[str, Any]:
    random = np.random.default_rng((seed, samples))
    result: dict[str, Any] = {}
    for key in KEYS:
        lengths = random.integers(0, 5, samples, dtype=np.int32)
        ids, weights = random.integers(0, 40, lengths.sum()), random.random(lengths.sum(), np.float32)
        result[key] = {"values": ids, "lengths": lengths, "weights": weights}
    return result


def call_of(features: dict[str, Any]) -> tuple[Any, ...]:
    parts = {
        name: [torch.from_numpy(features[key][name]) for key in KEYS] for name in ("values", "lengths", "weights")
    }
    keyed = KeyedJaggedTensor([*KEYS], torch.cat(parts["values"]), lengths=torch.cat(parts["lengths"]))
    pairs = zip(parts["weights"], parts["lengths"], strict=True)
    return keyed, *(JaggedTensor(weights, lengths=lengths) for weights, lengths in pairs)


@pytest.mark.parametrize("kind", one_in(2, [AlsoSummed, Beside]))
def test_weights_in_separate_jagged_tensors_come_from_the_request(kind: type[Weighted], tmp_path: Path) -> None:
    """Alone and merged."""
    module = kind().eval()
    bundle = export_model(module, tmp_path / "r", "m", EXACT, example=call_of(drawn(6)))
    with Engine.open(bundle) as engine:
        part = engine.bundle.manifest.dense_part
        assert part is not None
        assert (part.inputs, part.together, part.mixed_by) == ((), (), None)
        nothing = np.zeros(0, np.float32)
        empty = {
            key: {"values": nothing.astype(int), "lengths": np.zeros(2, np.int32), "weights": nothing} for key in KEYS
        }
        requests = [drawn(1, 1), drawn(3, 2), drawn(11, 3), empty]
        expected = [answer_of_call(module, call_of(features)) for features in requests]
        for features, right in zip(requests, expected, strict=True):
            assert_close(engine.score(features), right)
        tensors = [replace(encode(features, KEYS), outputs=["scores"]) for features in requests]
        merged = engine.answer([accept(engine.schema, tensor) for tensor in tensors]).outcomes()
        for result, right in zip(merged, expected, strict=True):
            assert isinstance(result, Mapping), result
            assert_close(result, right)


@pytest.mark.parametrize("kind", one_in(2, [Swapped, Scaled]))
def test_changed_weights_and_weights_of_another_key_are_refused(kind: type[Weighted], tmp_path: Path) -> None:
    features = drawn(6)
    features["shop"] = {**features["film"], "values": features["film"]["values"][::-1].copy()}  # the same weights
    with pytest.raises(ModelError, match=r"at .*test_made_weights.py, line "):
        export_model(kind().eval(), tmp_path / "r", "m", EXACT, example=call_of(features))
    assert not (tmp_path / "r" / "m").exists()
