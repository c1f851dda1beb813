"""Collections that look nothing up: they answer with what they are told, as TorchRec's answer."""

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
from export.trained.managed import is_sequence


@dataclass(frozen=True, slots=True)
class Columns:
    """The answers of a collection.

    Attributes:
        names: as TorchRec names them.
        features: the feature of each, as the bundle names it.
        keys: the key that each reads.
        dims: the columns of each.
        spans: the columns of each within those of all pooled features side by side, [first, last). Of a collection
            that does not pool, none.
    """

    names: Sequence[str]
    features: Sequence[str]
    keys: Sequence[str]
    dims: Sequence[int]
    spans: Sequence[tuple[int, int]]


Collections = Mapping[nn.Module, Columns]


def keys_of_features(collections: Collections) -> dict[str, str]:
    """The key that each feature reads."""
    return {
        feature: key
        for columns in collections.values()
        for feature, key in zip(columns.features, columns.keys, strict=True)
    }


# What a collection answers to a KJT that it is called with.
Answer = Callable[[nn.Module, Columns, KeyedJaggedTensor], Any]


@contextmanager
def stubbed(collections: Collections, answer: Answer) -> Iterator[None]:
    """Have collections answer with what `answer` says: a KeyedTensor, or JaggedTensors by name."""

    def forward_of(collection: nn.Module, columns: Columns) -> Callable[..., Any]:
        def forward(features: KeyedJaggedTensor, *_: object, **__: object) -> Any:
            found = answer(collection, columns, features)
            return (found, None) if isinstance(collection, BaseManagedCollisionEmbeddingCollection) else found

        return forward

    with ExitStack() as stack:
        for collection, columns in collections.items():
            collection.forward = forward_of(collection, columns)
            stack.callback(delattr, collection, "forward")
        ours = {"concat": staticmethod(RequestKjt.concat), "from_jt_dict": staticmethod(_from_jt_dict)}
        stack.enter_context(patched(KeyedJaggedTensor, **ours, sync=_unsynced))
        yield


def _from_jt_dict(jt_dict: Mapping[str, JaggedTensor]) -> KeyedJaggedTensor:
    """As KeyedJaggedTensor.from_jt_dict, for any number of samples."""
    return kjt_of_bags({key: bag_of(each) for key, each in jt_dict.items()})


def _unsynced(kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """As KeyedJaggedTensor.sync, which counts the ids of each key: it does so when it is asked, too."""
    return kjt


def keyed_tensor(columns: Columns, pooled: Tensor) -> KeyedTensor:
    """The answer of a collection that pools, out of the embeddings of all pooled features, [B, D].

    It is float32, whatever the dtype of the tables, as TorchRec's.
    """
    pieces = [pooled[:, first:last].float() for first, last in joined(columns.spans)]
    return KeyedTensor(
        list(columns.names), list(columns.dims), pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)
    )


def joined(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Neighbouring columns as one span."""
    found: list[tuple[int, int]] = []
    for first, last in spans:
        if found and found[-1][1] == first:
            found[-1] = (found[-1][0], last)
        else:
            found.append((first, last))
    return found


def jagged_tensors(columns: Columns, given: KeyedJaggedTensor, rows: Mapping[str, Tensor]) -> dict[str, JaggedTensor]:
    """The answer of a collection that does not pool: float32, whatever the dtype of its tables.

    Args:
        columns: of the collection.
        given: what it is called with.
        rows: of each feature, floats [n, dim].
    """
    lengths = given.lengths().view(len(given.keys()), -1)
    place = {key: number for number, key in enumerate(given.keys())}
    return {
        name: JaggedTensor(rows[feature].float(), lengths=_lengths_of(given, key, lengths, place))
        for name, feature, key in zip(columns.names, columns.features, columns.keys, strict=True)
    }


def _lengths_of(given: KeyedJaggedTensor, key: str, lengths: Tensor, place: Mapping[str, int]) -> Tensor:
    return given.given[key].lengths if isinstance(given, RequestKjt) else lengths[place[key]]


def zeros_of(collection: nn.Module, columns: Columns, given: KeyedJaggedTensor) -> Any:
    """What a collection would answer, if its rows were zeros."""
    if not is_sequence(collection):
        width = max((last for _, last in columns.spans), default=0)
        return keyed_tensor(columns, torch.zeros(given.stride(), width))
    sizes = {key: len(each.ids) for key, each in bags_of(given).items()}
    features = zip(columns.features, columns.keys, columns.dims, strict=True)
    return jagged_tensors(columns, given, {name: torch.zeros(sizes[k], d) for name, k, d in features})
