"""Traces a forward by torch.fx, with answers of pooling collections as KeyedTensors whose keys and widths are known.

So a forward may loop over keys, and regroup. Only the values are unknown.
"""

import operator
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import fx, nn
from torchrec import KeyedTensor
from torchrec.fx import Tracer
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface, get_embedding_names_by_table
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.mc_embedding_modules import BaseManagedCollisionEmbeddingCollection
from torchrec.modules.regroup import KTRegroupAsDict
from torchrec.sparse.jagged_tensor import _regroup_keyed_tensors

from export.trained.wrapped_collections import inner_of, is_sequence

_POOLING = (
    EmbeddingBagCollectionInterface,
    FeatureProcessedEmbeddingBagCollection,
    BaseManagedCollisionEmbeddingCollection,
)
_SPLITS = (torch.split, torch.functional.split)


def widths_of(collection: Any) -> dict[str, int]:
    """The columns of each answer of a pooling collection, by the name that TorchRec gives it, in its order."""
    configs = inner_of(collection)[1].embedding_bag_configs()
    names = get_embedding_names_by_table(configs)
    return {name: config.embedding_dim for config, of_table in zip(configs, names, strict=True) for name in of_table}


class KeyedTracer(Tracer):  # type: ignore[misc]
    """Traces a forward. Proxies of collections' answers have keys; proxies of split tensors have a length."""

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """The proxy for the result of a node."""
        if (collection := self._collection_of(node)) is not None:
            return _KeyedTensorProxy(node, self, widths_of(collection))
        if (count := _tensor_count(node)) is not None:
            return _TensorsProxy(node, self, count)
        proxy: fx.Proxy = super().proxy(node)
        return proxy

    def call_module(self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Trace a call of a module. KTRegroupAsDict, which reads its first batch, becomes KeyedTensor.regroup."""
        arguments = [*args, *kwargs.values()]
        is_own = type(m).forward is KTRegroupAsDict.forward
        if isinstance(m, KTRegroupAsDict) and is_own and _are_keyed_tensors(arguments):
            groups: Any = KeyedTensor.regroup(*arguments, m._groups)
            return dict(zip(m._keys, m.embedding_cast([groups[n] for n in range(len(m._groups))]), strict=True))
        return super().call_module(m, forward, args, kwargs)

    def _collection_of(self, node: fx.Node) -> nn.Module | None:
        """The pooling collection whose KeyedTensor a node returns, or None."""
        call, is_first_item = node, False
        if node.op == "call_function" and node.target is operator.getitem and node.args[1] == 0:
            call, is_first_item = node.args[0], True  # type: ignore[assignment]
        if not isinstance(call, fx.Node) or call.op != "call_module":
            return None
        module: nn.Module = self.root.get_submodule(str(call.target))
        # A managed collision collection returns a pair: its answer and the remapped ids.
        returns_pair = isinstance(module, BaseManagedCollisionEmbeddingCollection)
        is_pooling = isinstance(module, _POOLING) and not is_sequence(module)
        return module if is_pooling and returns_pair == is_first_item else None


class _KeyedTensorProxy(fx.Proxy):
    """A KeyedTensor that a collection returns. torch.fx traces its other methods, and operators.

    Args:
        node: returns it.
        tracer: traces the forward.
        widths: the number of columns of each key, in the order of the columns.
    """

    def __init__(self, node: fx.Node, tracer: fx.Tracer, widths: Mapping[str, int]) -> None:
        super().__init__(node, tracer)
        self._widths = dict(widths)

    def __getitem__(self, key: str) -> Any:
        """The columns of a key. TorchRec's own code would search for them by name for every request."""
        first = dict(zip(self._widths, self.offset_per_key(), strict=False))[key]
        values: Any = fx.Proxy.__getattr__(self, "values")()
        return torch.narrow(values, 1, first, self._widths[key])

    def keys(self) -> list[str]:  # type: ignore[override]
        return list(self._widths)

    def length_per_key(self) -> list[int]:
        return list(self._widths.values())

    def offset_per_key(self) -> list[int]:
        return [*accumulate(self._widths.values(), initial=0)]

    def key_dim(self) -> int:
        return 1

    def to_dict(self) -> dict[str, fx.Proxy]:
        return {key: self[key] for key in self._widths}


class _TensorsProxy(fx.Proxy):
    """A list or tuple of `count` tensors."""

    def __init__(self, node: fx.Node, tracer: fx.Tracer, count: int) -> None:
        super().__init__(node, tracer)
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[fx.Proxy]:
        return (self[index] for index in range(self._count))  # type: ignore[index]


def _are_keyed_tensors(arguments: Sequence[Any]) -> bool:
    """Whether the only argument of a call is a list of answers of collections."""
    return (
        len(arguments) == 1
        and isinstance(arguments[0], list | tuple)
        and len(arguments[0]) > 0
        and all(isinstance(argument, _KeyedTensorProxy) for argument in arguments[0])
    )


def _tensor_count(node: fx.Node) -> int | None:
    """The number of tensors in the list that a node returns; None if it is unknown, or no list."""
    parts: Any = None
    if node.op == "call_function" and node.target is _regroup_keyed_tensors:
        parts = node.kwargs.get("groups", node.args[-1])
    elif (node.op == "call_method" and node.target == "split") or node.target in _SPLITS:
        parts = next(iter(node.args[1:]), node.kwargs.get("split_size", node.kwargs.get("split_size_or_sections")))
    return len(parts) if isinstance(parts, list | tuple) else None
