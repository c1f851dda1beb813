"""Modules with an EmbeddingCollection, whose features are answered by a row for each id."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

from export import ExportConfig, WeightDtype
from serving.client import JaggedRows
from serving.errors import InvalidRequest
from tests.support.models import Bags, Spec, collection, flat, random_bags, randomized
from tests.support.servers import at_once

POOLED = (Spec("user", 500, 16, "SUM", ("user_id",)), Spec("genre", 20, 8, "MEAN", ("genres",)))
ROWS = (Spec("item", 300, 32, "NONE", ("recent", "seen")), Spec("word", 1000, 32, "NONE", ("words",)))


def sequences(specs: Sequence[Spec] = ROWS, *, seed: int = 0, need_indices: bool = False) -> EmbeddingCollection:
    torch.manual_seed(seed)
    ec = EmbeddingCollection(
        tables=[
            EmbeddingConfig(
                name=spec.name,
                num_embeddings=spec.rows,
                embedding_dim=spec.dim,
                feature_names=list(spec.features),
            )
            for spec in specs
        ],
        need_indices=need_indices,
    )
    return randomized(ec)


class Mixed(nn.Module):
    """What is pooled beside what is not, as models of sequences have it."""

    def __init__(self, pooled: Sequence[Spec] = POOLED, rows: Sequence[Spec] = ROWS, *, seed: int = 0) -> None:
        super().__init__()
        self.pooled = collection(pooled, seed=seed)
        self.rows = sequences(rows, seed=seed + 1)

    def forward(self, kjt: KeyedJaggedTensor) -> tuple[Any, Any]:
        return self.pooled(kjt), self.rows(kjt)


def mixed() -> Mixed:
    """For `--model`."""
    return Mixed()


def kjt_of(bags: Mapping[str, Bags]) -> KeyedJaggedTensor:
    values, lengths = flat(bags)
    return KeyedJaggedTensor.from_lengths_sync(list(bags), torch.from_numpy(values), torch.from_numpy(lengths))


def assert_rows(answer: Any, module: EmbeddingCollection, bags: Mapping[str, Bags], names: Any = None) -> None:
    """That the features of an answer are what the collection itself answers, run by TorchRec.

    Args:
        answer: of an engine or a client; other features may be in it.
        module: the collection.
        bags: the request.
        names: what the answer calls the features of `module`, where that is not as `module` does.
    """
    with torch.no_grad():
        expected = module(kjt_of(bags))
    for name, jagged in expected.items():
        answered = answer[(names or {}).get(name, name)]
        np.testing.assert_array_equal(answered.values, jagged.values().numpy(), err_msg=name)
        np.testing.assert_array_equal(answered.lengths, jagged.lengths().numpy(), err_msg=name)
        for sample, rows in enumerate(jagged.to_dense()):
            np.testing.assert_array_equal(answered.rows(sample), rows.numpy())


FP32 = ExportConfig(dtype={"*": WeightDtype.FP32})
SPECS = (*POOLED, *ROWS)


def assert_mixed(answer: Any, module: Mixed, bags: Mapping[str, Bags]) -> None:
    """That an answer is what both collections of a module answer to the same request."""
    assert {len(values) for values in answer.values()} == {len(next(iter(bags.values())))}
    if not any(bags.values()):  # without samples, TorchRec's KJT cannot be taken apart
        return
    with torch.no_grad():
        expected = module.pooled(kjt_of(bags)).to_dict()
    for name, rows in expected.items():
        np.testing.assert_allclose(answer[name], rows, rtol=1e-6, atol=4e-6, err_msg=name)
    assert_rows(answer, module.rows, bags)


def check_together(lookup: Callable[[Any], Any], module: Mixed) -> None:
    """Requests of all kinds at once; those that are wrong are refused, and hurt nobody."""
    random = np.random.default_rng(3)
    requests = [random_bags(random, SPECS, number % 7, longest=9) for number in range(48)]
    some = [
        {key: requests[5][key] for key in keys} for keys in (("words", "user_id"), ("recent",), ("genres", "seen"))
    ]
    wrong = [{"words": [[1], [1000]]}, {"genres": [[20]], "recent": [[1]]}, {"seen": [[-1]]}, {"nothing": [[1]]}] * 3
    answers = at_once([partial(lookup, request) for request in [*requests, *some, *wrong]])
    for request, answer in zip(requests, answers, strict=False):
        assert_mixed(answer, module, request)
    for request, answer in zip(some, answers[48:51], strict=True):
        whole = answers[5]
        assert list(answer) == list(request)
        for name, value in answer.items():
            right = whole[name]
            pairs = [(value.values, right.values)] if isinstance(value, JaggedRows) else [(value, right)]
            for ours, expected in pairs:
                np.testing.assert_array_equal(ours, expected)
    for refused in answers[51:]:
        assert isinstance(refused, InvalidRequest), refused
