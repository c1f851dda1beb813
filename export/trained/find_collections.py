"""Find the collections of a module that can be served. Modules that change their ids or weights are refused by name.

A collection is served alone: its tables answer the ids of a request. The trained model gives the same answer only if
every module above the collection passes its ids on unchanged (`export.trained.trace_to_collections`).
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from torch import nn
from torchrec.distributed.types import ShardedModule
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingBagCollectionInterface,
    EmbeddingCollection,
    EmbeddingCollectionInterface,
)
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection, FusedEmbeddingCollection
from torchrec.modules.mc_embedding_modules import (
    BaseManagedCollisionEmbeddingCollection,
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)

from export.errors import ModelError
from export.trained.feature_processors import unknown_processors
from export.trained.managed_collision import unknown_managed
from export.trained.model_copy import copy_model
from export.trained.module_paths import dotted, named
from export.trained.trace_to_collections import (
    INSTEAD,
    continues_after_collections,
    expect_plain_call,
    holds_any,
    trace_to_collections,
)
from export.trained.wrapped_collections import inner_of

SERVED = (
    EmbeddingBagCollection,
    FusedEmbeddingBagCollection,
    FeatureProcessedEmbeddingBagCollection,
    ManagedCollisionEmbeddingBagCollection,
    EmbeddingCollection,
    FusedEmbeddingCollection,
    ManagedCollisionEmbeddingCollection,
)
_COLLECTIONS = (
    EmbeddingBagCollectionInterface,
    EmbeddingCollectionInterface,
    FeatureProcessedEmbeddingBagCollection,
    BaseManagedCollisionEmbeddingCollection,
    ShardedModule,
)


@dataclass(frozen=True, slots=True)
class Entry:
    """A module with collections in it that is called from outside. `inputs` counts its required arguments."""

    module: nn.Module
    inputs: int


# The inputs of an entry that is not traced. Not one: it may take more than a KJT.
_UNTRACED_INPUTS = 2


@dataclass(frozen=True, slots=True)
class FoundCollections:
    """The collections of a module, and the parts of the module that are not served.

    Attributes:
        module: a copy of the module, to trace and to run. It shares the module's tables.
        collections: the collections, by their path in the module.
        entries: the modules that a caller calls with ids. A collection that no module wraps is its own entry.
        left_out: the other modules, as "path (class)", and forwards that continue after their collections.
    """

    module: nn.Module
    collections: dict[str, nn.Module]
    entries: tuple[Entry, ...]
    left_out: tuple[str, ...]


def find_collections(module: nn.Module, *, trace: bool = True) -> FoundCollections:
    """Find the collections of `module` that can be served alone.

    Args:
        module: the module.
        trace: whether to trace its forward. `export.capture` traces it instead where there is an example of a call.

    Raises:
        ModelError: the module has no collection; a collection's type, or a module above it, is not supported; or the
            module cannot be copied.
    """
    collections: dict[str, nn.Module] = {}
    for path, collection in _collections("", module):
        if collection not in collections.values():
            collections[path] = collection
    if not collections:
        raise ModelError(
            f"{type(module).__name__}: expected an EmbeddingBagCollection or EmbeddingCollection in it, found none"
        )
    for path, collection in collections.items():
        _check_collection(named(path, collection), collection)
    module = copy_model(module, collections.values())
    collections = {path: module.get_submodule(path) for path in collections}
    entries, left_out = [], []
    if not trace:
        forwards = () if module in collections.values() else (_rest_of_forward(module),)
        return FoundCollections(module, collections, (Entry(module, _UNTRACED_INPUTS),), forwards)
    for path, entry in _entries("", module, collections.values()):
        if entry in collections.values():
            entries.append(Entry(entry, 1))
            continue
        graph = trace_to_collections(path, entry, collections.values())
        inputs = [node for node in graph.nodes if node.op == "placeholder" and not node.args]
        entries.append(Entry(entry, len(inputs)))
        if continues_after_collections(graph):
            left_out.append(_rest_of_forward(entry))
    left_out += _modules_without("", module, collections.values())
    return FoundCollections(module, collections, tuple(entries), tuple(left_out))


def _rest_of_forward(module: nn.Module) -> str:
    return f"{type(module).__name__}.forward after its collections"


def _collections(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules that look up rows by the ids of a KJT, with their paths."""
    if isinstance(module, _COLLECTIONS):
        yield path, module
        return
    for name, child in module.named_children():
        yield from _collections(dotted(path, name), child)


def _check_collection(where: str, collection: nn.Module) -> None:
    """Refuse a collection whose answers may differ from lookups in its tables."""
    if isinstance(collection, ShardedModule):
        raise ModelError(
            f"{where}: is sharded over processes: give the unsharded module, and its weights as a folder of "
            "torch.distributed.checkpoint"
        )
    served = [kind for kind in SERVED if isinstance(collection, kind)]
    if not served or type(collection).forward is not served[0].forward:
        names = " or ".join(kind.__name__ for kind in SERVED)
        raise ModelError(f"{where}: expected {names}: other kinds are not served yet: export a module without it")
    if isinstance(collection, FeatureProcessedEmbeddingBagCollection):
        _check_processed(where, collection)
    if isinstance(collection, BaseManagedCollisionEmbeddingCollection):
        _check_managed(where, collection)
    if isinstance(collection, EmbeddingCollectionInterface) and collection.need_indices():
        raise ModelError(
            f"{where}: need_indices: expected False, since answers hold no ids: make the collection without it"
        )
    for path, part in collection.named_modules():
        if type(part) is not nn.ParameterDict:  # it is never called: its __call__ raises
            expect_plain_call(dotted(where, path), part)
        kind = next((kind for kind in (nn.EmbeddingBag, nn.Embedding) if isinstance(part, kind)), None)
        if kind is not None and (type(part) is not kind or part.max_norm is not None or part.padding_idx is not None):
            raise ModelError(
                f"{where}: {path}: expected a plain nn.{kind.__name__}, without max_norm and padding_idx: {INSTEAD}"
            )


def _check_processed(where: str, collection: FeatureProcessedEmbeddingBagCollection) -> None:
    """Refuse feature processors that do more than weigh ids by position, and check the collection after them."""
    for path, module, why in unknown_processors(collection):
        raise ModelError(
            f"{where}: {named(path, module)}: {why}: other feature processors are not served: export a module "
            "without them"
        )
    path, inner = inner_of(collection)
    _check_collection(f"{where}: {path}", inner)


def _check_managed(where: str, collection: BaseManagedCollisionEmbeddingCollection) -> None:
    """Refuse managed collision modules that are not reproduced exactly, and check the collection inside."""
    for path, module, why in unknown_managed(collection):
        raise ModelError(f"{where}: {named(path, module)}: {why}: not supported: {INSTEAD}")
    path, inner = inner_of(collection)
    _check_collection(f"{where}: {path}", inner)


def _entries(path: str, module: nn.Module, collections: Collection[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules with a forward and collections, and their paths. Only containers hold these modules."""
    if not holds_any(module, collections):
        return
    if type(module).forward is not nn.Module.forward or "forward" in vars(module):
        yield path, module
        return
    for name, child in module.named_children():
        yield from _entries(dotted(path, name), child, collections)


def _modules_without(path: str, module: nn.Module, collections: Collection[nn.Module]) -> Iterator[str]:
    """The outermost modules without collections."""
    if module in collections:
        return
    if not holds_any(module, collections):
        yield named(path, module)
        return
    for name, child in module.named_children():
        yield from _modules_without(dotted(path, name), child, collections)
