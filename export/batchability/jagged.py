"""Jagged tensors in a graph of core ATen: whose offsets a node is, and FBGEMM's operators on them.

A jagged tensor has a row for each id. FBGEMM's operators find the ids of a sample by offsets. They keep samples apart
if the rows and the offsets belong to the same key.
"""

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from export.batchability.sample_axis import SampleAxis, is_symbolic_number
from export.capture.graph_nodes import OFFSETS

# They take (values, offsets, …), and return rows and the same offsets.
_RETURNING_OFFSETS = (
    "fbgemm.jagged_dense_elementwise_add_jagged_output.default", "fbgemm.jagged_dense_elementwise_mul.default",
    "fbgemm.jagged_softmax.default",
)  # fmt: skip
# They keep the numbers of a tensor [B], and may add or remove dimensions of size 1.
_KEEPING = (
    "aten.view.default", "aten.reshape.default", "aten._unsafe_view.default", "aten.alias.default",
    "aten.clone.default", "aten._to_copy.default",
    "aten.select.int", "aten.squeeze.dims", "aten.squeeze.dim", "aten.unsqueeze.default",
)  # fmt: skip
# Narrower dtypes cannot hold large lengths.
_LENGTH_DTYPES = (torch.int32, torch.int64)
# A key with any number of ids in each sample, or the number of ids in every sample.
BagSize = str | int


class JaggedLengths:
    """Tells which nodes of a graph are the lengths, or made of the lengths, of which key.

    Args:
        lengths: the inputs with lengths, and the key or fixed number of ids of each.
        samples: the symbol of B.
    """

    def __init__(self, lengths: Mapping[fx.Node, BagSize], samples: Any) -> None:
        self._lengths = lengths
        self._samples = samples

    def is_offsets(self, node: fx.Node) -> bool:
        """Whether a node is the offsets of known lengths."""
        return self.of_offsets(node) is not None

    def of_offsets(self, node: Any) -> BagSize | None:
        """The key of a node that is offsets, or None."""
        node = _original_offsets(node)
        is_cumsum = isinstance(node, fx.Node) and str(node.target) == OFFSETS
        return self._of_lengths(node.args[0]) if is_cumsum else None

    def of_sample_numbers(self, node: Any) -> BagSize | None:
        """The key of a node that is the number of the sample of each id, repeat_interleave(lengths), or None."""
        is_repeat = isinstance(node, fx.Node) and str(node.target) == "aten.repeat_interleave.Tensor"
        return self._of_lengths(node.args[0]) if is_repeat else None

    def _of_lengths(self, node: Any) -> BagSize | None:
        while self._has_one_number_per_sample(node):
            if node in self._lengths:
                return self._lengths[node]
            if str(node.target) == "aten.full.default":
                return node.args[1] if isinstance(node.args[1], int) else None
            if str(node.target) not in _KEEPING or node.meta["val"].dtype not in _LENGTH_DTYPES:
                return None
            node = node.args[0]
        return None

    def _has_one_number_per_sample(self, node: Any) -> bool:
        value = node.meta.get("val") if isinstance(node, fx.Node) else None
        if not isinstance(value, Tensor):
            return False
        sizes = [size for size in value.shape if not (isinstance(size, int) and size == 1)]
        return len(sizes) == 1 and isinstance(sizes[0], torch.SymInt) and sizes[0].node.expr == self._samples


def _original_offsets(node: Any) -> Any:
    """The offsets that an operator took, if `node` is its second result, of (rows, [offsets]). Else `node` itself."""
    if not isinstance(node, fx.Node) or node.target is not operator.getitem:
        return node
    source: Any
    index: Any
    source, index = node.args
    if isinstance(source, fx.Node) and str(source.target) in _RETURNING_OFFSETS and index == 1:
        return _original_offsets(source.args[1])
    offsets = _original_offsets(source)
    return _original_offsets(offsets[index]) if isinstance(offsets, list | tuple) else node


def axis_of_ids(size: BagSize) -> SampleAxis:
    """The axis of a tensor with a row for each id."""
    return SampleAxis(0, size) if isinstance(size, int) else SampleAxis(0, key=size)


def axis_of_jagged(node: fx.Node, axes: Mapping[fx.Node, SampleAxis], lengths: JaggedLengths) -> SampleAxis | None:
    """The sample axis after one of FBGEMM's operators, or None if it may mix samples."""
    name = str(node.target).removeprefix("fbgemm.").partition(".")[0]
    rule = _RULES.get(name)
    if rule is None or any(map(is_symbolic_number, node.all_input_nodes)):
        return None  # a size that depends on the number of ids or samples
    return rule(_JaggedCall(node, axes, lengths))


