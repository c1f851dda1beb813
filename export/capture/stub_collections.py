"""Stubs for collections: they look nothing up, and return given embeddings in the form of TorchRec's answers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchrec import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from torchrec.modules.mc_embedding_modules import BaseManagedCollisionEmbeddingCollection

from export.capture.bags import RequestKjt, bag_of, bags_of, kjt_of_bags
from export.capture.model_files import patched
from export.trained.wrapped_collections import is_sequence


@dataclass(frozen=True, slots=True)
class Columns:
    """The answers of a collection.

    Attributes:
        names: of the answers, as TorchRec names them.
        features: the feature of each answer, as the bundle names it.
        keys: the key that each answer is looked up for.
        dims: the number of columns of each answer.
        spans: the columns of each answer among those of all pooled features side by side, [first, last). Empty for a
            collection that does not pool.
    """

    names: Sequence[str]
    features: Sequence[str]
    keys: Sequence[str]
    dims: Sequence[int]
    spans: Sequence[tuple[int, int]]


Collections = Mapping[nn.Module, Columns]


def keys_of_features(collections: Collections) -> dict[str, str]:
    """The key of each feature."""
    return {
        feature: key
        for columns in collections.values()
        for feature, key in zip(columns.features, columns.keys, strict=True)
    }


# What a collection answers to a KJT that it is called with.
Answer = Callable[[nn.Module, Columns, KeyedJaggedTensor], Any]


@contextmanager
def stubbed(collections: Collections, answer: Answer) -> Iterator[None]:
    """In the block, collections return what `answer` returns: a KeyedTensor, or JaggedTensors by name."""

    def forward_of(collection: nn.Module, columns: Columns) -> Callable[..., Any]:
        def forward(features: KeyedJaggedTensor, *_: object, **__: object) -> Any:
            result = answer(collection, columns, features)
            return (result, None) if isinstance(collection, BaseManagedCollisionEmbeddingCollection) else result

        return forward

    with ExitStack() as stack:
        for collection, columns in collections.items():
            collection.forward = forward_of(collection, columns)
            stack.callback(delattr, collection, "forward")
        static = {"concat": staticmethod(RequestKjt.concat), "from_jt_dict": staticmethod(_from_jt_dict)}
        # `sync` counts ids by key, and torch.export does not know the counts. A KJT counts them when it needs them.
        stack.enter_context(patched(KeyedJaggedTensor, **static, sync=lambda kjt: kjt))
        yield


def _from_jt_dict(jt_dict: Mapping[str, JaggedTensor]) -> KeyedJaggedTensor:
    """As KeyedJaggedTensor.from_jt_dict, for any number of samples."""
    return kjt_of_bags({key: bag_of(jagged) for key, jagged in jt_dict.items()})


def keyed_tensor(columns: Columns, pooled: Tensor) -> KeyedTensor:
    """The answer of a collection that pools, from the embeddings of all pooled features, [B, D].

    It is float32 for tables of any dtype, as in TorchRec.
    """
    pieces = [pooled[:, first:last].float() for first, last in merge_spans(columns.spans)]
    return KeyedTensor(
        list(columns.names), list(columns.dims), pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)
    )


def merge_spans(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans of columns, with neighbours merged into one."""
    merged: list[tuple[int, int]] = []
    for first, last in spans:
        if merged and merged[-1][1] == first:
            merged[-1] = (merged[-1][0], last)
        else:
            merged.append((first, last))
    return merged


def jagged_tensors(columns: Columns, kjt: KeyedJaggedTensor, rows: Mapping[str, Tensor]) -> dict[str, JaggedTensor]:
    """The answer of a collection that does not pool: float32 for tables of any dtype.

    Args:
        columns: of the collection.
        kjt: its argument.
        rows: of each feature, floats [n, dim].
    """
    lengths = kjt.lengths().view(len(kjt.keys()), -1)
    index_of_key = {key: index for index, key in enumerate(kjt.keys())}

    def lengths_of(key: str) -> Tensor:
        return kjt.bags[key].lengths if isinstance(kjt, RequestKjt) else lengths[index_of_key[key]]

    return {
        name: JaggedTensor(rows[feature].float(), lengths=lengths_of(key))
        for name, feature, key in zip(columns.names, columns.features, columns.keys, strict=True)
    }


def zeros_of(collection: nn.Module, columns: Columns, kjt: KeyedJaggedTensor) -> Any:
    """The answer of a collection whose rows are zeros."""
    if not is_sequence(collection):
        width = max((last for _, last in columns.spans), default=0)
        return keyed_tensor(columns, torch.zeros(kjt.stride(), width))
    sizes = {key: len(bag.ids) for key, bag in bags_of(kjt).items()}
    features = zip(columns.features, columns.keys, columns.dims, strict=True)
    return jagged_tensors(columns, kjt, {feature: torch.zeros(sizes[key], dim) for feature, key, dim in features})
