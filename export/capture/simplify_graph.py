"""Simplify a graph of torch.export: inline blocks, and shorten ways to the lengths of a key."""

import operator
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from export.capture.graph_nodes import CAT, OFFSETS, origin_of

_TO_THE_END = sys.maxsize


def simplified(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph without blocks that only say whether gradients are recorded, or that nothing is cast.

    A node that takes the lengths of one key out of the lengths of all keys, or computes them from offsets, is
    replaced by these lengths. Otherwise, a graph seems to need the lengths of keys that no collection looks up.
    """
    graph, copies = fx.Graph(), dict[fx.Node, Any]()
    for node in module.graph.nodes:
        block, arguments = _block_of(node)
        if block is None:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            continue
        inner = simplified(getattr(module, str(block.target))).graph
        placeholders = (inner_node for inner_node in inner.nodes if inner_node.op == "placeholder")
        inner_copies = {
            placeholder: copies[argument] for placeholder, argument in zip(placeholders, arguments, strict=True)
        }
        copies[node] = graph.graph_copy(inner, inner_copies)
    for node in [node for node in graph.nodes if node.op == "call_function" and node.target is operator.getitem]:
        if not isinstance(node.args[0], fx.Node):  # the answers of a block
            node.replace_all_uses_with(node.args[0][node.args[1]])
            graph.erase_node(node)
    for node in graph.nodes:
        if (lengths := _part_of_joined(node) or _lengths_of_offsets(node)) is not None:
            node.replace_all_uses_with(lengths)
    return fx.GraphModule(module, graph)


def _block_of(node: fx.Node) -> tuple[Any, Sequence[Any]]:
    """The block that a node runs and its arguments; (None, ()) for any other node."""
    if node.target is torch.ops.higher_order.wrap_with_set_grad_enabled:
        return node.args[1], node.args[2:]
    if node.target is torch.ops.higher_order.wrap_with_autocast and not node.args[2]:
        return node.args[4], node.args[5:]
    return None, ()


def _part_of_joined(node: fx.Node) -> fx.Node | None:
    """The tensor that a node selects from several equally shaped ones that were joined, or None."""
    if str(node.target) != "aten.select.int" or node.args[1] != 0 or not isinstance(node.args[2], int):
        return None
    view = node.args[0]
    joined = view.args[0] if isinstance(view, fx.Node) and str(view.target) == "aten.view.default" else None
    if not isinstance(joined, fx.Node) or len(joined.args) > (1 if str(joined.target) == CAT else 2):
        return None
    parts: Any = joined.args[0]
    if str(joined.target) == "aten.repeat.default" and isinstance(parts, fx.Node):
        parts = [parts] * node.args[2] + [parts]
    elif str(joined.target) != CAT:
        return None
    row = str(node.meta["val"].shape)
    return parts[node.args[2]] if all(str(part.meta["val"].shape) == row for part in parts) else None


def _lengths_of_offsets(node: fx.Node) -> fx.Node | None:
    """The lengths that a node computes from the offsets of these very lengths, or None."""
    offsets: Any = None
    if str(node.target) == "aten.diff.default" and len(node.args) == 1:
        offsets = node.args[0]
    elif str(node.target) == "aten.sub.Tensor" and not node.kwargs:
        ends, starts = (_slice_of(argument) for argument in node.args)
        if ends is not None and starts is not None and ends[0] is starts[0]:
            offsets = ends[0] if ends[1] == (1, _TO_THE_END) and starts[1] == (0, -1) else None
    if not isinstance(offsets, fx.Node) or str(origin_of(offsets).target) != OFFSETS:
        return None
    lengths = origin_of(offsets).args[0]
    return lengths if isinstance(lengths, fx.Node) and lengths.meta["val"].dim() == 1 else None


def _slice_of(node: Any) -> tuple[Any, tuple[Any, ...]] | None:
    """The tensor that a node slices along its first dimension, and the bounds of the slice; or None."""
    if not isinstance(node, fx.Node) or str(node.target) != "aten.slice.Tensor" or node.args[1:2] not in ((), (0,)):
        return None
    if len(node.args) > 4:
        return None
    first, last = (*node.args[2:], None, None)[:2]
    return node.args[0], (first or 0, _TO_THE_END if last is None else last)
