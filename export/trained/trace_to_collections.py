"""Follow the forward of a module to its collections: each must get what the module is given, unchanged.

torch.fx follows the forward of each module above a collection; calls of all other modules are one step each. The
argument of the collection must be an input of the model, or keys selected from one.
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

# What may be done to an input on the way: choose parts of it, or move it to a device. The ids stay the same.
_SELECTING_METHODS = ("split", "permute", "to")
_SELECTING_FUNCTIONS = (operator.getitem, getattr)
_CHANGING_FUNCTIONS = (operator.setitem, setattr)
_VIEWS = ("detach", "view", "t", "transpose", "select", "narrow", "view_as", "expand", "squeeze", "unsqueeze")
INSTEAD = "export the collection itself, if the ids of your requests are what it is to look up"


def trace_to_collections(path: str, entry: nn.Module, collections: Collection[nn.Module]) -> fx.Graph:
    """Follow the forward of `entry`, and check that every collection gets inputs of `entry` unchanged.

    A forward that cannot be followed to its end is followed as far as possible. All collections must be called by
    then.

    Returns:
        The graph, as far as it was followed.

    Raises:
        ModelError: a collection gets something else, or is not reached.
    """
    above = [part for part in entry.modules() if holds(part, collections) and part not in collections]
    for part in above:
        check_untouched(named(path, part), part)
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
                f"{named(path, entry)}: its forward writes to {node.target!r}, which lookups would not see: {INSTEAD}"
            )
    for name, part in entry.named_modules():
        if part in collections and part not in calls.values():
            raise ModelError(
                f"{named(path, entry)}: its forward cannot be followed to the collection {name!r} ({reason}), so "
                f"that what it does to ids is not known: {INSTEAD}"
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
    while isinstance(given, fx.Node) and selects_ids(given):
        given = given.args[0]
    if not isinstance(given, fx.Node) or given.op != "placeholder" or _is_changed(given):
        blamed = entry
        for module_path in _stack(given if isinstance(given, fx.Node) else call):
            part = entry.get_submodule(module_path)
            blamed = part if part in above else blamed
        raise ModelError(
            f"{named(_path_of(entry, blamed, path), blamed)}: gives the collection {call.target!r} other ids or "
            f"weights than it is given itself: this is not served: {INSTEAD}"
        )


def check_untouched(where: str, module: nn.Module) -> None:
    """Refuse a module whose call is more than the forward of its class."""
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    if hooks or "forward" in vars(module) or type(module).__call__ is not nn.Module.__call__:
        raise ModelError(
            f"{where}: has a hook, or a forward of its own, which may change what is looked up: remove it"
        )


def holds(module: nn.Module, collections: Collection[nn.Module]) -> bool:
    """Whether a collection is in `module`, or is it."""
    return any(part in collections for part in module.modules())


def selects_ids(node: fx.Node) -> bool:
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


def continues_after_collections(graph: fx.Graph) -> bool:
    """Whether the forward does anything with what its collections answer."""
    calls = [node for node in graph.nodes if node.op == "call_module"]
    return any(user.op != "output" for call in calls for user in call.users) or not any(
        node.op == "output" for node in graph.nodes
    )


def _stack(node: fx.Node) -> list[str]:
    """The paths of the modules in whose forward `node` is, outermost first."""
    return [path for path, _ in node.meta.get("nn_module_stack", {}).values()]


def _path_of(root: nn.Module, part: nn.Module, path: str) -> str:
    return dotted(path, next(name for name, each in root.named_modules() if each is part))
