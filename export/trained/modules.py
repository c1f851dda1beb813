"""Find the collections of a module that can be served. Whatever changes their ids or weights is refused by name.

A collection is served alone: its tables answer the ids of a request. The trained model answers the same only if every
module above the collection hands on its ids unchanged. So torch.fx follows the forward of each module above; calls of
all other modules are one step each. The argument of the collection must be an input of the model, or keys selected
from one.
"""

import operator
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import fx, nn
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

from export.errors import ModelError, first_line
from export.quiet import quiet
from export.trained.copied import copied
from export.trained.inner import inner_of
from export.trained.keyed import KeyedTracer
from export.trained.lines import line_of_error
from export.trained.managed import unknown_managed
from export.trained.processors import unknown_processors

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
# What may be done to an input on the way: choose parts of it, or move it to a device. The ids stay the same.
_SELECTING_METHODS = ("split", "permute", "to")
_SELECTING_FUNCTIONS = (operator.getitem, getattr)
_CHANGING_FUNCTIONS = (operator.setitem, setattr)
_VIEWS = ("detach", "view", "t", "transpose", "select", "narrow", "view_as", "expand", "squeeze", "unsqueeze")
_INSTEAD = "export the collection itself, if the ids of your requests are what it is to look up"


@dataclass(frozen=True, slots=True)
class Entry:
    """A module with collections in it that is called from outside. `inputs` counts its required arguments."""

    module: nn.Module
    inputs: int


@dataclass(frozen=True, slots=True)
class Found:
    """The collections of a module, and the parts of the module that are not served.

    Attributes:
        module: a copy of the module, which may be followed and run. Its tables are those of the module.
        collections: the collections, by their path in the module.
        entries: the modules that are called with ids. A collection that no module wraps is its own entry.
        left_out: the modules beside the collections, as "path (class)", and forwards that go on after them.
    """

    module: nn.Module
    collections: dict[str, nn.Module]
    entries: tuple[Entry, ...]
    left_out: tuple[str, ...]


def find_collections(module: nn.Module) -> Found:
    """Find the collections of `module` that can be served alone.

    Raises:
        ModelError: there is none; or one is of a kind, or behind a module, that is not known to be served right; or
            the module cannot be copied.
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
        _check_collection(_named(path, collection), collection)
    module = copied(module, collections.values())
    collections = {path: module.get_submodule(path) for path in collections}
    entries, left_out = [], []
    for path, entry in _entries("", module, collections.values()):
        if entry in collections.values():
            entries.append(Entry(entry, 1))
            continue
        graph = _followed(path, entry, collections.values())
        inputs = [node for node in graph.nodes if node.op == "placeholder" and not node.args]
        entries.append(Entry(entry, len(inputs)))
        if _goes_on(graph):
            left_out.append(f"{type(entry).__name__}.forward behind its collections")
    left_out += _beside("", module, collections.values())
    return Found(module, collections, tuple(entries), tuple(left_out))


def _collections(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules that look up rows by the ids of a KJT, with their paths."""
    if isinstance(module, _COLLECTIONS):
        yield path, module
        return
    for name, child in module.named_children():
        yield from _collections(dotted(path, name), child)


def _check_collection(where: str, collection: nn.Module) -> None:
    """Refuse a collection that may answer otherwise than its tables say."""
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
            f"{where}: need_indices: expected False: answers hold no ids, which whoever asks has: make it without"
        )
    for path, part in collection.named_modules():
        if type(part) is not nn.ParameterDict:  # it is never called: its __call__ raises
            _check_untouched(dotted(where, path), part)
        kind = next((kind for kind in (nn.EmbeddingBag, nn.Embedding) if isinstance(part, kind)), None)
        if kind is not None and (type(part) is not kind or part.max_norm is not None or part.padding_idx is not None):
            raise ModelError(
                f"{where}: {path}: expected a plain nn.{kind.__name__}, without max_norm and padding_idx: {_INSTEAD}"
            )


def _check_processed(where: str, collection: FeatureProcessedEmbeddingBagCollection) -> None:
    """Refuse feature processors that do anything but weigh ids by position, and a collection behind them."""
    for path, module, why in unknown_processors(collection):
        raise ModelError(
            f"{where}: {_named(path, module)}: {why}: other feature processors are not served: export a module "
            "without them"
        )
    path, inner = inner_of(collection)
    _check_collection(f"{where}: {path}", inner)


def _check_managed(where: str, collection: BaseManagedCollisionEmbeddingCollection) -> None:
    """Refuse managed collision modules that are not known to be reproduced, and a collection behind them."""
    for path, module, why in unknown_managed(collection):
        raise ModelError(
            f"{where}: {path} ({type(module).__name__}): {why}: it is not known to be served right: {_INSTEAD}"
        )
    path, inner = inner_of(collection)
    _check_collection(f"{where}: {path}", inner)


def _check_untouched(where: str, module: nn.Module) -> None:
    """Refuse a module whose call is more than the forward of its class."""
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    if hooks or "forward" in vars(module) or type(module).__call__ is not nn.Module.__call__:
        raise ModelError(
            f"{where}: has a hook, or a forward of its own, which may change what is looked up: remove it"
        )


