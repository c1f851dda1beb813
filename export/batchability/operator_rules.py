"""The operators of ATen that are known to keep the samples of a batch apart, and the sample axis of their output.

An operator without a rule may mix samples. So may an operator that is used in a way that its rule does not cover.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, fx

from export.batchability.sample_axis import OperatorCall, SampleAxis, rows_per_sample

# A rule returns the sample axis of the output, or None if this call may mix samples.
Rule = Callable[[OperatorCall], SampleAxis | None]


def output_axis(op: torch._ops.OpOverload, call: OperatorCall, *, has_symbolic_size: bool) -> SampleAxis | None:
    """The sample axis of the output of an operator, or None if this call may mix samples.

    Args:
        op: the operator.
        call: its call.
        has_symbolic_size: whether an argument is a number that is computed from the number of samples.
    """
    name = str(op).removeprefix("aten.")
    if has_symbolic_size and name not in _TAKING_SIZES:
        return None
    rule = _RULES.get(name) or (_pointwise if torch.Tag.pointwise in op.tags else None)
    return None if rule is None else rule(call)


def _pointwise(call: OperatorCall) -> SampleAxis | None:
    """Each number of the output is computed from the numbers at the same index of the broadcast arguments."""
    broadcast: Any = torch.broadcast_shapes
    tensors = [name for name, argument in call.arguments.items() if isinstance(argument, fx.Node)]
    if not isinstance(call.output, Tensor):
        return None
    if list(call.output.shape) != [*broadcast(*(call.shape(name) for name in tensors))]:
        return None
    return _common(_broadcast_axis(call, name) for name in tensors)


def _broadcast_axis(call: OperatorCall, name: str) -> SampleAxis | None:
    """The sample axis of an argument after broadcasting to the output."""
    axis = call.axis(name)
    return axis and SampleAxis(axis.dim + call.output.ndim - len(call.shape(name)), axis.block)


def _common(axes: Iterable[SampleAxis | None]) -> SampleAxis | None:
    """The sample axis that several tensors share, or None if they have none or differ."""
    distinct = {axis for axis in axes if axis is not None}
    return distinct.pop() if len(distinct) == 1 else None


def _along(*names: str) -> Rule:
    """A rule for operators that work along named dimensions and keep them: samples must be along another one."""

    def rule(call: OperatorCall) -> SampleAxis | None:
        axis = call.axis("self")
        dims = [dim for name in names for dim in call.dims(name)]
        other_arguments = [name for name in call.arguments if name != "self"]
        return axis if axis and dims and axis.dim not in dims and call.is_constant(*other_arguments) else None

    return rule


def _reduction(call: OperatorCall) -> SampleAxis | None:
    """Operators that reduce some dimensions, and drop them unless `keepdim` is set."""
    axis = _along("dim")(call)
    if axis is None or call.arguments.get("keepdim"):
        return axis
    return SampleAxis(axis.dim - sum(dim < axis.dim for dim in call.dims()), axis.block)


def _squeeze(call: OperatorCall) -> SampleAxis | None:
    axis = _along("dim")(call)
    shape = call.shape("self")
    dropped = [dim for dim in call.dims() if isinstance(shape[dim], int) and shape[dim] == 1]
    return axis and SampleAxis(axis.dim - sum(dim < axis.dim for dim in dropped), axis.block)


def _unsqueeze(call: OperatorCall) -> SampleAxis | None:
    axis = call.axis("self")
    return axis and SampleAxis(axis.dim + (call.arguments["dim"] % call.output.ndim <= axis.dim), axis.block)


def _permute(call: OperatorCall) -> SampleAxis | None:
    axis = call.axis("self")
    return axis and SampleAxis(call.dims("dims").index(axis.dim), axis.block)


def _view(call: OperatorCall) -> SampleAxis | None:
    """In row-major order, number n belongs to sample (n // run) % B, before and after a view."""
    axis = call.axis("self")
    if axis is None:
        return None
    run = axis.block * math.prod(call.shape("self")[axis.dim + 1 :])
    for dim, size in enumerate(call.output.shape):
        if isinstance(size, torch.SymInt):
            inner = math.prod(call.output.shape[dim + 1 :])
            is_whole = isinstance(inner, int) and inner > 0 and run % inner == 0
            return SampleAxis(dim, run // inner) if is_whole and run else None
    return None


def _expand(call: OperatorCall) -> SampleAxis | None:
    return _broadcast_axis(call, "self") if call.axis("self") else _same_for_all_samples(call)


def _repeat(call: OperatorCall) -> SampleAxis | None:
    axis = _broadcast_axis(call, "self")
    if axis is None:
        return _same_for_all_samples(call)
    is_fixed = all(isinstance(count, int) for count in call.arguments["repeats"])
    return axis if is_fixed else None


def _same_for_all_samples(call: OperatorCall) -> SampleAxis | None:
    """A tensor that is made for any number of samples, with the same numbers for each."""
    dims = [dim for dim, size in enumerate(call.output.shape) if isinstance(size, torch.SymInt)]
    if len(dims) != 1 or isinstance(call.arguments.get("fill_value"), fx.Node):
        return None
    (dim,) = dims
    symbols = call.output.shape[dim].node.expr.free_symbols
    if len(symbols) != 1:
        return None  # a size that depends on several numbers
    return SampleAxis(dim, rows_per_sample(call.output.shape[dim], *symbols) or 0)


def _slice(call: OperatorCall) -> SampleAxis | None:
    axis = call.axis("self")
    (dim,) = call.dims()
    is_whole = call.output.shape[dim] == call.shape("self")[dim] if axis and axis.dim == dim else True
    return axis if is_whole else None


def _cat(call: OperatorCall) -> SampleAxis | None:
    """A join of tensors that each have all samples, along any dimension."""
    axes = call.axes("tensors")
    return _common(axes) if all(axes) else None


def _matmul(first: str, second: str) -> Rule:
    """A rule for a product of two matrices, or of two batches of matrices: no sum may be over samples."""

    def rule(call: OperatorCall) -> SampleAxis | None:
        left_axis = call.axis(first)
        right_axis = call.axis(second)
        last = call.output.ndim - 1
        if left_axis and right_axis:
            product = _common([left_axis, right_axis]) if left_axis.dim == 0 and last == 2 else None
        elif left_axis:
            product = left_axis if left_axis.dim == last - 1 else None
        else:
            product = right_axis if right_axis and right_axis.dim == last else None
        if "self" in (first, second) or product is None or call.is_constant("self"):
            return product
        return _common([product, _broadcast_axis(call, "self")])

    return rule


def _trilinear(call: OperatorCall) -> SampleAxis | None:
    """`nn.Bilinear`: a product of three tensors, each with new dimensions of size 1; then a sum over dimensions."""
    axes = []
    for tensor, new_dims in (("i1", "expand1"), ("i2", "expand2"), ("i3", "expand3")):
        if axis := call.axis(tensor):
            new = call.arguments[new_dims]
            dims = [dim for dim in range(len(call.shape(tensor)) + len(new)) if dim not in new]
            axes.append(SampleAxis(dims[axis.dim], axis.block))
    axis, summed = _common(axes), call.arguments["sumdim"]
    if axis is None or axis.dim in summed:
        return None
    return SampleAxis(axis.dim - sum(dim < axis.dim for dim in summed), axis.block)


def _layer_norm(call: OperatorCall) -> SampleAxis | None:
    axis = call.axis("input")
    leading = len(call.shape("input")) - len(call.arguments["normalized_shape"])
    return axis if axis and axis.dim < leading and call.is_constant("weight", "bias") else None


def _of_channels(call: OperatorCall) -> SampleAxis | None:
    """Operators on [samples, channels, …], whose other arguments are the same for all samples."""
    axis = call.axis("input") or call.axis("self")
    if any(isinstance(call.arguments.get(name), fx.Node) for name in ("C", "HxW", "group")):
        return None  # a number that is computed from the number of samples
    other_arguments = [name for name in call.arguments if name not in ("input", "self")]
    return axis if axis and axis.dim == 0 and call.is_constant(*other_arguments) else None


def _pad(call: OperatorCall) -> SampleAxis | None:
    axis = call.axis("self")
    padded_dims = len(call.arguments["pad"]) // 2
    return axis if axis and axis.dim < call.output.ndim - padded_dims else None


def _attention(call: OperatorCall) -> SampleAxis | None:
    """softmax(q kᵀ) v of [samples, heads, positions, width]."""
    if call.arguments.get("dropout_p") or not call.is_constant("attn_mask"):
        return None
    axes = [call.axis(name) for name in ("query", "key", "value")]
    return _common(axes) if all(axis and axis.dim == 0 for axis in axes) else None


def _gather(call: OperatorCall) -> SampleAxis | None:
    """Numbers at the indices of a tensor, along a dimension other than that of samples."""
    names = [name for name in ("self", "index", "src") if isinstance(call.arguments.get(name), fx.Node)]
    axes = [call.axis(name) for name in names]
    axis = _common(axes) if all(axes) else None
    return axis if axis and axis.dim not in call.dims() else None


def _index_select(call: OperatorCall) -> SampleAxis | None:
    return _along("dim")(call) if call.is_constant("index") else None


def _embedding(call: OperatorCall) -> SampleAxis | None:
    return call.axis("indices") if call.is_constant("weight") else None


def _index(call: OperatorCall) -> SampleAxis | None:
    """x[arange(B), i, j]; table[i] with an index for each sample; or x[:, i, j] with indices for all samples."""
    if call.is_indexed_by_sample("indices"):
        return _index_by_sample(call)
    indices = call.arguments["indices"]
    indexed_dims = [dim for dim, index in enumerate(indices) if index is not None]
    axis = call.axis("self")
    if axis is None:
        return call.axes("indices")[0] if indexed_dims == [0] else None
    are_adjacent = indexed_dims and indexed_dims == list(range(indexed_dims[0], indexed_dims[-1] + 1))
    if not are_adjacent or not call.is_constant("indices") or axis.dim in indexed_dims:
        return None
    shift = call.output.ndim - len(call.shape("self")) if axis.dim > indexed_dims[-1] else 0
    return SampleAxis(axis.dim + shift, axis.block)


def _index_by_sample(call: OperatorCall) -> SampleAxis | None:
    indices = call.arguments["indices"]
    indexed_dims = [dim for dim, index in enumerate(indices) if index is not None]
    other_axes = call.axes("indices")[1:]
    is_flat = indexed_dims == list(range(len(indexed_dims))) and all(
        len(index.meta["val"].shape) == 1 for index in indices[1:]
    )
    axis = call.axis("self")
    rows = SampleAxis(0)
    return axis if axis == rows and is_flat and all(other in (None, rows) for other in other_axes) else None


def _scatter_part(call: OperatorCall) -> SampleAxis | None:
    """A part of a tensor is replaced: along a dimension other than that of samples, or for all samples."""
    axis = call.axis("self")
    source = call.axis("src")
    (dim,) = call.dims()
    if axis is None or source is None:
        return None
    is_all = "end" in call.arguments and call.shape("src")[dim] == call.shape("self")[dim]
    dropped = len(call.shape("self")) - len(call.shape("src"))
    source_expected = SampleAxis(axis.dim - dropped * (dim < axis.dim), axis.block)
    return axis if source == source_expected and (axis.dim != dim or is_all) else None


def _diagonal(call: OperatorCall) -> SampleAxis | None:
    axis = _along("dim1", "dim2")(call)
    dims = call.dims("dim1") + call.dims("dim2")
    return axis and SampleAxis(axis.dim - sum(dim < axis.dim for dim in dims), axis.block)


def _bucketize(call: OperatorCall) -> SampleAxis | None:
    return call.axis("self") if call.is_constant("boundaries") else None


# Operators that may take a size that is computed from the number of samples: their rules check the output's shape.
_TAKING_SIZES = (
    "view.default",
    "_unsafe_view.default",
    "expand.default",
    "repeat.default",
    "full.default",
    "native_group_norm.default",
)
# Beside these, operators that torch tags as pointwise.
_RULES: dict[str, Rule] = {
    "_to_copy.default": _pointwise,
    "alias.default": _pointwise,
    "copy.default": _pointwise,
    "fill.Scalar": _pointwise,
    "full_like.default": _pointwise,
    "lift_fresh_copy.default": _pointwise,
    "view.default": _view,
    "_unsafe_view.default": _view,
    "permute.default": _permute,
    "unsqueeze.default": _unsqueeze,
    "squeeze.dim": _squeeze,
    "squeeze.dims": _squeeze,
    "expand.default": _expand,
    "repeat.default": _repeat,
    "full.default": _same_for_all_samples,
    "slice.Tensor": _slice,
    "cat.default": _cat,
    "split_with_sizes.default": _along("dim"),
    "split.Tensor": _along("dim"),
    "glu.default": _along("dim"),
    "_softmax.default": _along("dim"),
    "_log_softmax.default": _along("dim"),
    "cumsum.default": _along("dim"),
    "cumprod.default": _along("dim"),
    "logcumsumexp.default": _along("dim"),
    "sort.default": _along("dim"),
    "sort.stable": _along("dim"),
    "topk.default": _along("dim"),
    "flip.default": _along("dims"),
    "roll.default": _along("dims"),
    "select.int": _reduction,
    "unbind.int": _reduction,
    "sum.dim_IntList": _reduction,
    "mean.dim": _reduction,
    "prod.dim_int": _reduction,
    "logsumexp.default": _reduction,
    "amax.default": _reduction,
    "amin.default": _reduction,
    "max.dim": _reduction,
    "min.dim": _reduction,
    "argmax.default": _reduction,
    "argmin.default": _reduction,
    "any.dim": _reduction,
    "any.dims": _reduction,
    "all.dim": _reduction,
    "all.dims": _reduction,
    "median.dim": _reduction,
    "kthvalue.default": _reduction,
    "var.correction": _reduction,
    "std.correction": _reduction,
    "var_mean.correction": _reduction,
    "linalg_vector_norm.default": _reduction,
    "mm.default": _matmul("self", "mat2"),
    "bmm.default": _matmul("self", "mat2"),
    "addmm.default": _matmul("mat1", "mat2"),
    "baddbmm.default": _matmul("batch1", "batch2"),
    "_trilinear.default": _trilinear,
    "native_layer_norm.default": _layer_norm,
    "_native_batch_norm_legit_no_training.default": _of_channels,
    "native_group_norm.default": _of_channels,
    "convolution.default": _of_channels,
    "avg_pool2d.default": _of_channels,
    "max_pool2d_with_indices.default": _of_channels,
    "_adaptive_avg_pool2d.default": _of_channels,
    "constant_pad_nd.default": _pad,
    "_scaled_dot_product_flash_attention_for_cpu.default": _attention,
    "gather.default": _gather,
    "scatter.src": _gather,
    "scatter.value": _gather,
    "scatter_add.default": _gather,
    "index_select.default": _index_select,
    "index.Tensor": _index,
    "embedding.default": _embedding,
    "slice_scatter.default": _scatter_part,
    "select_scatter.default": _scatter_part,
    "diagonal.default": _diagonal,
    "bucketize.Tensor": _bucketize,
}
