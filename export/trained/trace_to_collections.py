"""Trace the forward of a module to its collections by torch.fx: each must get an input of the module, unchanged.

The forward of every module above a collection is traced; a call of any other module is one node. The argument of the
collection must be an input of the model, or keys selected from one.
"""

import operator
from collections.abc import Collection, Iterable
from typing import Any

from torch import fx, nn

from export.errors import ModelError, first_line
from export.trained.eval_mode import evaluating, quiet
from export.trained.keyed_tracer import KeyedTracer
from export.trained.module_paths import dotted, named
from export.trained.source_location import line_of_error

# What a forward may do to an input: select parts of it, or move it to a device. The ids stay the same.
_SELECTING_METHODS = ("split", "permute", "to")
_SELECTING_FUNCTIONS = (operator.getitem, getattr)
_CHANGING_FUNCTIONS = (operator.setitem, setattr)
_VIEWS = ("detach", "view", "t", "transpose", "select", "narrow", "view_as", "expand", "squeeze", "unsqueeze")
INSTEAD = "export the collection itself, if your requests bring the ids that it looks up"


def trace_to_collections(path: str, entry: nn.Module, collections: Collection[nn.Module]) -> fx.Graph:
    """Trace the forward of `entry`, and check that every collection gets inputs of `entry` unchanged.

    A forward that torch.fx cannot trace to its end is traced until all collections are called.

    Returns:
        The graph, which may end before the forward does.

    Raises:
        ModelError: a collection gets something else, or is not reached.
    """
    above = [module for module in entry.modules() if holds_any(module, collections) and module not in collections]
    for module in above:
        expect_plain_call(named(path, module), module)
    tracer = _Tracer(above)
    reason = "it returns before"
    with evaluating(entry), quiet():
        try:
            tracer.trace(entry)
        except Exception as error:  # the user's code may raise anything
            reason = f"{first_line(error)}{line_of_error(error)}"
    calls = {node: entry.get_submodule(str(node.target)) for node in tracer.graph.nodes if node.op == "call_module"}
    for call, module in calls.items():
        if module in collections:
            _expect_unchanged_argument(path, entry, call, above)
    for node in tracer.graph.nodes:
        if node.op == "get_attr" and _is_written(node):
            raise ModelError(
                f"{named(path, entry)}: its forward writes to {node.target!r}, which lookups would not see: {INSTEAD}"
            )
    for name, part in entry.named_modules():
        if part in collections and part not in calls.values():
            raise ModelError(
                f"{named(path, entry)}: its forward cannot be traced to the collection {name!r} ({reason}), so what "
                f"it does to ids is unknown: {INSTEAD}"
            )
    graph: fx.Graph = tracer.graph
    return graph


class _Tracer(KeyedTracer):
    """Traces the modules above collections. A call of any other module is one node."""

    def __init__(self, above: Iterable[nn.Module]) -> None:
        super().__init__()
        self._above = set(above)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:  # noqa: ARG002
        return m not in self._above


def _expect_unchanged_argument(path: str, entry: nn.Module, call: fx.Node, above: Collection[nn.Module]) -> None:
    """Refuse a call of a collection whose argument is no input of `entry`, or an input that may have changed."""
    argument: Any = call.args[0] if call.args else next(iter(call.kwargs.values()), None)
    while isinstance(argument, fx.Node) and selects_ids(argument):
        argument = argument.args[0]
    if not isinstance(argument, fx.Node) or argument.op != "placeholder" or _is_changed(argument):
        blamed = entry
        node = argument if isinstance(argument, fx.Node) else call
        for module_path, _ in node.meta.get("nn_module_stack", {}).values():  # outermost first
            module = entry.get_submodule(module_path)
            blamed = module if module in above else blamed
        blamed_path = next(name for name, module in entry.named_modules() if module is blamed)
        raise ModelError(
            f"{named(dotted(path, blamed_path), blamed)}: gives the collection {call.target!r} other ids or weights "
            f"than its own inputs, which is not served: {INSTEAD}"
        )


def expect_plain_call(where: str, module: nn.Module) -> None:
    """Refuse a module with hooks, or with a `forward` or `__call__` of its own."""
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    if hooks or "forward" in vars(module) or type(module).__call__ is not nn.Module.__call__:
        raise ModelError(
            f"{where}: has a hook, or a forward of its own, which may change ids or embeddings: remove it"
        )


def holds_any(module: nn.Module, collections: Collection[nn.Module]) -> bool:
    """Whether `module` is one of the collections, or has one in it."""
    return any(part in collections for part in module.modules())


def selects_ids(node: fx.Node) -> bool:
    """Whether a node selects ids, or moves them to a device, without changing them."""
    if node.op == "call_method":
        return node.target in _SELECTING_METHODS
    return node.op == "call_function" and node.target in _SELECTING_FUNCTIONS


def _is_changed(node: fx.Node) -> bool:
    """Whether a value, or one computed from it outside of modules, is changed in place."""
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


def continues_after_collections(graph: fx.Graph) -> bool:
    """Whether the forward uses the answers of its collections."""
    calls = [node for node in graph.nodes if node.op == "call_module"]
    return any(user.op != "output" for call in calls for user in call.users) or not any(
        node.op == "output" for node in graph.nodes
    )