def _entries(path: str, module: nn.Module, collections: Collection[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules with a forward and collections, and their paths. Only containers are around them."""
    if not _holds(module, collections):
        return
    if type(module).forward is not nn.Module.forward or "forward" in vars(module):
        yield path, module
        return
    for name, child in module.named_children():
        yield from _entries(dotted(path, name), child, collections)


def _followed(path: str, entry: nn.Module, collections: Collection[nn.Module]) -> fx.Graph:
    """Follow the forward of `entry`, and check that every collection gets inputs of `entry` unchanged.

    A forward that cannot be followed to its end is followed as far as possible. All collections must be called by
    then.

    Returns:
        The graph, as far as it was followed.

    Raises:
        ModelError: a collection gets something else, or is not reached.
    """
    above = [part for part in entry.modules() if _holds(part, collections) and part not in collections]
    for part in above:
        _check_untouched(_named(path, part), part)
    tracer = _Tracer(above)
    reason = "it returns before"
    with evaluating(entry), quiet():
        try:
            tracer.trace(entry)
        except Exception as error:  # the user's code may raise anything
            reason = f"{first_line(error)}{line_of_error(error)}"
    calls = {node: entry.get_submodule(str(node.target)) for node in tracer.graph.nodes if node.op == "call_module"}
    for call, called in calls.items():
        if called in collections:
            _check_given(path, entry, call, above)
    for node in tracer.graph.nodes:
        if node.op == "get_attr" and _is_written(node):
            raise ModelError(
                f"{_named(path, entry)}: its forward writes to {node.target!r}, which lookups would not see: "
                f"{_INSTEAD}"
            )
    for name, part in entry.named_modules():
        if part in collections and part not in calls.values():
            raise ModelError(
                f"{_named(path, entry)}: its forward cannot be followed to the collection {name!r} ({reason}), so "
                f"that what it does to ids is not known: {_INSTEAD}"
            )
    graph: fx.Graph = tracer.graph
    return graph


class _Tracer(KeyedTracer):
    """Follows the modules above collections. A call of any other module is one step."""

    def __init__(self, above: Iterable[nn.Module]) -> None:
        super().__init__()
        self._above = set(above)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:  # noqa: ARG002
        return m not in self._above


def _check_given(path: str, entry: nn.Module, call: fx.Node, above: Collection[nn.Module]) -> None:
    """Refuse a call of a collection whose argument is no input of `entry`, or an input that may have been changed."""
    given: Any = call.args[0] if call.args else next(iter(call.kwargs.values()), None)
    while isinstance(given, fx.Node) and selects(given):
        given = given.args[0]
    if not isinstance(given, fx.Node) or given.op != "placeholder" or _is_changed(given):
        blamed = entry
        for module_path in _stack(given if isinstance(given, fx.Node) else call):
            part = entry.get_submodule(module_path)
            blamed = part if part in above else blamed
        raise ModelError(
            f"{_named(_path_of(entry, blamed, path), blamed)}: gives the collection {call.target!r} other ids or "
            f"weights than it is given itself: this is not served: {_INSTEAD}"
        )


def selects(node: fx.Node) -> bool:
    """Whether a step of a graph chooses among ids, or moves them, and does not change them."""
    if node.op == "call_method":
        return node.target in _SELECTING_METHODS
    return node.op == "call_function" and node.target in _SELECTING_FUNCTIONS


def _is_changed(node: fx.Node) -> bool:
    """Whether `node`, or a value made of it other than by a module, is changed in place."""
    for user in node.users:
        name = str(user.target)
        in_place = user.op == "call_method" and name.endswith("_") and not name.endswith("__")
        if in_place or user.target in _CHANGING_FUNCTIONS:
            return True
        if user.op != "call_module" and _is_changed(user):
            return True
    return False


def _is_written(node: fx.Node) -> bool:
    """Whether a tensor, or a view of it, is changed in place."""
    for user in node.users:
        name, is_method = str(user.target), user.op == "call_method"
        if user.args[:1] == (node,) and (
            user.target in _CHANGING_FUNCTIONS or (is_method and name.endswith("_") and not name.endswith("__"))
        ):
            return True
        is_view = user.target in (operator.getitem, getattr) or (is_method and name in _VIEWS)
        if is_view and _is_written(user):
            return True
    return False


def _goes_on(graph: fx.Graph) -> bool:
    """Whether the forward does anything with what its collections answer."""
    calls = [node for node in graph.nodes if node.op == "call_module"]
    return any(user.op != "output" for call in calls for user in call.users) or not any(
        node.op == "output" for node in graph.nodes
    )


def _beside(path: str, module: nn.Module, collections: Collection[nn.Module]) -> Iterator[str]:
    """The outermost modules without collections."""
    if module in collections:
        return
    if not _holds(module, collections):
        yield f"{path} ({type(module).__name__})"
        return
    for name, child in module.named_children():
        yield from _beside(dotted(path, name), child, collections)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put `module` into eval mode; afterwards its parts have their modes again."""
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


def _holds(module: nn.Module, collections: Collection[nn.Module]) -> bool:
    return any(part in collections for part in module.modules())


def _stack(node: fx.Node) -> list[str]:
    """The paths of the modules in whose forward `node` is, outermost first."""
    return [path for path, _ in node.meta.get("nn_module_stack", {}).values()]


def _path_of(root: nn.Module, part: nn.Module, path: str) -> str:
    return dotted(path, next(name for name, each in root.named_modules() if each is part))


def _named(path: str, module: nn.Module) -> str:
    return f"{path} ({type(module).__name__})" if path else type(module).__name__


def dotted(*parts: str) -> str:
    """Join the parts of a module's path. The path of the outermost module is ""."""
    return ".".join(filter(None, parts))