def axis_of_repeated(node: fx.Node, axes: Mapping[fx.Node, SampleAxis], lengths: JaggedLengths) -> SampleAxis | None:
    """The sample axis after a node that takes the row of its sample for each id, or None if the node does not."""
    name = str(node.target)
    args = node.args
    if name == "aten.index_select.default":
        source, dim, numbers = args
    elif name == "aten.index.Tensor" and isinstance(args[1], list | tuple) and len(args[1]) == 1:
        source, dim, numbers = args[0], 0, args[1][0]
    else:
        return None
    size = lengths.of_sample_numbers(numbers)
    if size is None or dim != 0 or not isinstance(source, fx.Node) or axes.get(source) != SampleAxis(0):
        return None
    return axis_of_ids(size)


class _JaggedCall:
    """One call of an operator of FBGEMM."""

    def __init__(self, node: fx.Node, axes: Mapping[fx.Node, SampleAxis], lengths: JaggedLengths) -> None:
        self._args = node.args
        self._axes = axes
        self._lengths = lengths

    def is_dense(self, position: int) -> bool:
        """Whether an argument has a row for each sample."""
        return self._axis(position) == SampleAxis(0)

    def are_dense(self, position: int) -> bool:
        """Whether each tensor of a list has a row for each sample."""
        tensors: Any = self._args[position]
        return all(self._axes.get(tensor) == SampleAxis(0) for tensor in tensors)

    def is_jagged(self, position: int, offsets: int) -> bool:
        """Whether an argument has a row for each id of the key whose offsets another argument is."""
        size = self._size(offsets)
        return size is not None and self._axis(position) == axis_of_ids(size)

    def jagged_axis(self, offsets: int) -> SampleAxis | None:
        """The axis of a tensor with a row for each id of the key whose offsets an argument is."""
        size = self._size(offsets)
        return None if size is None else axis_of_ids(size)

    def _axis(self, position: int) -> SampleAxis | None:
        argument: Any = self._args[position]
        return self._axes.get(argument) if isinstance(argument, fx.Node) else None

    def _size(self, position: int) -> BagSize | None:
        argument: Any = self._args[position]
        if isinstance(argument, list | tuple):
            argument = argument[0] if len(argument) == 1 else None
        return self._lengths.of_offsets(argument)


def _to_dense(call: _JaggedCall) -> SampleAxis | None:
    """(values, offsets, …): a padded row for each sample."""
    return SampleAxis(0) if call.is_jagged(0, 1) else None


def _to_jagged(call: _JaggedCall) -> SampleAxis | None:
    """(dense, offsets, …): a row for each id."""
    return call.jagged_axis(1) if call.is_dense(0) else None


def _jagged_with_dense(call: _JaggedCall) -> SampleAxis | None:
    """(values, offsets, dense, …): each row of a sample with the numbers or the matrix of that sample."""
    return call.jagged_axis(1) if call.is_jagged(0, 1) and call.is_dense(2) else None


def _softmax(call: _JaggedCall) -> SampleAxis | None:
    """(values, offsets, …): over the ids of each sample."""
    return call.jagged_axis(1) if call.is_jagged(0, 1) else None


def _jagged_bmm(call: _JaggedCall) -> SampleAxis | None:
    """(values, values, offsets, …): a matrix for each sample."""
    return SampleAxis(0) if call.is_jagged(0, 2) and call.is_jagged(1, 2) else None


def _permuted_columns(call: _JaggedCall) -> SampleAxis | None:
    """(dense, …): columns in another order."""
    return SampleAxis(0) if call.is_dense(0) else None


def _regrouped_columns(call: _JaggedCall) -> SampleAxis | None:
    """([dense, …], …): columns of several tensors in another order."""
    return SampleAxis(0) if call.are_dense(0) else None


_RULES: Mapping[str, Callable[[_JaggedCall], SampleAxis | None]] = {
    "jagged_to_padded_dense": _to_dense,
    "jagged_to_padded_dense_forward": _to_dense,
    "jagged_2d_to_dense": _to_dense,
    "jagged_1d_to_dense": _to_dense,
    "dense_to_jagged": _to_jagged,
    "dense_to_jagged_forward": _to_jagged,
    "jagged_dense_elementwise_add_jagged_output": _jagged_with_dense,
    "jagged_dense_elementwise_mul": _jagged_with_dense,
    "jagged_dense_bmm": _jagged_with_dense,
    "jagged_jagged_bmm": _jagged_bmm,
    "jagged_softmax": _softmax,
    "permute_pooled_embs": _permuted_columns,
    "permute_pooled_embs_auto_grad": _permuted_columns,
    "permute_multi_embedding": _regrouped_columns,
    "permute_multi_embedding_function": _regrouped_columns,
    "regroup_keyed_tensor": _regrouped_columns,
}
