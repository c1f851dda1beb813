"""Whether a graph only moves numbers: ids, lengths and weights that a forward puts into a KJT of its own."""

import operator
from collections.abc import Collection, Sequence

import torch
from torch import Tensor, fx

from export.capture.graph_nodes import OFFSETS, is_writing, uses_only_sizes, written_nodes

# Operators that move numbers, and change none.
_MOVING = (
    "aten.view.default", "aten.reshape.default", "aten._unsafe_view.default", "aten.flatten.using_ints",
    "aten.unflatten.int", "aten.permute.default", "aten.transpose.int", "aten.t.default", "aten.numpy_T.default",
    "aten.unsqueeze.default", "aten.squeeze.default", "aten.squeeze.dim", "aten.squeeze.dims", "aten.clone.default",
    "aten.contiguous.default", "aten.alias.default", "aten.detach.default", "aten.detach_.default",
    "aten.cat.default", "aten.stack.default", "aten.concat.default", "aten.hstack.default", "aten.vstack.default",
    "aten.select.int",
    "aten.slice.Tensor", "aten.narrow.default", "aten.split.Tensor", "aten.split_with_sizes.default",
    "aten.split.sizes", "aten.chunk.default", "aten.unbind.int", "aten.expand.default", "aten.flip.default",
    "aten.movedim.int", "aten.swapaxes.default", "aten.ravel.default", "aten.lift_fresh_copy.default",
    "aten.view_as.default", "aten.reshape_as.default", "aten.expand_as.default", "aten.repeat.default",
    "aten.tile.default",
)  # fmt: skip
# (order of keys, lengths, ids, weights, their sum): `KeyedJaggedTensor.permute`.
_PERMUTE = "fbgemm.permute_2D_sparse_data.default"
# They move numbers only if the new dtype holds all of them.
_CASTS = ("aten.to.dtype", "aten.to.device", "aten.to.dtype_layout", "aten._to_copy.default", "aten.long.default")
# Operators, besides _MOVING and _CASTS, that may make lengths and weights: neighbours then differ by a constant, so a
# few samples show the numbers of all samples.
_MAKING = (
    "aten.full.default", "aten.ones.default", "aten.zeros.default", "aten.scalar_tensor.default",
    "aten.repeat.default", "aten.arange.default", "aten.arange.start", "aten.arange.start_step",
    "aten.cumsum.default", "aten.diff.default", "aten.sub.Tensor", "aten.add.Tensor", "aten.mul.Tensor",
    "aten.mul.Scalar", OFFSETS,
)  # fmt: skip
# TorchRec splits the ids of a KJT by key at sums of lengths. A sum that is right for some random lengths is right for
# all.
_SUMMING = (
    "aten.sum.dim_IntList", "aten.sum.default", "aten.cumsum.default", "aten.add.Tensor", "aten.item.default",
    "aten.scalar_tensor.default", OFFSETS, str(operator.add),
)  # fmt: skip


def find_changing_node(
    module: fx.GraphModule, answers: Sequence[fx.Node], lengths: Collection[fx.Node] = (), *, is_raw: bool = False
) -> fx.Node | None:
    """The first node on the way to some answers that may change numbers of inputs, or None.

    Args:
        module: the graph.
        answers: ids, lengths or weights.
        lengths: the inputs at whose sums ids may be split.
        is_raw: whether any int64 is an id.
    """
    visited: set[fx.Node] = set()
    waiting = [*answers]
    while waiting:
        node = waiting.pop()
        if node in visited:
            continue
        visited.add(node)
        if str(node.target) == _PERMUTE:
            waiting += [argument for argument in node.args[1:4] if isinstance(argument, fx.Node)]
        elif not uses_only_sizes(node):
            waiting += node.all_input_nodes
        if _has_input_numbers(node) and not _only_moves(node, is_raw) and not _only_sums(node, lengths):
            return node
    writes = (node for node in module.graph.nodes if is_writing(node))
    return next((node for node in writes if not visited.isdisjoint(written_nodes(node))), None)


def find_uneven_node(answers: Sequence[fx.Node]) -> fx.Node | None:
    """The first node on the way to some answers that may make other numbers for some samples, or None."""
    visited: set[fx.Node] = set()
    waiting = [*answers]
    while waiting:
        node = waiting.pop()
        if node in visited or isinstance(node.meta.get("val"), torch.SymInt):
            continue
        visited.add(node)
        waiting += node.all_input_nodes
        name = str(node.target)
        is_scaled = any(isinstance(argument, int | float) for argument in node.args)
        is_even = name in (*_MOVING, *_CASTS, *_MAKING) and (name != "aten.mul.Tensor" or is_scaled)
        is_exempt = _has_input_numbers(node) or uses_only_sizes(node) or node.target is operator.getitem
        if node.op == "call_function" and not is_even and not is_exempt:
            return node
    return None


def _only_moves(node: fx.Node, is_raw: bool) -> bool:
    """Whether a node moves ids and changes none. int32 does not hold all raw ids."""
    name, value = str(node.target), node.meta.get("val")
    if node.op == "placeholder" or node.target is operator.getitem or name in _MOVING:
        return True
    if name == _PERMUTE:
        order = node.args[0]
        return isinstance(order, fx.Node) and not _has_input_numbers(order)
    old = node.args[0].meta.get("val") if node.args and isinstance(node.args[0], fx.Node) else None
    if name not in _CASTS or not isinstance(value, Tensor) or not isinstance(old, Tensor):
        return False
    if old.dtype.is_floating_point:
        return old.dtype.itemsize <= value.dtype.itemsize and value.dtype in (torch.float32, torch.float64)
    is_narrowed = value.dtype.itemsize < old.dtype.itemsize
    return value.dtype in (torch.int32, torch.int64) and not (is_raw and is_narrowed)


def _only_sums(node: fx.Node, lengths: Collection[fx.Node]) -> bool:
    """Whether a node is made of sums of lengths, and of nothing else."""
    waiting, visited = [node], {node}
    while waiting:
        source = waiting.pop()
        if source.op == "placeholder" and source not in lengths:
            return False
        # Where numbers are moved to must not depend on lengths, or some lengths would not show what others do.
        is_moved = _only_moves(source, is_raw=False) and not any(
            _has_input_numbers(size)
            for size in source.all_input_nodes
            if isinstance(size.meta.get("val"), torch.SymInt)
        )
        if _has_input_numbers(source) and str(source.target) not in _SUMMING and not is_moved:
            return False
        waiting += [argument for argument in source.all_input_nodes if argument not in visited]
        visited |= {*source.all_input_nodes}
    return True


def _has_input_numbers(node: fx.Node, results: dict[fx.Node, bool] | None = None) -> bool:
    """Whether a node is computed from numbers of the inputs, and not from their sizes alone.

    Args:
        node: the node.
        results: the results for nodes before it.
    """
    results = {} if results is None else results
    if node not in results:
        results[node] = node.op == "placeholder" or (
            node.op == "call_function"
            and not uses_only_sizes(node)
            and any(_has_input_numbers(argument, results) for argument in node.all_input_nodes)
        )
    return results[node]
