"""What a client gets: embeddings, and a description of the model."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from serving.bundle.scores import DenseInput
from serving.request.sequence import Sequence
from serving.request.tensors import Embeddings


class Answer(dict[str, Any]):
    """Pooled embeddings, {feature: [B, dim]}, float32 or float16, in the order asked for.

    For a feature of an EmbeddingCollection it has a `Sequence` instead: a row for each id, not pooled.
    The arrays are read-only views of the response's bytes, or of shared memory.

    Attributes:
        version: the version of the model that gave the whole answer.
    """

    def __init__(self, embeddings: Mapping[str, Embeddings | Sequence], version: int) -> None:
        super().__init__(embeddings)
        self.version = version


class Scores(dict[str, Embeddings]):
    """What a whole model answers, {output: [B, …]}, float32. The arrays are read-only views of the response's bytes.

    Attributes:
        version: the version of the model that gave the whole answer.
    """

    def __init__(self, scores: Mapping[str, Embeddings], version: int) -> None:
        super().__init__(scores)
        self.version = version


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a client needs to know of a served model.

    Attributes:
        dims: dim of each feature's embedding, in the model's default order.
        keys: the keys that requests bring ids for, in the model's default order, each with the features that read it.
        weighted: the keys whose ids have weights.
        output_dtype: float32 or float16.
        contract: a digest. It is equal for versions that answer the same features with the same dims and dtype.
        ids_dtype: of ids as they travel, int64 or int32.
        dense: the inputs that scores need beside ids.
        scores: the shape of each score of a sample, by the name of the output.
        sequences: the features that are answered by a row for each id.
        tables: dim of each table whose rows can be asked for. Models that were exported without it have none.
        takes_once: whether requests may say which features come once. Models that were exported without it do not
            take it.
    """

    dims: dict[str, int]
    keys: dict[str, tuple[str, ...]]
    weighted: tuple[str, ...]
    output_dtype: np.dtype[Any]
    contract: str
    ids_dtype: np.dtype[Any]
    sequences: frozenset[str] = frozenset()
    tables: Mapping[str, int] = field(default_factory=dict)
    dense: tuple[DenseInput, ...] = ()
    scores: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    takes_once: bool = False
