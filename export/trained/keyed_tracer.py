"""The answers of pooling collections while torch.fx traces a forward: KeyedTensors with known keys and widths.

So a forward may loop over keys, and regroup. Only the numbers are not known.
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
    return {name: config.embedding_dim for config, each in zip(configs, names, strict=True) for name in each}


class KeyedTracer(Tracer):  # type: ignore[misc]
    """Traces a forward. Answers of collections have keys, and tensors that are cut into pieces have their number."""

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """The proxy for the answer of a step."""
        if (collection := self._answering(node)) is not None:
            return _Keyed(node, self, widths_of(collection))
        if (count := _pieces(node)) is not None:
            return _Pieces(node, self, count)
        found: fx.Proxy = super().proxy(node)
        return found

    def call_module(self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Follow a call of a module. KTRegroupAsDict, which looks at its first batch, is put as TorchRec's function
        that answers the same."""
        given = [*args, *kwargs.values()]
        if isinstance(m, KTRegroupAsDict) and type(m).forward is KTRegroupAsDict.forward and _are_keyed(given):
            pieces = KeyedTensor.regroup(*given, m._groups)
            return dict(zip(m._keys, m.embedding_cast([pieces[n] for n in range(len(m._groups))]), strict=True))
        return super().call_module(m, forward, args, kwargs)

    def _answering(self, node: fx.Node) -> nn.Module | None:
        """The pooling collection whose KeyedTensor a step returns. None: the step returns something else."""
        called, is_first = node, False
        if node.op == "call_function" and node.target is operator.getitem and node.args[1] == 0:
            called, is_first = node.args[0], True  # type: ignore[assignment]
        if not isinstance(called, fx.Node) or called.op != "call_module":
            return None
        module = self.root.get_submodule(str(called.target))
        # Those that remap ids answer with these, too.
        is_pair = isinstance(module, BaseManagedCollisionEmbeddingCollection)
        found: nn.Module = module
        return found if isinstance(module, _POOLING) and not is_sequence(module) and is_pair == is_first else None


class _Keyed(fx.Proxy):
    """A KeyedTensor that a collection returns. torch.fx traces its other methods, and operators.

    Args:
        node: the step.
        tracer: that follows it.
        widths: columns by key, in the order of its numbers.
    """

    def __init__(self, node: fx.Node, tracer: fx.Tracer, widths: Mapping[str, int]) -> None:
        super().__init__(node, tracer)
        self._widths = dict(widths)

    def __getitem__(self, key: str) -> Any:
        """The columns of a key. TorchRec's code would look for them by name whenever a request is scored."""
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


class _Pieces(fx.Proxy):
    """A list or tuple of `count` tensors."""

    def __init__(self, node: fx.Node, tracer: fx.Tracer, count: int) -> None:
        super().__init__(node, tracer)
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[fx.Proxy]:
        return (self[number] for number in range(self._count))  # type: ignore[index]


def _are_keyed(given: Sequence[Any]) -> bool:
    """Whether the only argument of a call is a list of answers of collections."""
    return (
        len(given) == 1
        and isinstance(given[0], list | tuple)
        and len(given[0]) > 0
        and all(isinstance(each, _Keyed) for each in given[0])
    )


def _pieces(node: fx.Node) -> int | None:
    """The number of tensors that a step returns. None: one, or it is not known."""
    cuts: Any = None
    if node.op == "call_function" and node.target is _regroup_keyed_tensors:
        cuts = node.kwargs.get("groups", node.args[-1])
    elif (node.op == "call_method" and node.target == "split") or node.target in _SPLITS:
        cuts = next(iter(node.args[1:]), node.kwargs.get("split_size", node.kwargs.get("split_size_or_sections")))
    return len(cuts) if isinstance(cuts, list | tuple) else None
