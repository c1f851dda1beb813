"""Pointwise operators write to the memory of a tensor that no other operator takes, so that caches hold more."""

from typing import Any

import torch
from torch import fx

_ATEN = torch.ops.aten
# In a node's `meta`: the arguments, by number, whose size and dtype are those of the result.
_ALIKE = "alike"
# Their results have memory of their own, as those of pointwise operators have.
_NEW = (_ATEN.linear, _ATEN.matmul, _ATEN.einsum, _ATEN.cat)
_VIEWS = (_ATEN.reshape, _ATEN.unsqueeze, _ATEN.squeeze, _ATEN.permute, _ATEN.transpose, _ATEN.narrow)
_COMMUTATIVE = (_ATEN.add, _ATEN.mul)


def may_write_in_place(target: Any) -> bool:
    """Whether an operator of a graph of torch.export may write to its first argument."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    packet = _in_place(target.overloadpacket)
    return packet is not None and target._overloadname in packet.overloads()


def mark_pointwise(node: fx.Node, *alike: bool) -> None:
    """Note that a node is a pointwise operator.

    Args:
        node: the operator.
        alike: of each of its first arguments: whether its size and dtype are those of the result, for any items.
    """
    node.meta[_ALIKE] = [number for number, is_alike in enumerate(alike) if is_alike]


def write_in_place(graph: fx.Graph) -> None:
    """Have pointwise operators write to the memory of an argument. Inputs and constants are not written to."""
    for node in graph.nodes:
        operator = _in_place(node.target)
        if node.op != "call_function" or operator is None or node.kwargs.get("out") is not None:
            continue
        for number in node.meta.get(_ALIKE, ()):
            if not _is_last_reader(node, node.args[number]) or (number and node.target not in _COMMUTATIVE):
                continue
            node.target = operator
            if number:
                node.args = (node.args[1], node.args[0])
            break


def _in_place(operator: Any) -> Any:
    """The operator that writes to its first argument, or None."""
    if not isinstance(operator, torch._ops.OpOverloadPacket):
        return None
    namespace, name = operator._qualified_op_name.split("::")
    return getattr(_ATEN, f"{name}_", None) if namespace == "aten" and not name.endswith("_") else None


def _is_last_reader(node: fx.Node, tensor: Any) -> bool:
    """Whether no other operator takes the memory of a tensor that a node takes."""
    while isinstance(tensor, fx.Node) and tensor.op == "call_function" and [*tensor.users] == [node]:
        if tensor.target in _NEW or _ALIKE in tensor.meta:
            return True
        if tensor.target not in _VIEWS:
            return False
        node, tensor = tensor, tensor.args[0]
    return False
