"""Modules with an EmbeddingCollection, whose features are answered by a row for each id."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

from tests.support.models import Bags, Spec, collection, flat, randomized

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
        found = answer[(names or {}).get(name, name)]
        np.testing.assert_array_equal(found.values, jagged.values().numpy(), err_msg=name)
        np.testing.assert_array_equal(found.lengths, jagged.lengths().numpy(), err_msg=name)
        for sample, rows in enumerate(jagged.to_dense()):
            np.testing.assert_array_equal(found.rows(sample), rows.numpy())
