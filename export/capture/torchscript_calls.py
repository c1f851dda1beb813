"""How TorchScript writes the operators of a graph of torch.export."""

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from export.capture.graph_nodes import is_copy, is_writing, written_nodes
from export.errors import ModelError
from export.trained.source_location import line_of

# Arguments that have one value for all tensors on a CPU.
_DEVICE_ARGUMENTS = ("device", "layout", "pin_memory")
_NUMBERS: Mapping[Any, Any] = {
    torch.sym_max: max,
    torch.sym_min: min,
    torch.sym_float: float,
    torch.sym_int: int,
    torch.sym_not: operator.not_,
}


class TorchScriptCalls:
    """Adds operators to a graph that TorchScript compiles.

    Args:
        graph: the graph.
        model_name: for errors.
    """

    def __init__(self, graph: fx.Graph, model_name: str) -> None:
        self._graph, self.model_name = graph, model_name

    def convert(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        """Add a node of a graph of torch.export, with arguments of the new graph.

        Raises:
            ModelError: TorchScript lacks it.
        """
        args, kwargs = self._constants(args), self._constants(kwargs)
        name = str(node.target)
        if (rule := _RULES.get(name)) is not None:
            return rule(self, node, args)
        target: Any = node.target
        if not isinstance(target, torch._ops.OpOverload):
            return self._graph.call_function(_NUMBERS.get(target, target), args, kwargs)
        packet = getattr(getattr(torch.ops, target.namespace), name.split(".")[1])
        return self._graph.call_function(
            packet, args, {key: value for key, value in kwargs.items() if key not in _DEVICE_ARGUMENTS}
        )

    def _constants(self, value: Any) -> Any:
        """`value` with calls in place of constants that TorchScript has no literal for."""
        if isinstance(value, float) and not math.isfinite(value):
            return self._graph.call_function(float, (str(value),))
        if isinstance(value, list | tuple):
            return type(value)(self._constants(item) for item in value)
        return {key: self._constants(item) for key, item in value.items()} if isinstance(value, dict) else value

    def operator(self, target: Any, *args: Any) -> fx.Node:
        """Add a call of an operator."""
        return self._graph.call_function(target, args)

    def method(self, name: str, *args: Any) -> fx.Node:
        """Add a call of a method."""
        return self._graph.call_method(name, args)


def _squeeze(to: TorchScriptCalls, node: fx.Node, args: Any) -> Any:
    """Remove the dimensions that are 1 for any number of samples, which the dimension of samples is not."""
    shape = node.args[0].meta["val"].shape  # type: ignore[union-attr]
    squeezed = [dim for dim, size in enumerate(shape) if isinstance(size, int) and size == 1]
    return to.operator(torch.ops.aten.squeeze, args[0], squeezed) if squeezed else args[0]


def _to_dtype(to: TorchScriptCalls, node: fx.Node, args: Any) -> Any:
    cast = to.operator(torch.ops.aten.to, args[0], node.meta["val"].dtype)
    # A copy that the model asks for stays a copy: later writes to it must not change its source.
    return to.method("clone", cast) if is_copy(node) else cast


def _bits(to: TorchScriptCalls, node: fx.Node, args: Any) -> Any:
    """`x.view(dtype)`, which TorchScript has only as a copy."""
    if any(node in written_nodes(other) for other in node.graph.nodes if is_writing(other)):
        raise ModelError(f"{to.model_name}: its forward writes to a view of another dtype{line_of(node)}")
    return to.operator(torch.ops.aten.view_copy, *args)


_RULES: Mapping[str, Callable[[TorchScriptCalls, fx.Node, Any], Any]] = {
    "aten.sym_size.int": lambda to, _, args: to.method("size", *args),
    "aten.sym_numel.default": lambda to, _, args: to.method("numel", *args),
    "aten.item.default": lambda to, node, args: to.operator(_number_of(node), args[0]),
    "aten._local_scalar_dense.default": lambda to, node, args: to.operator(_number_of(node), args[0]),
    "aten.squeeze.default": _squeeze,
    "aten.view.dtype": _bits,
    **dict.fromkeys(
        ("aten.to.device", "aten.to.dtype", "aten.to.dtype_layout", "aten._to_copy.default", "aten.to.other"),
        _to_dtype,
    ),
    **dict.fromkeys(
        ("aten.dropout.default", "aten.feature_dropout.default", "aten.alpha_dropout.default"),
        lambda _, __, args: args[0],
    ),
    "aten.lift_fresh_copy.default": lambda to, _, args: to.method("clone", args[0]),
}


def _number_of(node: fx.Node) -> Any:
    value = node.meta["val"]
    kinds = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
    return next((kind for symbolic, kind in kinds.items() if isinstance(value, symbolic)), type(value))
